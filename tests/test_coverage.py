"""The coverage objectives against loops written from the definitions, hand values, who may speak of whom, gradients."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objectives import layout, random_routing, rows_of_documents, segments_of, slots_of

from remoe_cli import recipe
from remoe_cli.objectives import OBJECTIVES
from remoe_cli.objectives.coverage import membership, missed
from remoe_cli.objectives.decayed_coverage import decayed
from remoe_cli.objectives.remoe import Routing, Segments
from remoe_cli.recipe import Objective

NAMES = ("coverage-temporal", "coverage-spatio-temporal", "spatio-only", "decayed-coverage")
HEADLESS = [name for name in NAMES if name != "spatio-only"]


def with_heads(routing: Routing, kinds=("temporal", "spatio"), seed=50) -> Routing:
    shape, dtype = routing.logp_LNE.shape, routing.logp_LNE.dtype
    generator = torch.Generator().manual_seed(seed)
    drawn = {kind: torch.randn(shape, generator=generator, dtype=dtype).softmax(-1) for kind in ("temporal", "spatio")}
    return routing._replace(**{f"{kind}_LNE": drawn[kind] for kind in kinds})


def value(name, routing, segments, wanted) -> torch.Tensor:
    return OBJECTIVES[name].terms(wanted)["coverage"](routing, segments)


def slow_score(name, p, temporal, spatio, layer, document, t, decay):
    """What is known of (layer, t) before it runs, one number an expert. t: place in the document."""
    now, before, experts = document[t], document[t - 1], range(len(p[layer][0]))
    score = [0.0 for _ in experts]
    for e in experts:
        if name in ("coverage-temporal", "coverage-spatio-temporal"):
            score[e] += p[layer][before][e]
        if name == "decayed-coverage":
            score[e] += sum(decay**i * p[layer][document[t - 1 - i]][e] for i in range(t))
        if name != "spatio-only" and temporal:
            score[e] += temporal[layer][before][e]
        if name in ("coverage-spatio-temporal", "spatio-only") and spatio:
            score[e] += spatio[layer - 1][now][e] if layer else spatio[-1][before][e]
    return score


def slow_coverage(name, routing, documents, wanted) -> float:
    p = routing.logp_LNE.exp().tolist()
    temporal, spatio = (None if t is None else t.tolist() for t in (routing.temporal_LNE, routing.spatio_LNE))
    total = 0.0
    for layer in range(len(p)):
        for document in documents:
            for t in range(1, len(document)):
                score = slow_score(name, p, temporal, spatio, layer, document, t, wanted.decay)
                theta = sorted(score, reverse=True)[min(wanted.cache, len(score)) - 1]
                for e, probability in enumerate(p[layer][document[t]]):
                    total += probability * (1 - 1 / (1 + math.exp(-(score[e] - theta) / wanted.tau)))
    return total / len(p)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    rows=rows_of_documents,
    left=st.booleans(),
    layers=st.integers(1, 3),
    experts=st.integers(2, 6),
    cache=st.integers(1, 7),
    decay=st.sampled_from([0.0, 0.5, 0.9]),
    heads=st.booleans(),
    seed=st.integers(0, 99),
)
def test_every_objective_equals_its_slow_loop(name, rows, left, layers, experts, cache, decay, heads, seed):
    document_BT = layout(rows, max(1, max(map(sum, rows)) + 2), left)
    routing = random_routing(layers, document_BT.numel(), experts, 1, seed)
    routing = with_heads(routing) if heads or name == "spatio-only" else routing
    wanted = Objective(name=name, cache=cache, tau=0.1, decay=decay)
    slow = slow_coverage(name, routing, slots_of(document_BT), wanted)
    assert float(value(name, routing, Segments.of(document_BT), wanted)) == pytest.approx(slow, rel=1e-9, abs=1e-9)


def test_membership_and_what_is_missed_by_hand():
    scores, target = torch.tensor([[0.5, 0.2, 0.4, 0.1]]), torch.tensor([[0.1, 0.6, 0.2, 0.1]])
    soft = membership(scores, 2, 0.1)[0].tolist()  # theta is .4, so (s - theta)/tau is 1, -2, 0, -3
    assert soft == pytest.approx([0.7310586, 0.1192029, 0.5, 0.0474259], abs=1e-6)
    by_hand = 0.1 * 0.2689414 + 0.6 * 0.8807971 + 0.2 * 0.5 + 0.1 * 0.9525741
    assert float(missed(scores, target, 2, 0.1)) == pytest.approx(by_hand, abs=1e-6)
    hard = membership(scores, 2, 1e-4)[0].tolist()
    assert hard == pytest.approx([1, 0, 0.5, 0], abs=1e-6)  # the last to be kept is at the threshold itself
    assert membership(scores, 9, 0.1).min() == 0.5  # more slots than experts: every one is kept


def test_two_tokens_two_layers_by_hand():
    """One expert is kept, with tau so small that it counts 1/2 and every other 0."""
    p = torch.tensor([[[0.9, 0.1], [0.2, 0.8]], [[0.4, 0.6], [0.7, 0.3]]], dtype=torch.float64)
    temporal = torch.tensor([[[0.05, 0.95], [0.5, 0.5]], [[0.9, 0.1], [0.5, 0.5]]], dtype=torch.float64)
    spatio = torch.tensor([[[0.5, 0.5], [0.0, 1.0]], [[0.8, 0.2], [0.5, 0.5]]], dtype=torch.float64)
    routing, segments = Routing(p.log(), p.log(), torch.zeros(2, 2, 1).long()), segments_of(2)
    wanted = Objective(cache=1, tau=1e-5)
    # P of the first token: experts 0 and 1 lead; missed of the second's P: 1 - .2/2 and 1 - .3/2
    assert float(value("coverage-temporal", routing, segments, wanted)) == pytest.approx((0.9 + 0.85) / 2)
    routing = routing._replace(temporal_LNE=temporal)  # sums .95, 1.05 and 1.3, .7: experts 1 and 0
    assert float(value("coverage-temporal", routing, segments, wanted)) == pytest.approx((0.6 + 0.65) / 2)
    # + .8, .2 of layer 2 at token 1, and + 0, 1 of layer 1 at token 2: experts 0 and 1
    routing = routing._replace(spatio_LNE=spatio)
    assert float(value("coverage-spatio-temporal", routing, segments, wanted)) == pytest.approx((0.9 + 0.85) / 2)


@pytest.mark.parametrize("name", NAMES)
def test_a_head_learns_only_from_what_it_speaks_of(name):
    """Two documents of 4 and 3 tokens and one of 1: which head rows the loss depends on."""
    segments, wanted = segments_of(4, 3, 1), Objective(name=name, cache=2)
    routing = with_heads(random_routing(3, 8, 6, 2))
    heads = {kind: getattr(routing, f"{kind}_LNE").requires_grad_() for kind in recipe.OBJECTIVES[name]}
    value(name, routing, segments, wanted).backward()
    for kind, head in heads.items():
        felt = head.grad.abs().sum(-1) > 0
        expected = torch.zeros(3, 8, dtype=torch.bool)
        for first, n in ((0, 4), (4, 3), (7, 1)):
            if kind == "temporal":
                expected[:, first : first + n - 1] = True  # the last token of a document has no successor
            else:
                expected[:-1, first + 1 : first + n] = True  # the next layer, same token
                expected[-1, first : first + n - 1] = True  # the first layer, next token
        assert torch.equal(felt, expected), kind
    unread = {"temporal", "spatio"} - set(heads)
    plain = value(name, routing._replace(**{f"{kind}_LNE": None for kind in unread}), segments, wanted)
    assert plain.item() == value(name, routing, segments, wanted).item()


@pytest.mark.parametrize("detach", [False, True])
@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_equals_finite_differences(name, heads, detach):
    if name == "spatio-only" and not heads:
        pytest.skip("it is its head")
    segments, wanted = segments_of(5, 1, 4), Objective(name=name, cache=3, tau=0.2, detach_target=detach)
    fixed = random_routing(2, 10, 6, 2)
    drawn = with_heads(fixed)
    logits = [t.detach().clone().requires_grad_() for t in (fixed.logp_LNE, drawn.temporal_LNE, drawn.spatio_LNE)]

    def loss(p, temporal, spatio):
        routing = fixed._replace(logp_LNE=torch.log_softmax(p, -1))
        if heads:
            routing = routing._replace(temporal_LNE=temporal.softmax(-1), spatio_LNE=spatio.softmax(-1))
        return value(name, routing, segments, wanted)

    if not detach:
        assert torch.autograd.gradcheck(loss, logits, eps=1e-7, atol=1e-6)
        return
    frozen = torch.log_softmax(logits[0], -1).exp().detach()[:, 1:]  # a constant target, by another way

    def slowly(p, temporal, spatio):
        total = 0.0
        routing = fixed._replace(logp_LNE=torch.log_softmax(p, -1))
        rows = [t.tolist() for t in (routing.logp_LNE.exp(), temporal.softmax(-1), spatio.softmax(-1))]
        heads_rows = rows[1:] if heads else [None, None]
        for layer in range(2):
            for document in ([0, 1, 2, 3, 4], [5], [6, 7, 8, 9]):
                for t in range(1, len(document)):
                    score = slow_score(name, rows[0], *heads_rows, layer, document, t, wanted.decay)
                    theta = sorted(score, reverse=True)[2]
                    for e, q in enumerate(frozen[layer, document[t] - 1].tolist()):
                        total += q * (1 - 1 / (1 + math.exp(-(score[e] - theta) / 0.2))) / 2
        return total

    found = torch.autograd.grad(loss(*logits), logits, allow_unused=True)
    with torch.no_grad():
        for tensor, gradient in zip(logits, found, strict=True):
            direction = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            moved = [[t + s * 1e-6 * direction if t is tensor else t for t in logits] for s in (1, -1)]
            slope = (slowly(*moved[0]) - slowly(*moved[1])) / 2e-6
            assert (0.0 if gradient is None else float((gradient * direction).sum())) == pytest.approx(slope, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_packed_rows_equal_their_documents_alone(name):
    lengths, wanted = [5, 1, 33, 17, 2], Objective(name=name, cache=3, decay=0.95)
    routing, start, alone = with_heads(random_routing(3, sum([5, 1, 33, 17, 2]), 8, 2)), 0, 0.0
    for n in lengths:
        part = Routing(*(tensor[:, start : start + n] for tensor in routing))
        alone += float(value(name, part, segments_of(n), wanted))
        start += n
    assert float(value(name, routing, segments_of(*lengths), wanted)) == pytest.approx(alone, rel=1e-12)
    assert OBJECTIVES[name].weights(segments_of(*lengths), wanted)["coverage"] == sum(lengths) - len(lengths)


@settings(max_examples=30, deadline=None)
@given(rows=rows_of_documents, left=st.booleans(), decay=st.sampled_from([0.0, 0.3, 0.8, 0.999]))
def test_the_decayed_past_equals_a_running_sum(rows, left, decay):
    document_BT = layout(rows, max(1, max(map(sum, rows)) + 1), left)
    p_LNE = random_routing(2, document_BT.numel(), 3, 1).logp_LNE.exp()
    found = decayed(p_LNE, Segments.of(document_BT), decay)
    for document in slots_of(document_BT):
        running = torch.zeros(2, 3, dtype=torch.float64)
        for n in document:
            running = decay * running + p_LNE[:, n]
            torch.testing.assert_close(found[:, n], running, rtol=1e-12, atol=1e-12)


def test_a_long_past_loses_nothing_that_counts():
    p_LNE = random_routing(1, 3000, 4, 1, dtype=torch.float32).logp_LNE.exp()
    found, running = decayed(p_LNE, segments_of(3000), 0.9), torch.zeros(4, dtype=torch.float64)
    for n in range(3000):
        running = 0.9 * running + p_LNE[0, n].double()
    torch.testing.assert_close(found[0, -1].double(), running, rtol=1e-6, atol=0)


def test_without_decay_and_heads_the_three_headless_scores_are_one():
    routing, segments = random_routing(2, 12, 8, 2), segments_of(7, 5)
    found = {float(value(name, routing, segments, Objective(cache=3, decay=0.0))) for name in HEADLESS}
    assert len(found) == 1


@pytest.mark.parametrize("name", NAMES)
def test_terms_weights_and_scales_have_the_same_names(name):
    wanted = Objective(name=name, coverage=0.3, scale=2.0, reuse_warmup=0.5)
    names, found = {"trust", "coverage", "smooth", "lag", "window"}, OBJECTIVES[name]
    assert set(found.terms(wanted)) == set(found.scales(wanted, 1, 4)) == names
    assert set(found.weights(segments_of(3), wanted)) == {"ce", *names}
    assert found.scales(wanted, 1, 4)["coverage"] == pytest.approx(0.3)
    assert found.scales(wanted, 4, 4)["coverage"] == pytest.approx(0.6)


def test_the_recipe_knows_every_objective():
    assert set(recipe.OBJECTIVES) == set(OBJECTIVES)

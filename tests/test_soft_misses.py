"""The soft-misses objective against a loop and its hard limit; distillation against a loop; the base as a teacher."""

import math

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objectives import layout, random_routing, rows_of_documents, segments_of, slots_of
from test_resident_mass import slow_contents
from training import endless, load, recipe_of, step_gradients

from remoe_cli.families import find_gates
from remoe_cli.objectives import OBJECTIVES
from remoe_cli.objectives.remoe import distillation, Routing, Segments
from remoe_cli.objectives.soft_misses import misses
from remoe_cli.recipe import Objective
from remoe_cli.train.teacher import Teacher
from remoe_cli.train.trainer import train


@settings(max_examples=40, deadline=None)
@given(rows=rows_of_documents, left=st.booleans(), experts=st.integers(2, 8), slots=st.integers(1, 9), data=st.data())
def test_its_value_equals_the_slow_loop(rows, left, experts, slots, data):
    k, tau = data.draw(st.integers(1, experts)), data.draw(st.sampled_from([0.05, 0.25, 2.0]))
    document_BT = layout(rows, max(1, max(map(sum, rows)) + 1), left)
    routing = random_routing(2, document_BT.numel(), experts, k, seed=data.draw(st.integers(0, 99)))
    documents = slots_of(document_BT)
    held = slow_contents(routing, documents, "lru", "forced", slots)
    total = 0.0
    for layer, logp_NE in enumerate(routing.logp_LNE.tolist()):
        for document in documents:
            for n in document[1:] if k < experts else ():
                ranked = sorted(logp_NE[n], reverse=True)
                theta = (ranked[k - 1] + ranked[k]) / 2
                outside = [x for e, x in enumerate(logp_NE[n]) if e not in held[layer, n]]
                total += sum(1 / (1 + math.exp(min(700, (theta - x) / tau))) for x in outside) / k / 2
    wanted = Objective(name="soft-misses", cache=slots, misses_tau=tau)
    assert float(misses(routing, Segments.of(document_BT), wanted)) == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_a_narrow_threshold_counts_the_misses():
    segments = segments_of(30)
    logp = random_routing(2, 30, 12, 3).logp_LNE
    routing = Routing(logp, logp, logp.topk(3, -1).indices)  # the model runs its likeliest experts
    held = slow_contents(routing, [list(range(30))], "lru", "forced", 5)
    chosen = routing.choice_LNK.tolist()
    missed = sum(e not in held[layer, n] for layer in range(2) for n in range(1, 30) for e in chosen[layer][n])
    value = float(misses(routing, segments, Objective(cache=5, misses_tau=1e-4)))
    assert value == pytest.approx(missed / 2 / 3, rel=1e-3)
    assert float(misses(routing, segments, Objective(cache=12, misses_tau=1e-4))) < value


def test_its_gradient_equals_finite_differences():
    segments, routing = segments_of(6, 5), random_routing(1, 11, 6, 2)
    logits = routing.logp_LNE.clone().requires_grad_()

    def value(x):
        logp = torch.log_softmax(x, -1)
        return misses(Routing(logp, logp, routing.choice_LNK), segments, Objective(cache=3, misses_tau=0.5))

    assert torch.autograd.gradcheck(value, (logits,), eps=1e-7, atol=1e-6)


def test_its_terms_weights_and_scales_have_the_same_names():
    wanted, found = Objective(name="soft-misses", misses=0.4, scale=2.0), OBJECTIVES["soft-misses"]
    names = {"trust", "misses", "smooth", "lag", "window"}
    scales = found.scales(wanted, 10, 10)
    assert set(found.terms(wanted)) == set(scales) == names and scales["misses"] == pytest.approx(0.8)
    assert set(found.weights(segments_of(3), wanted)) == {"ce", *names}


# --- distillation -----------------------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(rows=rows_of_documents, seed=st.integers(0, 99), masked=st.booleans())
def test_distillation_equals_its_slow_loop(rows, seed, masked):
    document_BT = layout(rows, max(1, max(map(sum, rows)) + 1))
    generator = torch.Generator().manual_seed(seed)
    model, base = torch.randn(2, *document_BT.shape, 5, generator=generator, dtype=torch.float64)
    learned = torch.rand(document_BT.shape, generator=generator) < 0.5 if masked else None
    p, q = (x.softmax(-1).flatten(0, 1).tolist() for x in (base, model))
    slow = 0.0
    for document in slots_of(document_BT):
        for n in document[:-1]:
            if learned is None or bool(learned.flatten()[n + 1]):
                slow += sum(a * math.log(a / b) for a, b in zip(p[n], q[n], strict=True))
    fast = distillation(model, base, Segments.of(document_BT), learned)
    assert float(fast) == pytest.approx(slow, abs=1e-9)


@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_the_teacher_is_the_base_whatever_was_trained(model_type):
    model = load(model_type)
    gates = find_gates(model)
    inputs = {"input_ids": torch.arange(12)[None]}
    with torch.no_grad():
        base = model(**inputs).logits
    teacher = Teacher(model, {name: p for gate in gates for name, p in gate.parameters.items()})
    moved = []
    with torch.no_grad():
        for gate in gates:
            for parameter in gate.parameters.values():
                parameter.add_(torch.randn_like(parameter))
                moved.append(parameter.clone())
        tuned = model(**inputs).logits
        assert torch.equal(teacher.logits(inputs), base) and not torch.equal(tuned, base)
        assert torch.equal(model(**inputs).logits, tuned)


def test_distillation_starts_at_nothing_and_holds_the_model_to_the_base():
    model = load("deepseek_v2")
    stats, gradients = step_gradients(
        model, [next(iter(endless(20, 50)))], recipe_of(Objective(target="base", trust=0.0, scale=0.0), steps=1)
    )
    assert (
        stats["distillation"] == pytest.approx(0, abs=1e-6)
        and stats["ce"] > 1
        and stats["loss"] == pytest.approx(0, abs=1e-6)
    )
    assert all(float(gradient.abs().max()) < 1e-4 for gradient in gradients.values())
    ends = {}
    for target in ("text", "base"):
        model = load("deepseek_v2")
        wanted = Objective(name="soft-misses", target=target, trust=0.0, scale=4.0, cache=5)
        trained = train(model, find_gates(model), endless(20, 50), recipe_of(wanted, steps=12, lr=5e-3))
        ends[target] = trained.steps
    last = ends["base"][-1].terms
    assert "distillation" not in ends["text"][-1].terms and last["distillation"] > 1e-4
    assert last["misses"] < ends["base"][0].terms["misses"]

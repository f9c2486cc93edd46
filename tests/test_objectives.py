"""The losses against slow loops written from the paper's definitions, hand values, zero cases, finite differences."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_losses import slow_cross_entropy, slow_terms
from torch import Tensor

from remoe_cli.families import probabilities
from remoe_cli.families.scores import SOFTMAX
from remoe_cli.objectives import OBJECTIVES, remoe
from remoe_cli.objectives.remoe import Routing, Segments
from remoe_cli.recipe import Objective

NAMES = ("trust", "reuse", "smooth", "lag", "window")


# --- helpers ----------------------------------------------------------------------------------------------------------


def layout(rows, slots, left=False) -> Tensor:
    """Rows of document lengths -> document numbers [B, T], padded right (or left)."""
    document_BT = torch.full((len(rows), slots), -1)
    for b, lengths in enumerate(rows):
        numbers = [i for i, n in enumerate(lengths) for _ in range(n)]
        at = slots - len(numbers) if left else 0
        document_BT[b, at : at + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
    return document_BT


def slots_of(document_BT) -> list[list[int]]:
    found: dict[tuple[int, int], list[int]] = {}
    for b, row in enumerate(document_BT.tolist()):
        for t, number in enumerate(row):
            if number >= 0:
                found.setdefault((b, number), []).append(b * len(row) + t)
    return list(found.values())


def random_routing(layers, slots, experts, k, seed=0, dtype=torch.float64) -> Routing:
    generator = torch.Generator().manual_seed(seed)
    logp = torch.log_softmax(2 * torch.randn(layers, slots, experts, generator=generator, dtype=dtype), -1)
    ref = torch.log_softmax(logp + torch.randn(layers, slots, experts, generator=generator, dtype=dtype), -1)
    choice = torch.rand(layers, slots, experts, generator=generator).topk(k, -1).indices
    return Routing(logp, ref, choice)


def means(routing, segments, recipe) -> dict[str, float]:
    weights = remoe.weights(segments, recipe)
    return {name: float(term(routing, segments)) / (weights[name] or 1) for name, term in remoe.terms(recipe).items()}


def close(a: dict, b: dict, **tolerance) -> None:
    assert set(a) == set(b) == set(NAMES)
    for name in NAMES:
        assert a[name] == pytest.approx(b[name], **tolerance), name


# --- twins ------------------------------------------------------------------------------------------------------------

rows_of_documents = st.lists(st.lists(st.integers(1, 12), min_size=0, max_size=4), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(
    rows=rows_of_documents,
    pad=st.integers(0, 3),
    left=st.booleans(),
    layers=st.integers(1, 3),
    experts=st.integers(2, 6),
    data=st.data(),
)
def test_every_term_equals_its_slow_loop(rows, pad, left, layers, experts, data):
    k = data.draw(st.integers(1, experts))
    lags = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4, unique=True)))
    recipe = Objective(lags=lags, window_tokens=data.draw(st.integers(1, 5)), reuse_tokens=data.draw(st.integers(1, 4)))
    document_BT = layout(rows, max(1, max(map(sum, rows)) + pad), left)
    routing = random_routing(layers, document_BT.numel(), experts, k, seed=data.draw(st.integers(0, 99)))
    fast = means(routing, Segments.of(document_BT), recipe)
    slow = slow_terms(
        routing.logp_LNE.exp().tolist(),
        routing.reference_LNE.exp().tolist(),
        routing.choice_LNK.tolist(),
        slots_of(document_BT),
        recipe,
    )
    close(fast, slow, rel=1e-9, abs=1e-9)


@settings(max_examples=30, deadline=None)
@given(rows=rows_of_documents, seed=st.integers(0, 99), left=st.booleans(), masked=st.booleans())
def test_cross_entropy_and_overlap_equal_their_slow_loops(rows, seed, left, masked):
    document_BT = layout(rows, max(1, max(map(sum, rows)) + 1), left)
    segments, documents = Segments.of(document_BT), slots_of(document_BT)
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(*document_BT.shape, 7, generator=generator, dtype=torch.float64)
    ids = torch.randint(0, 7, document_BT.shape, generator=generator)
    learned = torch.rand(document_BT.shape, generator=generator) < 0.5 if masked else torch.ones_like(ids).bool()
    slow, count = slow_cross_entropy(
        logits.flatten(0, 1).tolist(), ids.flatten().tolist(), learned.flatten().tolist(), documents
    )
    given = learned if masked else None
    assert float(remoe.cross_entropy(logits, ids, segments, given)) == pytest.approx(slow, abs=1e-9)
    weights = remoe.weights(segments, Objective(), given)
    assert weights["ce"] == count and weights["reuse"] == weights["smooth"] == sum(len(d) - 1 for d in documents)

    choice = random_routing(2, document_BT.numel(), 5, 3, seed).choice_LNK
    shared = [
        len(set(layer[before]) & set(layer[now])) / 3
        for layer in choice.tolist()
        for slots in documents
        for before, now in pairwise(slots)
    ]
    assert float(remoe.overlap(choice, segments)) == pytest.approx(sum(shared) / 2, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(rows=rows_of_documents, pad=st.integers(0, 2), left=st.booleans())
def test_segments_number_documents_and_positions_in_order(rows, pad, left):
    document_BT = layout(rows, max(1, max(map(sum, rows)) + pad), left)
    segments, documents = Segments.of(document_BT), slots_of(document_BT)
    assert segments.length_S.tolist() == [len(slots) for slots in documents]
    expected_document, expected_position = np.full(document_BT.numel(), -1), np.zeros(document_BT.numel(), int)
    for number, slots in enumerate(documents):
        expected_document[slots], expected_position[slots] = number, range(len(slots))
    assert segments.document_N.tolist() == expected_document.tolist()
    assert segments.position_N.tolist() == expected_position.tolist()
    for lag in (1, 3, 50):
        pairs = [d >= 0 and p >= lag for d, p in zip(expected_document, expected_position, strict=True)][lag:]
        assert segments.pairs(lag).tolist() == pairs


# --- hand values ------------------------------------------------------------------------------------------------------


def two_experts(*first: float) -> Tensor:
    """[1, N, 2] log probabilities from the first expert's probability at each slot."""
    return torch.tensor([[[a, 1 - a] for a in first]], dtype=torch.float64).log()


def segments_of(*lengths: int) -> Segments:
    return Segments.of(layout([list(lengths)], sum(lengths)))


def test_hand_values():
    logp, segments = two_experts(0.75, 0.25), segments_of(2)
    half = two_experts(0.5, 0.5)
    assert float(remoe.trust(logp, half, segments)) / 2 == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert float(remoe.smooth(logp, segments)) == pytest.approx(0.5 * math.log(3))
    assert float(remoe.reuse(logp, torch.tensor([[[0], [1]]]), segments)) == pytest.approx(math.log(4), rel=1e-6)
    assert float(remoe.reuse(logp, torch.tensor([[[1], [0]]]), segments)) == pytest.approx(math.log(4 / 3), rel=1e-6)
    assert float(remoe.window(logp, segments, 2)) == pytest.approx(math.log(2))
    assert float(remoe.window(logp, segments, 1)) == pytest.approx(math.log(4) - 0.75 * math.log(3))


def test_lag_keeps_its_divisor_for_early_tokens():
    logp, segments = two_experts(0.75, 0.25), segments_of(2)
    assert float(remoe.lag(logp, segments, (1, 2, 4, 8, 16))) == pytest.approx(0.5 * math.log(3) / 5)


def test_reuse_takes_the_logarithm_of_the_mean_of_each_document():
    choice = torch.zeros(1, 5, 1, dtype=torch.int64)
    one = remoe.reuse(two_experts(0.5, 0.1, 0.4), choice[:, :3], segments_of(3)) / 2
    assert float(one) == pytest.approx(-math.log((0.1 + 0.4) / 2), rel=1e-6)  # not the mean of -log
    two = remoe.reuse(two_experts(0.5, 0.1, 0.4, 0.5, 0.9), choice, segments_of(3, 2)) / 3
    assert float(two) == pytest.approx((2 * -math.log(0.25) - math.log(0.9)) / 3, rel=1e-6)  # not -log of one mean


def test_reuse_takes_the_logarithm_of_each_layer():
    logp = torch.cat([two_experts(0.5, 0.2), two_experts(0.5, 0.8)])
    value = remoe.reuse(logp, torch.zeros(2, 2, 1, dtype=torch.int64), segments_of(2))
    assert float(value) == pytest.approx((-math.log(0.2) - math.log(0.8)) / 2, rel=1e-6)


@pytest.mark.parametrize("k", [1, 2, 6])
def test_reuse_never_falls_below_log_k_and_reaches_it(k):
    choice = torch.arange(k).expand(2, 9, k)
    logits = torch.full((2, 9, 12), -40.0, dtype=torch.float64)
    logits[..., :k] = 0.0
    lowest = remoe.reuse(torch.log_softmax(logits, -1), choice, segments_of(9)) / 8
    assert float(lowest) == pytest.approx(math.log(k), abs=1e-6)
    random = random_routing(2, 9, 12, k)
    assert float(remoe.reuse(random.logp_LNE, choice, segments_of(9))) / 8 > math.log(k)


def test_windows_restart_at_each_document_and_drop_the_remainder():
    # documents of 3, 1 and 4 tokens, windows of 2: slots (0,1), not 2; none; (4,5), (6,7)
    logp = two_experts(0.75, 0.25, 0.9, 0.3, 0.5, 0.5, 0.9, 0.1)
    segments, recipe = segments_of(3, 1, 4), Objective(window_tokens=2)
    assert remoe.weights(segments, recipe)["window"] == 2 + 3
    assert float(remoe.window(logp, segments, 2)) == pytest.approx(5 * math.log(2))
    shifted = float(remoe.window(logp, segments_of(8), 2))
    assert shifted < 7 * math.log(2) - 1e-3


def test_masked_cross_entropy_of_equal_logits_is_log_v_a_learned_token():
    learned = torch.tensor([[True, False, True, True, False, True]])  # a document's first is never predicted
    segments, ids = Segments.of(torch.tensor([[0, 0, 0, 1, 1, -1]])), torch.zeros(1, 6, dtype=torch.int64)
    assert float(remoe.cross_entropy(torch.zeros(1, 6, 50), ids, segments, learned)) == pytest.approx(math.log(50))
    assert remoe.weights(segments, Objective(), learned)["ce"] == 1.0
    assert remoe.weights(segments, Objective())["ce"] == 3.0


def test_uniform_gates_have_zero_distance_and_full_entropy():
    logp = torch.full((3, 40, 8), -math.log(8), dtype=torch.float64)
    choice = torch.arange(2).expand(3, 40, 2)
    found = means(Routing(logp, logp, choice), segments_of(40), Objective())
    close(found, {"trust": 0, "reuse": math.log(8), "smooth": 0, "lag": 0, "window": math.log(8)}, abs=1e-6)
    loss = remoe.cross_entropy(torch.zeros(1, 40, 50), torch.zeros(1, 40, dtype=torch.int64), segments_of(40))
    assert float(loss) == pytest.approx(39 * math.log(50), rel=1e-6)


# --- borders, padding, short rows -------------------------------------------------------------------------------------


@pytest.mark.parametrize("left", [False, True])
def test_a_packed_row_equals_its_documents_alone_and_padding_counts_nothing(left):
    lengths, recipe = [5, 1, 33, 17, 2], Objective()
    routing = random_routing(3, sum(lengths), 8, 2)
    whole = segments_of(*lengths)
    alone = dict.fromkeys(NAMES, 0.0)
    weight = dict.fromkeys(remoe.weights(whole, recipe), 0.0)
    start = 0
    for n in lengths:
        part = Routing(*(tensor[:, start : start + n] for tensor in routing[:3]))
        for name, term in remoe.terms(recipe).items():
            alone[name] += float(term(part, segments_of(n)))
        for name, value in remoe.weights(segments_of(n), recipe).items():
            weight[name] += value
        start += n
    assert weight == remoe.weights(whole, recipe)
    close({name: float(term(routing, whole)) for name, term in remoe.terms(recipe).items()}, alone, rel=1e-12)

    padded = Segments.of(layout([lengths], sum(lengths) + 9, left))
    noise = random_routing(3, sum(lengths) + 9, 8, 2, seed=1)
    at = slice(9, None) if left else slice(0, sum(lengths))
    for tensor, real in zip(noise[:3], routing[:3], strict=True):
        tensor[:, at] = real
    close(means(noise, padded, recipe), means(routing, whole, recipe), rel=1e-12)


def test_two_rows_are_not_one_document_even_with_the_same_number():
    segments = Segments.of(torch.zeros(2, 3, dtype=torch.int64))
    assert segments.length_S.tolist() == [3, 3]
    assert segments.pairs(1).tolist() == [True, True, False, True, True]


@pytest.mark.parametrize(
    "rows, slots", [([[1]], 1), ([[1], [1]], 1), ([[3]], 3), ([[], [2]], 2), ([[]], 4), ([[1, 1]], 3)]
)
def test_rows_shorter_than_a_lag_or_a_window_are_finite(rows, slots):
    segments = Segments.of(layout(rows, slots))
    routing = random_routing(2, len(rows) * slots, 4, 2)
    logits = routing.logp_LNE.clone().requires_grad_()
    routing = routing._replace(logp_LNE=torch.log_softmax(logits, -1))
    total = sum(term(routing, segments) for term in remoe.terms(Objective()).values())
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(logits.grad).all()
    assert torch.isfinite(remoe.overlap(routing.choice_LNK, segments))
    empty = remoe.cross_entropy(torch.randn(len(rows), slots, 5), torch.zeros(len(rows), slots).long(), segments)
    assert torch.isfinite(empty)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_log_probabilities_are_fp32_and_agree_with_probabilities():
    logits = torch.randn(5, 16, dtype=torch.bfloat16)
    logp = SOFTMAX.log_probabilities(logits)
    assert logp.dtype == torch.float32
    torch.testing.assert_close(logp.exp(), probabilities(logits))
    assert SOFTMAX.log_probabilities(logits.double()).dtype == torch.float64


def test_saturated_gates_stay_finite():
    logits = (torch.randn(2, 40, 8) * 3000).requires_grad_()
    logp = torch.log_softmax(logits, -1)
    routing = Routing(logp, torch.log_softmax(torch.randn(2, 40, 8) * 3000, -1), logits.topk(2, -1).indices)
    total = sum(term(routing, segments_of(40)) for term in remoe.terms(Objective()).values())
    total.backward()
    assert torch.isfinite(total) and torch.isfinite(logits.grad).all()


def test_nearly_equal_distributions_keep_a_distance_that_is_small_and_not_negative():
    logits = torch.randn(1, 1, 64).repeat(1, 2, 1)
    logits[0, 1] += 1e-4 * torch.randn(64)
    fast = float(remoe.smooth(torch.log_softmax(logits, -1), segments_of(2)))
    exact = float(remoe.smooth(torch.log_softmax(logits.double(), -1), segments_of(2)))
    assert 0 < exact < 1e-7 and fast == pytest.approx(exact, rel=0.02)


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_gradients_equal_finite_differences(name):
    recipe = Objective(lags=(1, 2, 4), window_tokens=3)
    segments = Segments.of(layout([[4, 1, 3], [7]], 9))
    fixed = random_routing(2, 18, 5, 2)
    term = remoe.terms(recipe)[name]

    def value(logits):
        return term(fixed._replace(logp_LNE=torch.log_softmax(logits, -1)), segments)

    assert torch.autograd.gradcheck(value, (fixed.logp_LNE.clone().requires_grad_(),), atol=1e-7)


def test_cross_entropy_gradient_equals_finite_differences():
    segments = Segments.of(layout([[4, 1], [2]], 6))
    ids = torch.randint(0, 5, (2, 6), generator=torch.Generator().manual_seed(0))
    logits = torch.randn(2, 6, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: remoe.cross_entropy(x, ids, segments), (logits,))


def test_smooth_has_gradient_on_both_sides_and_trust_none_on_its_reference():
    logits = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    remoe.smooth(torch.log_softmax(logits, -1), segments_of(2)).backward()
    assert (logits.grad.abs().sum(-1) > 0).all()
    reference = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    value = remoe.trust(torch.log_softmax(logits, -1), torch.log_softmax(reference, -1), segments_of(2))
    value.backward()
    assert reference.grad is None


# --- schedule ---------------------------------------------------------------------------------------------------------


def test_scales_follow_the_papers_warm_ups():
    recipe = Objective()
    first = remoe.scales(recipe, 1, 2000)
    assert first == pytest.approx({
        "trust": 0.45, "reuse": 0.2 / 400, "smooth": 0.05 / 800, "lag": 0.05 / 800, "window": 0.01 / 800,
    })  # fmt: skip
    at_400 = remoe.scales(recipe, 400, 2000)
    assert at_400["reuse"] == 0.2 and at_400["lag"] == pytest.approx(0.025)
    last = {"trust": 0.45, "reuse": 0.2, "smooth": 0.05, "lag": 0.05, "window": 0.01}
    assert remoe.scales(recipe, 800, 2000) == remoe.scales(recipe, 2000, 2000) == last
    assert remoe.scales(recipe, 4, 10)["smooth"] == 0.05  # fractions of the run, so --steps scales them
    assert remoe.ramp(1, 10, 0.0) == 1.0


def test_scale_multiplies_the_locality_terms_only():
    doubled = remoe.scales(Objective(scale=2.0), 2000, 2000)
    assert doubled == pytest.approx({"trust": 0.45, "reuse": 0.4, "smooth": 0.1, "lag": 0.1, "window": 0.02})


def test_every_objective_has_the_three_functions():
    for name, module in OBJECTIVES.items():
        assert module.__name__.endswith(name.replace("-", "_"))
        terms = module.terms(Objective())
        assert set(terms) == set(module.scales(Objective(), 1, 10))
        assert set(terms) | {"ce"} == set(module.weights(segments_of(3), Objective()))

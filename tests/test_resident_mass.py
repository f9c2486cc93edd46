"""The resident-mass objective: its contents against the simulator's slow cache, its value against a loop, its gradient."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_objectives import layout, random_routing, rows_of_documents, segments_of, slots_of

from remoe_cli.cache import ExpertCache
from remoe_cli.objectives import OBJECTIVES, remoe, resident_mass
from remoe_cli.objectives.remoe import Routing, Segments
from remoe_cli.objectives.resident_mass import contents, resident
from remoe_cli.recipe import Objective


def slow_contents(routing: Routing, documents: list[list[int]], policy: str, admission: str, slots: int):
    """{(layer, slot): residents before it}, one cache a layer and document."""
    found = {}
    for layer, (p_NE, choice_NK) in enumerate(zip(routing.logp_LNE.exp().tolist(), routing.choice_LNK.tolist())):
        for document in documents:
            cache = ExpertCache(max(slots, len(choice_NK[0])), policy, n_experts=len(p_NE[0]), admission=admission)
            for n in document:
                found[layer, n] = set(cache.resident)
                touched = sorted(choice_NK[n], key=lambda e: p_NE[n][e])
                cache.step(touched, [p_NE[n][e] for e in touched], p_NE[n])
    return found


@settings(max_examples=40, deadline=None)
@given(
    rows=rows_of_documents,
    left=st.booleans(),
    experts=st.integers(2, 8),
    slots=st.integers(1, 10),
    policy=st.sampled_from(["lru", "lfu", "decayed", "decayed_weight"]),
    admission=st.sampled_from(["forced", "bypass"]),
    data=st.data(),
)
def test_contents_and_value_equal_the_slow_loop(rows, left, experts, slots, policy, admission, data):
    k = data.draw(st.integers(1, experts))
    document_BT = layout(rows, max(1, max(map(sum, rows)) + 2), left)
    routing = random_routing(2, document_BT.numel(), experts, k, seed=data.draw(st.integers(0, 99)))
    wanted = Objective(name="resident-mass", cache=slots, policy=policy, admission=admission)
    segments, documents = Segments.of(document_BT), slots_of(document_BT)
    held = contents(routing, segments, wanted)
    slow = slow_contents(routing, documents, policy, admission, slots)
    for layer, rows_NE in enumerate(held.tolist()):
        for n, row in enumerate(rows_NE):
            assert {e for e, inside in enumerate(row) if inside} == slow.get((layer, n), set())

    p, total = routing.logp_LNE.exp().tolist(), 0.0
    for layer in range(2):
        for document in documents:
            mass = [sum(p[layer][n][e] for e in slow[layer, n]) / k for n in document[1:]]
            total += -sum(1 for _ in mass) * math.log(sum(mass) / len(mass) + 1e-8) / 2 if mass else 0.0
    assert float(resident(routing, segments, wanted)) == pytest.approx(total, rel=1e-9, abs=1e-9)


def test_with_as_many_slots_as_choices_it_is_reuse():
    segments = segments_of(9, 4)
    routing = random_routing(3, 13, 8, 3)
    value = float(resident(routing, segments, Objective(cache=3)))
    assert value == pytest.approx(float(remoe.reuse(routing.logp_LNE, routing.choice_LNK, segments)))
    assert float(resident(routing, segments, Objective(cache=1))) == value  # fewer than K slots serve no token


def test_the_floor_is_log_k_and_nothing_resident_is_finite():
    p = torch.tensor([1 - 3e-9, 1e-9, 1e-9, 1e-9], dtype=torch.float64).log().expand(1, 5, 4)
    certain = Routing(p, p, torch.tensor([0, 1]).expand(1, 5, 2))
    assert float(resident(certain, segments_of(5), Objective(cache=3))) / 4 == pytest.approx(math.log(2))
    never = Routing(p, p, torch.tensor([1, 2]).expand(1, 5, 2))
    value = float(resident(never, segments_of(5), Objective(cache=2))) / 4
    assert math.log(2) < value < -math.log(1e-9) and math.isfinite(value)
    assert float(resident(certain, segments_of(1, 1, 1, 1, 1), Objective())) == 0.0  # no pair at all


def test_the_gradient_equals_finite_differences():
    segments = segments_of(7, 5)
    routing = random_routing(1, 12, 5, 2)
    logits = routing.logp_LNE.clone().requires_grad_()

    def value(x):
        logp = torch.log_softmax(x, -1)
        return resident(Routing(logp, routing.reference_LNE, routing.choice_LNK), segments, Objective(cache=3))

    assert torch.autograd.gradcheck(value, (logits,), eps=1e-7, atol=1e-6)


def test_its_terms_weights_and_scales_have_the_same_names():
    wanted = Objective(name="resident-mass", resident=0.3, scale=2.0, reuse_warmup=0.5)
    found = OBJECTIVES["resident-mass"]
    names = {"trust", "resident", "smooth", "lag", "window"}
    scales = found.scales(wanted, 1, 4)
    assert found is resident_mass and set(found.terms(wanted)) == set(scales) == names
    assert set(found.weights(segments_of(3), wanted)) == {"ce", *names}
    assert scales["resident"] == pytest.approx(0.3) and found.scales(wanted, 4, 4)["resident"] == pytest.approx(0.6)

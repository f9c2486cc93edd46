"""Rerouting inside the model: one pass over text equals a token-by-token twin, and the simulator counts the same."""

from itertools import chain

import numpy as np
import pytest
import tiny_models
import torch
from slow_rerouting import slow_reroute
from tiny_models import EXPERTS, MODEL_TYPES, TOP_K

from remoe_cli.cache import choose, ExpertCache, live_policies, replay
from remoe_cli.cache.reroute import Rule
from remoe_cli.errors import CacheError, DataError, FamilyError
from remoe_cli.families import FAMILIES, find_gates, RouterTap
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.decode_traces import canonical
from remoe_cli.measure.rerouted import measure_rerouted, Rerouter
from remoe_cli.measure.text import measure_rows

SEQUENCE = 24
STRENGTHS = {"cache-prior": 0.3, "max-rank": 5, "threshold": 0.9}


def texts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 120, size=length).tolist() for length in lengths]


DOCUMENTS = texts(24, 9, 15, 24, 10, 7, 24)
PIECES = [24, 9, 15, 24, 10, 7, 7, 17]  # the last document is cut by the end of its row; the last row ends in padding


@pytest.fixture(scope="module", params=MODEL_TYPES)
def model(request, folders):
    found = load_resident(Checkpoint.open(folders(request.param)), torch.float32, "cpu")
    found.set_experts_implementation("eager")
    return found


@pytest.fixture(scope="module")
def qwen(folders):
    return load_resident(Checkpoint.open(folders("qwen3_moe")), torch.float32, "cpu")


def renormalised(model) -> bool:
    return FAMILIES[model.config.model_type].renormalised(model.config.to_dict())


@pytest.mark.parametrize("method", STRENGTHS)
def test_one_pass_equals_one_token_at_a_time(model, method):
    gates = find_gates(model)
    rule = Rule(method, STRENGTHS[method], 1)
    done = measure_rerouted(model, gates, DOCUMENTS, SEQUENCE, 5, rule, capacity=3, batch=2)
    assert np.diff(done.trace.borders).tolist() == PIECES
    losses, hits, misses = [], 0, 0
    read, routers = [*chain(*DOCUMENTS)], [gate.router for gate in gates]
    for begin, end in zip(done.trace.borders[:-1], done.trace.borders[1:], strict=True):
        part = slice(begin, end)
        slow = slow_reroute(model, routers, read[part], method, STRENGTHS[method], 1, 3, renormalised(model))
        assert [[{*layer} for layer in token] for token in done.trace.experts[part].tolist()] == slow.choices
        for token, weights in zip(done.trace.weights[part], slow.weights, strict=True):
            for layer, by_expert in enumerate(weights):
                np.testing.assert_allclose(sorted(token[layer]), sorted(by_expert.values()), rtol=2e-3, atol=1e-6)
        losses += slow.losses
        hits, misses = hits + slow.hits, misses + slow.misses
    assert done.counts[:2] == (hits, misses)
    assert done.text.loss_N.sum() == pytest.approx(sum(losses), rel=1e-5) and done.text.pairs_N.sum() == len(losses)
    assert done.changed > 0.05 * done.trace.experts.size, "nothing was rerouted, so equality would prove little"


def test_off_is_the_stock_model_bit_for_bit(model):
    gates = find_gates(model)
    stock = measure_rows(model, gates, DOCUMENTS, SEQUENCE, 4, batch=2)
    for rule in (None, Rule("cache-prior", 0, 1), Rule("max-rank", TOP_K, 0), Rule("threshold", 0, 0)):
        done = measure_rerouted(model, gates, DOCUMENTS, SEQUENCE, 4, rule, capacity=3, batch=2)
        for ours, theirs in zip(done.text, stock, strict=True):
            assert (ours == theirs).all()
        assert done.changed == 0
    with RouterTap(gates) as tap, torch.inference_mode():
        model(input_ids=torch.tensor([DOCUMENTS[0]]), use_cache=False)
        experts, weights = canonical(tap.take())
    first = slice(0, len(DOCUMENTS[0]))
    assert np.array_equal(done.trace.experts[first], experts)
    np.testing.assert_allclose(done.trace.weights[first].astype(np.float32), weights, rtol=2e-3)


def test_the_hooks_are_gone_afterwards_and_counts_start_anew(qwen):
    gates = find_gates(qwen)
    rule = Rule("cache-prior", 1.0, 0)
    once, again = (measure_rerouted(qwen, gates, DOCUMENTS, SEQUENCE, 3, rule, capacity=3) for _ in range(2))
    assert once.counts == again.counts and once.changed == again.changed > 0
    stock = measure_rows(qwen, gates, DOCUMENTS, SEQUENCE, 3)
    assert stock.loss_N.sum() != once.text.loss_N.sum()
    assert not any(gate.router._forward_hooks for gate in gates)


def test_rows_beyond_those_asked_for_do_not_count(qwen):
    gates = find_gates(qwen)
    rule = Rule("cache-prior", 0.3, 1)
    few = measure_rerouted(qwen, gates, DOCUMENTS, SEQUENCE, 3, rule, capacity=3, batch=2)
    many = measure_rerouted(qwen, gates, DOCUMENTS, SEQUENCE, 99, rule, capacity=3, batch=4)
    assert len(few.text.pairs_N) == 3 and len(many.text.pairs_N) == 5
    assert few.trace.n_tokens == 3 * SEQUENCE and many.trace.n_tokens == sum(map(len, DOCUMENTS))
    assert np.array_equal(few.trace.experts, many.trace.experts[: few.trace.n_tokens])


@pytest.mark.parametrize("admission", ["forced", "bypass"])
def test_the_simulator_counts_what_the_runner_counted(qwen, admission):
    gates = find_gates(qwen)
    for policy in live_policies():
        of = choose(policy).policy
        if not of.admits and admission == "forced":
            continue
        if of.refines or {"temporal", "spatio"} & set(of.needs):
            with pytest.raises(CacheError, match="no heads"):
                measure_rerouted(
                    qwen, gates, DOCUMENTS, SEQUENCE, 4, None, capacity=4, policy=policy, admission="bypass"
                )
            continue
        for capacity, rule in ((1, None), (2, Rule("max-rank", 6, 1)), (4, Rule("cache-prior", 0.4, 1))):
            done = measure_rerouted(
                qwen, gates, DOCUMENTS, SEQUENCE, 4, rule, capacity=capacity, policy=policy, admission=admission
            )
            simulated = replay(done.trace, policy, capacity, admission=admission, engine="python")
            counts = (simulated.hits, simulated.misses, simulated.evictions)
            assert counts == done.counts, (policy, capacity)
            assert sum(done.counts[:2]) == done.trace.experts.size


def test_rerouting_makes_more_hits_than_the_stock_choice(qwen):
    gates = find_gates(qwen)
    rules = (None, *(Rule("cache-prior", one, 0) for one in (0.2, 0.5, 5.0)))
    hits = [measure_rerouted(qwen, gates, DOCUMENTS, SEQUENCE, 5, rule, capacity=3).counts.hits for rule in rules]
    assert hits == sorted(hits) and hits[0] < hits[-1]
    # with a bonus above every range the first K experts of a request stay for good
    assert hits[-1] == (sum(PIECES) - len(PIECES)) * len(gates) * TOP_K


def test_a_router_that_weighs_otherwise_is_refused(folders):
    model = load_resident(Checkpoint.open(folders("olmoe")), torch.float32, "cpu")
    gates = find_gates(model)
    for gate in gates:
        gate.router.register_forward_hook(lambda _m, _i, out: (out[0], out[1].sqrt(), out[2]))
    with pytest.raises(FamilyError, match="does not weigh"):
        measure_rerouted(model, gates, DOCUMENTS, SEQUENCE, 2, None, capacity=3)


def test_bf16_is_within_the_rule_too(folders):
    for family in MODEL_TYPES:
        model = load_resident(Checkpoint.open(folders(family, torch.bfloat16)), torch.bfloat16, "cpu")
        done = measure_rerouted(
            model, find_gates(model), DOCUMENTS, SEQUENCE, 3, Rule("cache-prior", 0.3, 1), capacity=3
        )
        assert np.isfinite(done.text.loss_N).all() and done.changed
        simulated = replay(done.trace, "lru", 3, engine="python")
        assert (simulated.hits, simulated.misses, simulated.evictions) == done.counts


def test_what_cannot_be_measured(qwen):
    gates = find_gates(qwen)
    with pytest.raises(DataError, match="no pair"):
        measure_rerouted(qwen, gates, [[5], [6]], SEQUENCE, 2, None, capacity=3)
    with pytest.raises(CacheError, match="future"):
        measure_rerouted(qwen, gates, DOCUMENTS, SEQUENCE, 2, None, capacity=3, policy="belady")
    with pytest.raises(CacheError, match="at least 1"):
        measure_rerouted(qwen, gates, DOCUMENTS, SEQUENCE, 2, None, capacity=0)


def test_the_trace_holds_probabilities_where_the_policy_needs_them(qwen):
    gates = find_gates(qwen)
    done = measure_rerouted(qwen, gates, DOCUMENTS, SEQUENCE, 2, None, capacity=3, policy="decayed")
    assert done.trace.probabilities.shape == (2 * SEQUENCE, tiny_models.LAYERS, EXPERTS)
    np.testing.assert_allclose(done.trace.probabilities.astype(np.float32).sum(-1), 1, atol=5e-3)
    assert measure_rerouted(qwen, gates, DOCUMENTS, SEQUENCE, 2, None, capacity=3).trace.probabilities is None


def test_a_pass_without_requests_changes_nothing(qwen):
    gates = find_gates(qwen)
    ids = torch.tensor([DOCUMENTS[0]])
    with torch.inference_mode():
        stock = qwen(input_ids=ids, use_cache=False).logits
        with Rerouter(
            gates, Rule("cache-prior", 9, 0), lambda _layer: ExpertCache(3, n_experts=EXPERTS), renormalised=True
        ) as rerouter:
            rerouter.start([])
            with pytest.raises(FamilyError, match=r"layers .0, 1, 2. did nothing"):
                rerouter.take()
            assert torch.equal(qwen(input_ids=ids, use_cache=False).logits, stock)
            rerouter.start([slice(0, 24)])
            assert not torch.equal(qwen(input_ids=ids, use_cache=False).logits, stock)

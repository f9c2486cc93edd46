"""The offloaded decoder: tokens equal the resident model's, counts equal a slow replay's, bytes are the files' own."""

from itertools import product

import numpy as np
import pytest
import torch
from decoding import BOTH, DEVICES, dtype_of, heads_of, NEW, PROMPT, slow_counts
from slow_reference import slow_replay
from tiny_models import EXPERTS, MODEL_TYPES, TOP_K, VOCABULARY

from remoe_cli.cache import choose, live_policies, replay
from remoe_cli.errors import CacheError, DeltaError, UsageError
from remoe_cli.families import find_gates, RouterTap
from remoe_cli.families.experts import recorded_order
from remoe_cli.families.loader import kept_cache, load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import IoCount, OffloadedDecoder
from remoe_cli.routing import RoutingTrace

# largest difference of logits (standard deviation 1.5) from the stock eager model, fed the same ids in the same steps
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
LATENT = {torch.float32: 1e-5, torch.bfloat16: 0.1}  # latent attention takes its products in another order


def tolerance(checkpoint: Checkpoint, dtype: torch.dtype) -> float:
    return (LATENT if checkpoint.model_type == "deepseek_v2" else TOLERANCE)[dtype]


pytestmark = pytest.mark.usefixtures("one_thread")


def stock_decode(model, prompt, forced):
    """The stock model, prefill and then one forced id at a time; returns logits [n, V]."""
    with torch.inference_mode():
        out = model(input_ids=torch.tensor([prompt], device=model.device), use_cache=True, logits_to_keep=1)
        logits = [out.logits[0, -1]]
        for token in forced[:-1]:
            out = model(input_ids=torch.tensor([[token]], device=model.device), use_cache=True, **kept_cache(out))
            logits.append(out.logits[0, -1])
    return torch.stack(logits)


# exactness


@pytest.mark.parametrize("device", DEVICES)
def test_offloaded_equals_resident_bit_for_bit_and_the_stock_model(checkpoint, device):
    dtype = dtype_of(checkpoint)
    with OffloadedDecoder(checkpoint, EXPERTS, device=device, dtype=dtype) as decoder:
        resident = decoder.decode(PROMPT, NEW, keep_logits=True)
        assert len(set(resident.ids)) > 3, "the tiny model loops, so equal tokens would prove little"
        for capacity in (TOP_K, 3, 5):
            for admission in ("forced", "bypass"):
                decoder.configure(capacity, "lru", admission=admission)
                offloaded = decoder.decode(PROMPT, NEW, keep_logits=True)
                assert offloaded.ids == resident.ids
                assert torch.equal(offloaded.logits, resident.logits)
                assert np.array_equal(offloaded.trace.experts, resident.trace.experts)
                assert offloaded.counts.misses > resident.counts.misses

    stock = load_resident(checkpoint, dtype, device)
    stock.set_experts_implementation("eager")
    ours = resident.logits.float().cpu()
    theirs = stock_decode(stock, PROMPT, resident.ids).float().cpu()
    allowed = tolerance(checkpoint, dtype)
    assert (ours - theirs).abs().max() <= allowed
    best = theirs.topk(2).values
    clear = (best[:, 0] - best[:, 1]) >= 2 * allowed
    assert clear.sum() > NEW / 2, "margins of this tiny model are too small to compare tokens"
    assert theirs.argmax(-1)[clear].tolist() == torch.tensor(resident.ids)[clear].tolist()


@pytest.mark.parametrize("stored, compute", [BOTH, BOTH[::-1]])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_experts_are_converted_to_the_compute_dtype(folders, family, stored, compute):
    checkpoint = Checkpoint.open(folders(family, stored))
    with OffloadedDecoder(checkpoint, EXPERTS, dtype=compute) as decoder:
        resident = decoder.decode(PROMPT, 8, keep_logits=True)
        decoder.configure(2)
        offloaded = decoder.decode(PROMPT, 8, keep_logits=True)
        sizes = {checkpoint.config["dtype"]: decoder.expert_bytes}
    assert torch.equal(offloaded.logits, resident.logits) and resident.logits.dtype == compute
    assert offloaded.counts.decode.bytes == offloaded.counts.decode.reads * sizes[checkpoint.config["dtype"]]
    stock = load_resident(checkpoint, compute, "cpu")
    stock.set_experts_implementation("eager")
    theirs = stock_decode(stock, PROMPT, resident.ids)
    assert (theirs.float() - resident.logits.float()).abs().max() <= tolerance(checkpoint, compute)


def test_latent_attention_is_as_exact_as_the_stock_one(folders):
    """In bfloat16 both round, and neither is further from float32 than the other."""
    half = Checkpoint.open(folders("deepseek_v2", torch.bfloat16))
    prompt = PROMPT * 4
    with OffloadedDecoder(half, EXPERTS, dtype=torch.float32) as decoder:
        exact = decoder.decode(prompt, 24, keep_logits=True)
    with OffloadedDecoder(half, EXPERTS) as decoder:
        ours = decoder.decode(prompt, 24, forced=exact.ids, keep_logits=True).logits.float()
    stock = load_resident(half, torch.bfloat16, "cpu")
    stock.set_experts_implementation("eager")
    theirs = stock_decode(stock, prompt, exact.ids).float()
    # the median, for a single expert that is chosen otherwise outweighs all rounding
    errors = [(logits - exact.logits)[1:].square().mean(-1).sqrt().median().item() for logits in (ours, theirs)]
    assert 0 < errors[0] < 1.3 * errors[1], errors


# counts


def test_counts_equal_the_slow_replay_and_the_simulator(checkpoint):
    forced = [(7 * i * i + 3) % VOCABULARY for i in range(NEW)]
    with OffloadedDecoder(checkpoint, EXPERTS) as decoder:
        future = decoder.decode(PROMPT, NEW, forced=forced).trace
        for policy, admission, capacity in product(("lru", "lfu", "belady"), ("forced", "bypass"), (2, 3, 5)):
            decoder.configure(capacity, policy, admission=admission)
            decoded = decoder.decode(PROMPT, NEW, forced=forced, future=future)
            counts, trace = decoded.counts, decoded.trace
            slow = slow_replay(trace, policy, capacity, admission=admission)
            expected = (slow.hits, slow.misses, slow.evictions)
            assert (counts.hits, counts.misses, counts.evictions) == expected, (policy, admission, capacity)
            assert counts.decode.reads == counts.misses
            assert counts.decode.bytes == counts.misses * decoder.expert_bytes
            assert counts.accesses == counts.hits + counts.misses == (NEW - 1) * trace.n_layers * TOP_K
            simulated = replay(trace, policy, capacity, admission=admission)
            assert (simulated.tokens, simulated.accesses) == (NEW - 1, counts.accesses)
            assert (simulated.hits, simulated.misses, simulated.evictions) == expected, (policy, admission, capacity)


@pytest.mark.parametrize("policy", live_policies())
def test_every_live_policy_counts_as_the_simulator(folders, policy):
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe", torch.bfloat16)), EXPERTS) as decoder:
        decoder.apply_gates({}, heads_of(decoder))
        admissions = ("forced", "bypass") if choose(policy).policy.admits else ("bypass",)
        for admission, capacity in product(admissions, (2, 3, 5)):
            decoder.configure(capacity, policy, admission=admission)
            done = decoder.decode(PROMPT, 24)
            counts = (done.counts.hits, done.counts.misses, done.counts.evictions, done.counts.proactive)
            assert slow_counts(done.trace, policy, capacity, admission) == counts, (admission, capacity)
            simulated = replay(done.trace, policy, capacity, admission=admission)
            assert (simulated.hits, simulated.misses, simulated.evictions, simulated.proactive) == counts
            assert done.counts.decode.reads == done.counts.misses + done.counts.proactive


def test_the_trace_holds_the_routers_probabilities_where_they_are_wanted(folders):
    for family in MODEL_TYPES:
        with OffloadedDecoder(Checkpoint.open(folders(family)), 3) as decoder:
            assert decoder.decode(PROMPT, 4).trace.probabilities is None
            trace = decoder.decode(PROMPT, 4, keep_scores=True).trace
            chances = trace.probabilities
            assert chances.shape == (len(PROMPT) + 3, trace.n_layers, EXPERTS) and chances.dtype == np.float16
            np.testing.assert_allclose(chances.astype(np.float32).sum(-1), 1, atol=5e-3)
            # the family's choice is the top K of its probabilities
            order = np.argsort(-chances.astype(np.float32), axis=-1)[..., :TOP_K]
            assert (np.sort(order, -1) == np.sort(trace.experts, -1)).mean() > 0.99
            decoder.configure(3, "decayed:0.9")
            assert decoder.decode(PROMPT, 4).trace.probabilities is not None


def test_prefill_streams_each_expert_once_and_leaves_the_cache_cold(checkpoint):
    with OffloadedDecoder(checkpoint, EXPERTS) as decoder:
        long = decoder.decode(PROMPT * 8, 2)
        trace, counts = long.trace, long.counts
        prompt = trace.experts[trace.prefill]
        distinct = sum(len(np.unique(prompt[:, layer])) for layer in range(trace.n_layers))
        assert counts.prefill.reads == distinct > trace.n_layers * TOP_K
        assert counts.prefill.bytes == distinct * decoder.expert_bytes
        # with room for all experts, a prefill that filled the cache would leave hits to the first step
        assert (counts.hits, counts.misses) == (0, trace.n_layers * TOP_K)
        assert decoder.decode(PROMPT, 1).counts.decode == IoCount(storage_bytes=0)


def test_the_trace_is_what_the_stock_routers_chose(folders):
    for family in MODEL_TYPES:
        checkpoint = Checkpoint.open(folders(family))
        with OffloadedDecoder(checkpoint, 4) as decoder:
            decoded = decoder.decode(PROMPT, 6)
        stock = load_resident(checkpoint, torch.float32, "cpu")
        fed = torch.tensor([PROMPT + decoded.ids[:-1]])
        with RouterTap(find_gates(stock)) as tap, torch.inference_mode():
            stock(input_ids=fed)
            routed = tap.take()
        trace = decoded.trace
        assert trace.n_tokens == fed.shape[1] and trace.prefill.tolist() == [True] * len(PROMPT) + [False] * 5
        assert trace.n_layers == len(routed) and trace.borders.tolist() == [0, fed.shape[1]]
        for layer, layer_routed in enumerate(routed):
            choice, order = layer_routed.choice_NK.numpy(), layer_routed.weight_NK.argsort(-1, descending=True).numpy()
            assert np.array_equal(trace.experts[:, layer], np.take_along_axis(choice, order, -1))
        assert (np.diff(trace.weights.astype(np.float32), axis=-1) <= 0).all()


def test_recorded_order_is_by_weight_then_by_id():
    choice = np.array([[4, 9, 1], [7, 2, 5]])
    weight = np.array([[0.2, 0.5, 0.3], [0.25, 0.5, 0.25]])
    ordered = np.take_along_axis(choice, recorded_order(choice, weight), -1)
    assert ordered.tolist() == [[9, 1, 4], [2, 7, 5]]  # reversed: ascending weight, then ascending id


def test_each_request_starts_cold(folders):
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 3, "lfu") as decoder:
        first = decoder.decode(PROMPT, NEW)
        other = decoder.decode(PROMPT[::-1], NEW)
        again = decoder.decode(PROMPT, NEW)
    assert again.counts.hits == first.counts.hits and again.ids == first.ids
    both = RoutingTrace.concat([first.trace, other.trace])
    simulated = replay(both, "lfu", 3)
    assert simulated.request_misses.tolist() == [first.counts.misses, other.counts.misses]


def test_bypass_lets_experts_pass_through_staging(folders):
    checkpoint = Checkpoint.open(folders("deepseek_v2"))
    with OffloadedDecoder(checkpoint, 2, "lfu", admission="bypass") as decoder:
        assert len(decoder._pool.rows) == 2 * 2 + decoder.staging and decoder.staging == TOP_K
        counts = decoder.decode(PROMPT, NEW).counts
        kept = 2 * 2
        assert counts.misses - counts.evictions > kept, "no expert was dropped after a single step: nothing is shown"
        assert decoder._pool.n_free == decoder.staging


# gates


def test_apply_gates_changes_routing_and_restoring_gives_the_base(checkpoint):
    with OffloadedDecoder(checkpoint, 3) as decoder:
        base = decoder.decode(PROMPT, NEW, keep_logits=True)
        names = [name for gate in find_gates(decoder._model) for name in gate.names]
        assert list(decoder.disk_names) == names and set(decoder.disk_names.values()) <= set(checkpoint.tensors)
        torch.manual_seed(0)
        tuned = {name: torch.randn(dict(decoder._model.named_parameters())[name].shape) for name in names}
        decoder.apply_gates(tuned)
        changed = decoder.decode(PROMPT, NEW, forced=base.ids, keep_logits=True)
        assert not np.array_equal(changed.trace.experts, base.trace.experts)
        assert not torch.equal(changed.logits, base.logits)

        decoder.apply_gates({names[0]: tuned[names[0]]})
        partly = decoder.decode(PROMPT, NEW, forced=base.ids)
        assert not np.array_equal(partly.trace.experts, changed.trace.experts), "the last arm's gates were kept"

        decoder.apply_gates({})
        again = decoder.decode(PROMPT, NEW, keep_logits=True)
        assert again.ids == base.ids and torch.equal(again.logits, base.logits)

        with pytest.raises(DeltaError, match="not a gate"):
            decoder.apply_gates({"model.norm.weight": torch.ones(32)})
        with pytest.raises(DeltaError, match=r"\[1, 2\]"):
            decoder.apply_gates({names[0]: torch.ones(1, 2)})


# refusals


def test_a_cache_below_top_k_is_refused_before_loading(folders, monkeypatch):
    checkpoint = Checkpoint.open(folders("mixtral"))
    monkeypatch.setattr("remoe_cli.offload.decoder.load_without_experts", lambda *_: pytest.fail("it was loaded"))
    with pytest.raises(CacheError, match="2 or more are needed") as caught:
        OffloadedDecoder(checkpoint, 1)
    assert caught.value.hint == "remoe eval --cache 2"
    with pytest.raises(CacheError, match="lfuu"):
        OffloadedDecoder(checkpoint, 2, "lfuu")
    with pytest.raises(CacheError, match="admission"):
        OffloadedDecoder(checkpoint, 2, admission="free")


def test_settings_that_cannot_decode_are_refused(folders):
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 99) as decoder:
        assert (decoder.requested, decoder.capacity) == (99, EXPERTS)
        with pytest.raises(CacheError):
            decoder.configure(1)
        for prompt, n_new, forced in (([], 2, None), (PROMPT, 0, None), (PROMPT, 3, [1, 2])):
            with pytest.raises(UsageError):
                decoder.decode(prompt, n_new, forced=forced)
        decoder.configure(4, "belady")
        with pytest.raises(CacheError, match="future"):
            decoder.decode(PROMPT, 3)

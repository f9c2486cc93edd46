"""Heads and reading ahead in the offloaded decoder: no token changes, each load is counted, and all of it as replay says."""

import errno
import json
import os
import shutil
import threading
from itertools import product
from pathlib import Path
from time import sleep

import numpy as np
import pytest
import torch
from decoding import DEVICES, heads_of, NEW, PROMPT, slow_counts
from tiny_models import EXPERTS, MODEL_TYPES, VOCABULARY

from remoe_cli.cache import replay
from remoe_cli.errors import CacheError, CheckpointError, DeltaError, UsageError
from remoe_cli.families import find_gates, Heads, KINDS
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import ExpertStore, IoCount, OffloadedDecoder, Settings
from remoe_cli.offload.block import ExpertBlock
from remoe_cli.offload.readers import Load, Readers
from remoe_cli.offload.tiers import Tiers
from remoe_cli.routing import RoutingTrace

pytestmark = pytest.mark.usefixtures("one_thread")

READ = ExpertStore.read
OTHER = [(31 * i + 5) % VOCABULARY for i in range(9)]
CELLS = [
    ("temporal", "forced", 2),
    ("temporal", "bypass", 4),
    ("temporal_decayed:0.5", "forced", 4),
    ("gate_ahead:0", "forced", 4),
    ("gate_ahead:3", "forced", 2),
    ("spatio_temporal:3", "bypass", 2),
    ("spatio_temporal:8:0.02", "forced", 4),
    ("spatio:4", "bypass", 3),
]
WAYS = {"files": Settings(readers=1), "RAM tier": Settings(ram=160_000, readers=3)}


def counted(done) -> tuple[int, int, int, int]:
    return done.counts.hits, done.counts.misses, done.counts.evictions, done.counts.proactive


def simulated(trace: RoutingTrace, policy: str, capacity: int, **options) -> tuple[int, int, int, int]:
    found = replay(trace, policy, capacity, threads=1, **options)
    return found.hits, found.misses, found.evictions, found.proactive


def require_all_paid(decoder: OffloadedDecoder, done) -> None:
    """Each load is one of D + P, and no slot is lost."""
    counts = done.counts
    assert counts.decode.reads == counts.misses + counts.proactive == sum(map(len, done.loads))
    assert counts.decode.bytes == counts.decode.reads * decoder.expert_bytes
    held = sum(len(block.cache.resident) for block in decoder._blocks)
    assert decoder._pool.n_free == len(decoder._pool.rows) - held


# counts and tokens


@pytest.mark.parametrize("settings", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_tokens_are_the_resident_ones_and_counts_the_slow_replays(folders, family, settings):
    with OffloadedDecoder(Checkpoint.open(folders(family, torch.bfloat16)), EXPERTS, settings=settings) as decoder:
        resident = decoder.decode(PROMPT, NEW, keep_logits=True)
        decoder.apply_gates({}, heads_of(decoder))
        for policy, admission, capacity in CELLS:
            decoder.configure(capacity, policy, admission=admission)
            done = decoder.decode(PROMPT, NEW, keep_logits=True)
            assert torch.equal(done.logits, resident.logits), policy
            assert np.array_equal(done.trace.experts, resident.trace.experts)
            assert counted(done) == slow_counts(done.trace, policy, capacity, admission), policy
            assert counted(done) == simulated(done.trace, policy, capacity, admission=admission)
            require_all_paid(decoder, done)
            assert (done.counts.proactive > 0) == (policy[-2:] in (":3", ":4", "02")), policy
    assert (done.counts.decode.ram > 0) == (settings.ram > 0)


@pytest.mark.parametrize("device", DEVICES)
def test_on_every_device(folders, device):
    checkpoint = Checkpoint.open(folders("qwen3_moe", torch.bfloat16))
    for settings in (Settings(), Settings(ram=100_000)):
        with OffloadedDecoder(checkpoint, EXPERTS, device=device, settings=settings) as decoder:
            decoder.apply_gates({}, heads_of(decoder))
            resident = decoder.decode(PROMPT, NEW, keep_logits=True)
            for policy, admission in product(("temporal", "gate_ahead:3", "spatio_temporal:4"), ("forced", "bypass")):
                decoder.configure(3, policy, admission=admission)
                for _ in range(2):
                    done = decoder.decode(PROMPT, NEW, keep_logits=True)
                    assert torch.equal(done.logits, resident.logits)
                    assert counted(done) == slow_counts(done.trace, policy, 3, admission)
                    require_all_paid(decoder, done)


def test_the_trace_holds_what_the_heads_say(folders):
    """The heads read the gates' own input, of the stock model fed the same tokens."""
    for family in ("qwen3_moe", "deepseek_v2", "gpt_oss"):
        checkpoint = Checkpoint.open(folders(family))
        with OffloadedDecoder(checkpoint, 3) as decoder:
            heads = heads_of(decoder)
            assert decoder.decode(PROMPT, 4, keep_scores=True).trace.temporal is None
            decoder.apply_gates({}, heads)
            assert decoder.decode(PROMPT, 4).trace.spatio is None
            decoder.apply_gates({}, Heads(spatio=heads.spatio))
            assert decoder.decode(PROMPT, 4, keep_scores=True).trace.temporal is None
            decoder.apply_gates({}, heads)
            done = decoder.decode(PROMPT, 4, keep_scores=True)
            trace = done.trace
        stock, inputs = load_resident(checkpoint, torch.float32, "cpu"), []
        for gate in find_gates(stock):
            gate.router.register_forward_pre_hook(
                lambda _, args, inputs=inputs: inputs.append(args[0].reshape(-1, args[0].shape[-1]))
            )
        with torch.inference_mode():
            stock(input_ids=torch.tensor([PROMPT + done.ids[:-1]]))
        for kind in KINDS:
            expected = [(x @ w.T).softmax(-1) for x, w in zip(inputs, getattr(heads, kind), strict=True)]
            found = getattr(trace, kind)
            assert found.dtype == np.float16 and found.shape == (trace.n_tokens, trace.n_layers, EXPERTS)
            np.testing.assert_allclose(found, torch.stack(expected, 1), atol=2e-3)


def test_a_longer_reach_hits_more_and_costs_more(folders):
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 4) as decoder:
        decoder.apply_gates({}, heads_of(decoder))
        found = []
        for reach in (0, 1, 2, 4, 8):
            decoder.configure(4, f"spatio_temporal:{reach}")
            found.append(decoder.decode(PROMPT, 48))
        assert all(one.ids == found[0].ids for one in found)
        proactive = [one.counts.proactive for one in found]
        assert proactive[0] == 0 and proactive == sorted(proactive)
        decoder.configure(4, "temporal")
        assert counted(decoder.decode(PROMPT, 48)) == counted(found[0])


def test_a_single_prompt_token_and_a_single_new_one(folders):
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, "gate_ahead:3") as decoder:
        for prompt, n_new in (([7], 6), ([7], 2), (PROMPT, 1)):
            done = decoder.decode(prompt, n_new)
            assert counted(done) == (
                slow_counts(done.trace, "gate_ahead:3", 3, "forced") if n_new > 1 else (0, 0, 0, 0)
            )
            require_all_paid(decoder, done)


def test_a_model_with_one_moe_layer(folders, tmp_path):
    """Its layer foresees for itself, and must not lose what it is computing."""
    folder = Path(shutil.copytree(folders("deepseek_v2"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with OffloadedDecoder(Checkpoint.open(folder), EXPERTS) as decoder:
        assert decoder.n_layers == 1
        decoder.apply_gates({}, heads_of(decoder))
        resident = decoder.decode(PROMPT, NEW, keep_logits=True)
        for policy, admission in product(("gate_ahead:4", "spatio_temporal:8", "spatio:5"), ("forced", "bypass")):
            if policy == "spatio:5" and admission == "forced":
                continue
            decoder.configure(2, policy, admission=admission)
            done = decoder.decode(PROMPT, NEW, keep_logits=True)
            assert torch.equal(done.logits, resident.logits)
            assert counted(done) == slow_counts(done.trace, policy, 2, admission)
            require_all_paid(decoder, done)


@pytest.mark.parametrize("policy", ["temporal", "gate_ahead:3", "spatio_temporal:3", "spatio:3"])
def test_a_cache_that_lives_on_counts_as_the_replay(folders, policy):
    admission = "bypass" if policy == "spatio:3" else "forced"
    checkpoint = Checkpoint.open(folders("deepseek_v2", torch.bfloat16))
    prompts = (PROMPT, OTHER, PROMPT)
    with OffloadedDecoder(checkpoint, EXPERTS, settings=Settings(warm="carry")) as decoder:
        plain = [decoder.decode(prompt, NEW, keep_logits=True).logits for prompt in prompts]
        decoder.apply_gates({}, heads_of(decoder))
        decoder.configure(4, policy, admission=admission)
        done = [decoder.decode(prompt, NEW, keep_logits=True) for prompt in prompts]
        require_all_paid(decoder, done[-1])
    assert all(torch.equal(one.logits, logits) for one, logits in zip(done, plain, strict=True))
    trace = RoutingTrace.concat([one.trace for one in done])
    assert simulated(trace, policy, 4, admission=admission, warm="carry") == tuple(map(sum, zip(*map(counted, done))))


# slow storage


@pytest.mark.parametrize(
    "way", [Settings(readers=1), Settings(readers=2, ram=100_000), Settings(throttle=2e6)], ids=str
)
def test_who_leaves_while_it_is_on_its_way_keeps_its_slot_until_it_is_there(folders, monkeypatch, way):
    """On slow storage loads ahead pile up, and some leave before they came: their slots must not be given away."""
    waits = []
    await_stray = ExpertBlock._await_stray

    def slow(self, image, row):
        sleep(0.001)
        return READ(self, image, row)

    monkeypatch.setattr(ExpertStore, "read", slow)
    monkeypatch.setattr(ExpertBlock, "_await_stray", lambda block: waits.append(0) or await_stray(block))
    with OffloadedDecoder(Checkpoint.open(folders("gpt_oss", torch.bfloat16)), EXPERTS, settings=way) as decoder:
        resident = decoder.decode(PROMPT, NEW, keep_logits=True)
        decoder.apply_gates({}, heads_of(decoder))
        for policy, admission in product(("gate_ahead:8", "spatio_temporal:8"), ("forced", "bypass")):
            decoder.configure(3, policy, admission=admission)
            done = decoder.decode(PROMPT, NEW, keep_logits=True)
            assert torch.equal(done.logits, resident.logits)
            assert counted(done) == slow_counts(done.trace, policy, 3, admission)
            require_all_paid(decoder, done)
    assert waits, "every slot was free in time: nothing is shown"


def test_loads_ahead_run_beside_the_layer_before_and_behind_its_own(folders, monkeypatch):
    """Those for the next layer are begun before any expert of this one has run, and read after what this one misses."""
    order, begin, compute = [], Tiers.begin, ExpertBlock._compute

    def begun(self, layer, expert, slot, count, **options):
        order.append((layer, bool(options.get("guess"))))
        return begin(self, layer, expert, slot, count, **options)

    def computed(self, experts, *args):
        order.extend([None] * bool(experts))
        compute(self, experts, *args)

    monkeypatch.setattr(Tiers, "begin", begun)
    monkeypatch.setattr(ExpertBlock, "_compute", computed)
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 4, "gate_ahead:4") as decoder:
        decoder.decode(PROMPT, 1)
        order.clear()
        done = decoder.decode(PROMPT, 12)
    decoding = order[len(order) - 1 - order[::-1].index(None) :]  # nothing is begun after the last expert has run
    assert decoding == [None]
    ahead = [at for at, one in enumerate(order) if one is not None and one[1]]
    assert len(ahead) == done.counts.proactive > 10
    beside = 0
    for at in ahead:
        before = [one for one in order[:at] if one is None or one[0] != order[at][0]]
        if before and before[-1] is not None:  # its layer's misses, and no expert has run since
            beside += 1
    assert beside > 3


def test_what_is_needed_now_goes_before_what_was_read_ahead():
    order, go = [], threading.Event()
    readers = Readers(1, lambda load, thread: (go.wait(5), order.append(load.expert)))
    first, unneeded, needed, demand = (Load(0, expert, 0, IoCount()) for expert in range(4))
    readers.submit(first)
    for load in (unneeded, needed):
        readers.submit(load, guess=True)
    while first.thread is None:
        sleep(0.001)
    readers.hasten(needed)
    readers.hasten(first)  # under way: nothing to do
    readers.submit(demand)
    go.set()
    readers.drain(drop=False)
    assert order == [0, 2, 3, 1]
    readers.close()


def test_the_floor_loads_them_too(folders):
    with OffloadedDecoder(Checkpoint.open(folders("olmoe")), 3, "gate_ahead:3") as decoder:
        done = decoder.decode(PROMPT, 8)
        floor = decoder.floor(done)
        assert floor.bytes == done.counts.decode.bytes > done.counts.misses * decoder.expert_bytes
        assert len(floor.token_s) == 7
        assert counted(decoder.decode(PROMPT, 8)) == counted(done)


# what goes wrong


@pytest.mark.parametrize("settings", [Settings(), Settings(ram=100_000), Settings(warm="carry")], ids=str)
def test_a_load_ahead_that_fails_is_an_error_of_the_request(folders, monkeypatch, settings):
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, "gate_ahead:4", settings=settings) as decoder:
        whole = decoder.decode(PROMPT, NEW, keep_logits=True)
        begin, ahead = Tiers.begin, set()

        def noted(self, layer, expert, slot, count, **options):
            if options.get("guess"):
                ahead.add((layer, expert))
            return begin(self, layer, expert, slot, count, **options)

        def failing(self, load, row, buffer, thread):
            if (load.layer, load.expert) in ahead:
                raise CheckpointError("the disk reports an error", "look at it")
            return fill(self, load, row, buffer, thread)

        fill = Tiers._fill
        with monkeypatch.context() as patch:
            patch.setattr(Tiers, "begin", noted)
            patch.setattr(Tiers, "_fill", failing)
            decoder._tiers.forget()
            with pytest.raises(CheckpointError, match=r"expert \d of layer \d was not read"):
                decoder.decode(OTHER, NEW)
        again = decoder.decode(PROMPT, NEW, keep_logits=True)
        assert torch.equal(again.logits, whole.logits) and counted(again) == counted(whole)


def test_the_last_loads_of_a_request_fail_it_too(folders, monkeypatch):
    """Nobody waits for them, and the cache would hold what never came."""
    with OffloadedDecoder(
        Checkpoint.open(folders("mixtral")), 3, "gate_ahead:8", settings=Settings(warm="carry")
    ) as decoder:
        whole = decoder.decode(PROMPT, NEW)
        block, settle, real = decoder._blocks[1], decoder._tiers.settle, os.preadv

        def failing(*_):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        def late(*, drop: bool = True) -> None:
            monkeypatch.setattr(os, "preadv", real if drop else failing)
            if not drop:  # one more is under way when the last token is there
                expert, slot = next(iter(block._slots.items()))
                block._ahead[expert] = decoder._tiers.begin(1, expert, slot, IoCount(), guess=True)
            settle(drop=drop)

        monkeypatch.setattr(decoder._tiers, "settle", late)
        with pytest.raises(CheckpointError, match="disk reports an error"):
            decoder.decode(OTHER, 4)
        monkeypatch.undo()
        assert counted(decoder.decode(PROMPT, NEW)) == counted(whole)


def test_a_request_after_an_interrupted_one_starts_anew(folders):
    settings = Settings(warm="carry", throttle=2e6)
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, "gate_ahead:4", settings=settings) as decoder:
        whole, steps = decoder.decode(PROMPT, 8, keep_logits=True), []

        def interrupt(*_: object) -> None:
            steps.append(0)
            if len(steps) == 6:
                raise KeyboardInterrupt

        hook = decoder._blocks[1]._arithmetic._module.register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            decoder.decode(PROMPT, 8)
        hook.remove()
        again = decoder.decode(PROMPT, 8, keep_logits=True)
        assert torch.equal(again.logits, whole.logits) and counted(again) == counted(whole)
        require_all_paid(decoder, again)


# refusals


def test_what_does_not_go_together_is_refused(folders):
    checkpoint = Checkpoint.open(folders("mixtral"))
    for options, kind, words in (
        ({"policy": "spatio:3"}, CacheError, "admission bypass only"),
        ({"policy": "spatio:3", "admission": "bypass", "batch": 2}, CacheError, "once a token"),
        ({"policy": "gate_ahead:3", "batch": 2}, CacheError, "once a token"),
        ({"policy": "gate_ahead:3", "settings": Settings(warm="batch")}, CacheError, "once a token"),
        ({"policy": "gate_ahead:3", "settings": Settings(guess=1)}, UsageError, "takes no guess"),
        ({"policy": "gate_ahead:-1"}, CacheError, "whole number from 0"),
    ):
        with pytest.raises(kind, match=words):
            OffloadedDecoder(checkpoint, 3, **options)
    with OffloadedDecoder(checkpoint, 3, "spatio_temporal:3") as decoder:
        heads = heads_of(decoder)
        for given, lacking in ((None, "temporal and the spatio"), (Heads(temporal=heads.temporal), "spatio")):
            decoder.apply_gates({}, given)
            with pytest.raises(CacheError, match=f"needs the {lacking} head"):
                decoder.decode(PROMPT, 2)
        for wrong in (Heads(temporal=heads.temporal[:1]), Heads(spatio=[weight[:, 1:] for weight in heads.spatio])):
            with pytest.raises(DeltaError, match="these heads are not"):
                decoder.apply_gates({}, wrong)
        decoder.apply_gates({}, heads)
        decoder.decode(PROMPT, 2)
        decoder.apply_gates({})
        with pytest.raises(CacheError, match="head"):
            decoder.decode(PROMPT, 2)

"""What runs beside what: loads beside compute, demand before guesses, and who leaves the RAM tier."""

import threading
from time import perf_counter, sleep

import pytest
import torch
from decoding import NEW, PROMPT
from tiny_models import EXPERTS

from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import ExpertStore, IoCount, OffloadedDecoder, Settings
from remoe_cli.offload.block import ExpertBlock
from remoe_cli.offload.compute import SingleToken
from remoe_cli.offload.readers import Load, Readers
from remoe_cli.offload.tiers import _RamTier, Tiers

READ = ExpertStore.read


pytestmark = pytest.mark.usefixtures("one_thread")


def test_resident_experts_run_while_the_others_are_read(folders, monkeypatch):
    """No read ends before an expert of its layer has run, wherever one is in its slot."""
    ran, late, beside = threading.Event(), [], []

    def read(self, image, row):
        if not ran.wait(2):
            late.append(image)
        return READ(self, image, row)

    def begin(self, experts):
        here = [expert for expert in self._touched if expert in self._slots]
        (ran.clear if here and experts else ran.set)()
        beside.append(bool(here and experts))
        BEGIN(self, experts)

    def run(*args):
        ran.set()
        RUN(*args)

    RUN = SingleToken.run
    BEGIN = ExpertBlock._begin
    monkeypatch.setattr(ExpertStore, "read", read)
    monkeypatch.setattr(ExpertBlock, "_begin", begin)
    monkeypatch.setattr(SingleToken, "run", run)
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 3) as decoder:
        decoder.decode(PROMPT, NEW)
    assert sum(beside) > 5 and not late


def test_shared_experts_run_while_the_routed_ones_are_read(folders, monkeypatch):
    ran, late = threading.Event(), []

    def read(self, image, row):
        if not ran.wait(2):
            late.append(image)
        return READ(self, image, row)

    monkeypatch.setattr(ExpertStore, "read", read)
    with OffloadedDecoder(Checkpoint.open(folders("deepseek_v2")), 2) as decoder:
        for block in decoder._blocks:
            monkeypatch.setattr(block, "_share", lambda x, share=block._share: ran.set() or share(x))
            monkeypatch.setattr(block, "_route", lambda x, route=block._route: ran.clear() or route(x))
        decoder.decode(PROMPT, 6)
    assert not late


def test_demand_goes_before_guesses_and_guesses_can_be_taken_back():
    order, go = [], threading.Event()
    readers = Readers(1, lambda load, thread: (go.wait(5), order.append(load.expert)))
    first, guess, unwanted, demand = (Load(0, expert, 0, IoCount()) for expert in range(4))
    readers.submit(first)
    readers.submit(guess, guess=True)
    readers.submit(unwanted, guess=True)
    readers.submit(demand)
    assert readers.withdraw(unwanted)
    go.set()
    readers.wait(demand)
    readers.wait(guess)
    assert order == [0, 3, 1] and not readers.withdraw(guess)
    readers.drain()
    assert order == [0, 3, 1]
    readers.close()


def test_guesses_are_the_likeliest_absent_experts_and_are_taken_back_once_the_router_has_spoken(folders, monkeypatch):
    guessed, wanted = [], []
    begin, foresee = Tiers.begin, ExpertBlock._foresee

    def slow(self, image, row):
        sleep(0.03)
        return READ(self, image, row)

    def counted(self, layer, expert, slot, count, **options):
        if options.get("guess"):
            guessed.append((layer, expert))
        return begin(self, layer, expert, slot, count, **options)

    def foreseen(self, weight_NK, choice_NK):
        ranked = sorted(zip(weight_NK[0].tolist(), choice_NK[0].tolist(), strict=True), reverse=True)
        absent = [int(expert) for _, expert in ranked if expert not in self._slots]
        at = len(guessed)
        foresee(self, weight_NK, choice_NK)
        wanted.append(([(self._index, expert) for expert in absent], guessed[at:]))

    monkeypatch.setattr(ExpertStore, "read", slow)
    monkeypatch.setattr(Tiers, "begin", counted)
    monkeypatch.setattr(ExpertBlock, "_foresee", foreseen)
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, settings=Settings(readers=1, guess=2)) as decoder:
        done = decoder.decode(PROMPT, 8)
    assert all(begun == absent[: len(begun)] for absent, begun in wanted) and any(begun for _, begun in wanted)
    assert done.counts.guesses < len(guessed), "no guess was taken back, though one read takes longer than a layer"
    assert done.counts.decode.reads == sum(map(len, done.loads))


def test_who_leaves_the_ram_tier():
    tier = _RamTier(2, 4096, pinned=False)
    a, b, c, d = ((0, expert) for expert in range(4))
    for key in (a, b):
        assert tier.hold(key, True)[1] is False
        tier.let_go(key, None)
    assert tier.hold(c, False) == (None, False), "a prompt pushed out what decoding uses"
    assert tier.hold(a, True)[1] is True  # used again, and still in use
    row, had = tier.hold(c, True)
    assert row is not None and not had and tier.hold(b, False) == (None, False), "not the least recently used left"
    assert tier.hold(d, True) == (None, False), "a row was taken that two threads are at"
    tier.let_go(a, None)
    assert tier.hold(d, True)[0] is not None


def test_the_ram_tier_is_as_fresh_as_the_cache(folders):
    checkpoint = Checkpoint.open(folders("olmoe"))
    with OffloadedDecoder(checkpoint, 3, settings=Settings(ram=10**7)) as decoder:
        first, second = (decoder.decode(PROMPT, 6).counts for _ in range(2))
    assert (first.prefill.ram, first.decode.ram) == (second.prefill.ram, second.decode.ram) and first.decode.ram > 0
    with OffloadedDecoder(checkpoint, 3, settings=Settings(ram=10**7, warm="carry")) as decoder:
        first, second = (decoder.decode(PROMPT, 6).counts for _ in range(2))
    assert second.prefill.reads == second.prefill.ram > first.prefill.ram


def test_the_floor_keeps_the_pace_and_leaves_a_cold_cache(folders):
    checkpoint = Checkpoint.open(folders("qwen2_moe"))
    with OffloadedDecoder(checkpoint, EXPERTS - 2, settings=Settings(warm="carry")) as decoder:
        first = decoder.decode(PROMPT, 8, keep_logits=True)
        computed = sum(first.latency.itl_s) - sum(first.split.tokens["wait"])
        loading = sum(bool(loads) for loads in first.loads) / len(first.loads)
        begin = perf_counter()
        floor = decoder.floor(first)
        wall = perf_counter() - begin
        assert wall >= sum(floor.token_s) + computed * loading / decoder.n_layers
        again = decoder.decode(PROMPT, 8, keep_logits=True)
        assert torch.equal(again.logits, first.logits) and again.counts[:4] == first.counts[:4]

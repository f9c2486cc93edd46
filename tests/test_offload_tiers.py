"""Batches, tiers, guesses and warm caches: nothing of it changes a token, and all of it counts as the replay says."""

from itertools import product
from time import sleep
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from decoding import DEVICES, dtype_of, NEW, PROMPT
from slow_policies import History, slow_cache
from tiny_models import EXPERTS, MODEL_TYPES, TOP_K, VOCABULARY

from remoe_cli.cache import choose, replay
from remoe_cli.cache.together import replay_together
from remoe_cli.errors import CacheError, UsageError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.memory import Room
from remoe_cli.offload import ExpertStore, OffloadedDecoder, Settings
from remoe_cli.routing import RoutingTrace

pytestmark = pytest.mark.usefixtures("one_thread")


# batches, tiers, guesses, warm caches

PROMPTS = [[(7 * i + 31 * row + 5) % VOCABULARY for i in range(9)] for row in range(4)]


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("ram", [0, 100_000], ids=["files", "RAM tier"])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_a_batch_equals_its_resident_run_and_the_replay_of_its_unions(folders, family, ram, batch):
    checkpoint = Checkpoint.open(folders(family, torch.bfloat16))
    with OffloadedDecoder(checkpoint, EXPERTS, batch=batch, settings=Settings(ram=ram)) as decoder:
        resident = decoder.decode_batch(PROMPTS[:batch], 10, keep_logits=True)
        assert resident.logits.shape == (batch, 10, VOCABULARY) and len(resident.ids) == batch
        for capacity, admission, policy in product((TOP_K, TOP_K + 2, EXPERTS), ("forced", "bypass"), ("lru", "lfu")):
            decoder.configure(capacity, policy, admission=admission, batch=batch)
            done = decoder.decode_batch(PROMPTS[:batch], 10, keep_logits=True)
            assert done.ids == resident.ids and torch.equal(done.logits, resident.logits)
            counts = (done.counts.hits, done.counts.misses, done.counts.evictions)
            assert slow_batch(done.trace, policy, capacity, admission) == counts
            assert tuple(replay_together(done.trace, batch, policy, capacity, admission=admission))[1:] == counts
            assert done.counts.decode.reads == done.counts.misses
            assert done.counts.decode.bytes == done.counts.misses * decoder.expert_bytes
            assert (done.counts.decode.ram > 0) == (ram > 0)
        # each request is what it is alone, up to the rounding of products with several rows
        decoder.configure(EXPERTS)
        for row, prompt in enumerate(PROMPTS[:batch]):
            alone = decoder.decode(prompt, 10, forced=resident.ids[row], keep_logits=True)
            assert (alone.logits.float() - resident.logits[row].float()).abs().max() < 0.25
            assert np.array_equal(request(done.trace, row).prefill, alone.trace.prefill)


def request(trace: RoutingTrace, row: int) -> RoutingTrace:
    rows = slice(trace.borders[row], trace.borders[row + 1])
    borders = np.array([0, rows.stop - rows.start])
    return RoutingTrace(trace.experts[rows], borders, trace.prefill[rows], trace.n_experts, weights=trace.weights[rows])


def slow_batch(trace, policy, capacity, admission) -> tuple[int, int, int]:
    """Hits, misses and evictions of the requests of a trace in lockstep: unions by their last mention, by the slow caches."""
    totals = [0, 0, 0]
    requests = [request(trace, row).decode() for row in range(trace.n_requests)]
    for layer in range(trace.n_layers):
        steps, weights = [], []
        for token in range(requests[0].n_tokens):
            mentions = [
                (int(one.experts[token, layer, k]), float(one.weights[token, layer, k]))
                for one in requests
                for k in reversed(range(trace.top_k))
            ]
            kept = [m for i, m in enumerate(mentions) if m[0] not in {later[0] for later in mentions[i + 1 :]}]
            steps.append([expert for expert, _ in kept])
            weights.append([weight for _, weight in kept])
        past = History(steps, 1, trace.n_experts, weights, None, parameter=choose(policy).parameter)
        for step in slow_cache(policy, capacity, admission, past)[0]:
            for place, part in enumerate((step.hits, step.misses, step.evicted)):
                totals[place] += len(part)
    return tuple(totals)


TIERS = {
    "one reader": Settings(readers=1),
    "buffered": Settings(io="buffered"),
    "a small RAM tier": Settings(ram=100_000),
    "all in RAM": Settings(ram=10**7),
    "guess": Settings(guess=2),
    "guess over RAM": Settings(guess=1, ram=100_000, readers=3),
    "throttle": Settings(throttle=1e9),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("settings", TIERS.values(), ids=TIERS)
def test_no_way_to_the_slots_changes_tokens_or_counts(checkpoint, settings, device):
    dtype = dtype_of(checkpoint)
    with OffloadedDecoder(checkpoint, 3, device=device, dtype=dtype) as decoder:
        plain = decoder.decode(PROMPT, NEW, keep_logits=True)
    with OffloadedDecoder(checkpoint, 3, device=device, dtype=dtype, settings=settings) as decoder:
        for _ in range(2):
            done = decoder.decode(PROMPT, NEW, keep_logits=True)
            assert done.ids == plain.ids and torch.equal(done.logits, plain.logits)
            assert done.counts[:4] == plain.counts[:4]
            reads = done.counts.misses - done.counts.guessed + done.counts.guesses
            assert done.counts.decode.reads == reads == sum(map(len, done.loads))
            assert done.counts.decode.bytes == reads * decoder.expert_bytes
            assert decoder._pool.n_free == decoder.settings.guess, "a slot was lost, or an expert is held twice"
            if settings.ram == 10**7:  # what a token loads for the first time, the prompt did not need
                first = len({load for loads in done.loads for load in loads})
                assert done.counts.decode.ram >= reads - first > 0
        if settings.guess:
            assert 0 < done.counts.guessed <= done.counts.guesses <= settings.guess * decoder.n_layers * (NEW - 1)
        else:
            assert (done.counts.guesses, done.counts.guessed) == (0, 0)


@pytest.mark.parametrize(
    "policy, admission, capacity", product(("lru", "lfu", "lrfu"), ("forced", "bypass"), (2, 3, 5))
)
def test_prompts_through_the_cache_count_as_the_replay(folders, policy, admission, capacity):
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), EXPERTS) as decoder:
        plain = decoder.decode(PROMPT, NEW, keep_logits=True)
    checkpoint = Checkpoint.open(folders("mixtral"))
    with OffloadedDecoder(
        checkpoint, capacity, policy, admission=admission, settings=Settings(warm="batch")
    ) as decoder:
        done = decoder.decode(PROMPT, NEW, keep_logits=True)
        again = decoder.decode(PROMPT, NEW)
    assert torch.equal(done.logits, plain.logits) and done.counts[:4] == again.counts[:4]
    simulated = replay(done.trace, policy, capacity, admission=admission, warm="batch")
    assert (simulated.hits, simulated.misses, simulated.evictions) == done.counts[1:4]
    assert done.counts.prefill.reads == simulated.prefill_misses


@pytest.mark.parametrize("policy, admission", product(("lru", "lfu", "arc"), ("forced", "bypass")))
def test_a_cache_that_lives_on_counts_as_the_replay(folders, policy, admission):
    checkpoint = Checkpoint.open(folders("deepseek_v2", torch.bfloat16))
    cold = OffloadedDecoder(checkpoint, EXPERTS)
    with OffloadedDecoder(checkpoint, 4, policy, admission=admission, settings=Settings(warm="carry")) as decoder:
        done = [decoder.decode(prompt, NEW, keep_logits=True) for prompt in (PROMPT, PROMPTS[0], PROMPT)]
    for one, prompt in zip(done, (PROMPT, PROMPTS[0], PROMPT), strict=True):
        assert torch.equal(one.logits, cold.decode(prompt, NEW, keep_logits=True).logits)
    trace = RoutingTrace.concat([one.trace for one in done])
    simulated = replay(trace, policy, 4, admission=admission, warm="carry")
    assert simulated.request_misses.tolist() == [one.counts.misses for one in done]
    assert simulated.evictions == sum(one.counts.evictions for one in done)
    cold.close()


def test_a_request_that_fails_leaves_a_decoder_that_works(folders, monkeypatch):
    with OffloadedDecoder(Checkpoint.open(folders("olmoe")), 3, settings=Settings(warm="carry", guess=1)) as decoder:
        first = decoder.decode(PROMPT, NEW)
        with monkeypatch.context() as patch:
            patch.setattr("remoe_cli.offload.rows.run_expert", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                decoder.decode(PROMPT, NEW)
        again = decoder.decode(PROMPT, NEW)
    assert again.ids == first.ids and again.counts[:4] == first.counts[:4], "the cache was not started anew"


def test_guesses_that_miss_starve_no_layer(folders, monkeypatch):
    """On slow storage guesses land late; those that nobody wants must not take the slots of strangers that pass through."""
    read = ExpertStore.read

    def slow(self, image, row):
        sleep(0.002)
        return read(self, image, row)

    monkeypatch.setattr(ExpertStore, "read", slow)
    checkpoint = Checkpoint.open(folders("mixtral"))
    for admission, policy, warm in product(("forced", "bypass"), ("lru", "lfu"), ("cold", "carry")):
        settings = Settings(readers=1, guess=2, warm=warm)
        with OffloadedDecoder(checkpoint, 5, policy, admission=admission, settings=settings) as decoder:
            for prompt in (PROMPT, PROMPTS[0]):
                done = decoder.decode(prompt, 24)
                reads = done.counts.misses - done.counts.guessed + done.counts.guesses
                assert done.counts.decode.reads == reads
                held = sum(len(block.cache.resident) for block in decoder._blocks)
                assert decoder._pool.n_free == len(decoder._pool.rows) - held


def test_a_configuration_that_is_interrupted_is_taken_up_anew(folders, monkeypatch):
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, settings=Settings(warm="carry")) as decoder:
        plain = decoder.decode(PROMPT, NEW, keep_logits=True)
        with monkeypatch.context() as patch:
            patch.setattr("remoe_cli.offload.slots.Arena", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                decoder.configure(4)
        assert torch.equal(decoder.decode(PROMPT, NEW, keep_logits=True).logits, plain.logits)
        with monkeypatch.context() as patch:
            patch.setattr("remoe_cli.offload.budget.memory.available", lambda: Room(10**3, "the machine"))
            with pytest.raises(CacheError, match=r"take .* more, but the machine has"):
                decoder.configure(8)
        with torch.inference_mode():
            decoder.configure(3)
            assert torch.equal(decoder.decode(PROMPT, NEW, keep_logits=True).logits, plain.logits)


def test_settings_are_checked(folders):
    for wrong in ({"readers": 0}, {"io": "mmap"}, {"warm": "hot"}, {"ram": -1}, {"guess": -1}, {"throttle": 0.0}):
        with pytest.raises(UsageError):
            Settings(**wrong)
    with pytest.raises(UsageError, match="guess of 3"):
        OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, settings=Settings(guess=3))
    with pytest.raises(CacheError, match="once a token"):
        OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, "decayed", batch=2)
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, batch=2) as decoder:
        for prompts in ([], [[1], [1, 2]], [[1], [2], [3]], [[], []]):
            with pytest.raises(UsageError):
                decoder.decode_batch(prompts, 2)
        with pytest.raises(UsageError):
            decoder.decode_batch([[1], [2]], 2, forced=[[1, 2], [3]])
        with pytest.raises(UsageError, match="guess of 3"):
            decoder.configure(3, settings=Settings(guess=3))
        with pytest.raises(CacheError, match="once a token"):
            decoder.configure(3, "decayed", settings=Settings(warm="batch"))
        with pytest.raises(ValueError, match="fixed"):
            decoder.configure(3, settings=Settings(readers=1))

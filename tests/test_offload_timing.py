"""What a token's time went to, and what the storage alone would have taken."""

from time import perf_counter, sleep

import pytest
import torch
from decoding import PROMPT
from tiny_models import EXPERTS

from remoe_cli.cache import ExpertCache
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, Settings
from remoe_cli.offload.compute import SingleToken
from remoe_cli.offload.timing import PHASES

pytestmark = pytest.mark.usefixtures("one_thread")


def test_latencies_add_up(folders):
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 3) as decoder:
        start = perf_counter()
        latency = decoder.decode(PROMPT, 6).latency
        wall = perf_counter() - start
        single = decoder.decode(PROMPT, 1).latency
    assert len(latency.itl_s) == 5 and min(latency.itl_s) > 0 and latency.ttft_s > 0
    assert latency.e2el_s == pytest.approx(latency.ttft_s + sum(latency.itl_s))
    assert latency.e2el_s < wall
    assert latency.tpot_s == pytest.approx((latency.e2el_s - latency.ttft_s) / 5)
    assert single.tpot_s is None and single.itl_s == () and single.e2el_s == single.ttft_s


def test_compute_threads_are_set_while_decoding_only(folders, monkeypatch):
    torch.set_num_threads(2)
    try:
        with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 3, threads=1) as decoder:
            seen = []
            decoder._model.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
            decoder.decode(PROMPT, 2)
            assert seen == [1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_the_split_adds_up_to_the_time_of_each_token(folders):
    with OffloadedDecoder(Checkpoint.open(folders("deepseek_v2")), 3) as decoder:
        done = decoder.decode(PROMPT, 6)
    assert tuple(done.split.prefill) == tuple(done.split.tokens) == PHASES
    assert sum(done.split.prefill.values()) == pytest.approx(done.latency.ttft_s)
    for token, itl in enumerate(done.latency.itl_s):
        assert sum(done.split.tokens[name][token] for name in PHASES) == pytest.approx(itl)
    assert min(min(values) for values in done.split.tokens.values()) >= 0
    assert sum(done.split.mean().values()) == pytest.approx(done.latency.tpot_s)


def test_time_is_put_down_to_what_took_it(folders, monkeypatch):
    """Each kind of work in turn is made to take 20 ms a call, far more than all else."""
    pause = 0.02

    def slow(function):
        def slowed(*args, **kwargs):
            sleep(pause)
            return function(*args, **kwargs)

        return slowed

    checkpoint = Checkpoint.open(folders("deepseek_v2"))
    for phase in ("attention", "router", "experts", "bookkeeping", "dense"):
        with OffloadedDecoder(checkpoint, EXPERTS) as decoder:
            decoder.decode(PROMPT, 2)
            blocks = decoder._blocks
            with monkeypatch.context() as patch:
                if phase == "attention":
                    for layer in decoder._model.model.layers[1:]:
                        patch.setattr(layer.self_attn, "forward", slow(layer.self_attn.forward))
                for block in blocks:
                    if phase == "router":
                        patch.setattr(block, "_route", slow(block._route))
                    elif phase == "dense":
                        patch.setattr(block, "_share", slow(block._share))
                if phase == "experts":
                    patch.setattr(SingleToken, "run", slow(SingleToken.run))
                if phase == "bookkeeping":
                    patch.setattr(ExpertCache, "step", slow(ExpertCache.step))
                split = decoder.decode(PROMPT, 4).split.mean()
            calls = decoder.n_layers  # all experts are there, so they run in one call
            assert split[phase] >= calls * pause, (phase, split)
            assert max(split, key=split.get) == phase, (phase, split)


def test_waiting_is_what_a_slow_link_costs(folders):
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 2) as decoder:
        rate = decoder.expert_bytes / 0.003  # 3 ms an expert, one after the other
        decoder.configure(2, settings=Settings(throttle=rate))
        done = decoder.decode(PROMPT, 5)
        least = done.counts.misses * 0.003 / 4
        assert done.latency.tpot_s >= least
        assert done.split.mean()["wait"] > 0.7 * least
        floor = min((decoder.floor(done) for _ in range(4)), key=lambda one: one.tpot_s)  # a busy machine oversleeps
        assert least <= floor.tpot_s < 2 * least and len(floor.token_s) == 4
        assert floor.bytes == done.counts.decode.bytes
        assert floor.bandwidth == pytest.approx(rate, rel=0.4)
        free = decoder._pool.n_free
        assert free == 2 * decoder.n_layers + decoder.staging, "the floor left experts in the slots"
        assert decoder.decode(PROMPT, 5).ids == done.ids

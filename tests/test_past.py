"""A text that goes on: each new token is told, an answer may end early, and the next request begins where it ended."""

import numpy as np
import pytest
import tiny_models
import torch
from decoding import NEW, PROMPT
from tiny_models import EXPERTS, MODEL_TYPES

from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, Settings
from remoe_cli.offload.past import cut, Past
from remoe_cli.offload.sampling import Sampling
from remoe_cli.offload.timing import Timeline

pytestmark = pytest.mark.usefixtures("one_thread")
MORE = [7, 120, 33, 2]


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_told_tokens_and_counts_are_those_of_a_plain_run(folders, family):
    checkpoint = Checkpoint.open(folders(family, torch.bfloat16))
    sampling = Sampling(temperature=1.5, seed=3) if family in MODEL_TYPES[::2] else None
    with OffloadedDecoder(checkpoint, 3) as decoder:
        plain = decoder.decode(PROMPT, NEW, sampling=sampling)
        told = []
        done = decoder.go_on(Past(), PROMPT, NEW, lambda token: bool(told.append(token)), sampling=sampling)
    assert done.ids == plain.ids == [token.id for token in told]
    assert done.counts[:4] == plain.counts[:4] and np.array_equal(done.trace.experts, plain.trace.experts)
    assert (told[0].hits, told[0].misses, told[0].nbytes) == (0, 0, 0)
    assert (told[-1].hits, told[-1].misses) == (done.counts.hits, done.counts.misses)
    assert [a.hits <= b.hits and a.misses <= b.misses for a, b in zip(told, told[1:])] == [True] * (NEW - 1)


@pytest.mark.parametrize("policy", ["lru", "gate_ahead:2", "lru+st_moe:2"])
@pytest.mark.parametrize("after", [1, 2, 7])
def test_an_answer_ended_early_is_the_beginning_of_the_whole_one(folders, after, policy):
    checkpoint = Checkpoint.open(folders("deepseek_v2"))
    with OffloadedDecoder(checkpoint, 3, policy) as decoder:
        whole, told = decoder.decode(PROMPT, NEW), []
        short = decoder.decode(PROMPT, after)
        done = decoder.go_on(Past(), PROMPT, NEW, lambda token: told.append(token) or len(told) == after)
    assert done.ids == whole.ids[:after] == short.ids
    assert len(done.latency.itl_s) == after - 1 == len(done.loads)
    assert done.counts[:2] == short.counts[:2]
    assert np.array_equal(done.trace.experts, short.trace.experts)
    assert done.counts.decode.reads == sum(map(len, done.loads))
    if policy == "lru":
        assert done.counts[:4] == short.counts[:4] and done.loads == short.loads


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_the_next_request_goes_on_as_if_all_were_one_prompt(folders, family):
    checkpoint = Checkpoint.open(folders(family))
    with OffloadedDecoder(checkpoint, 3, settings=Settings(warm="carry")) as decoder:
        past = Past()
        first = decoder.go_on(past, PROMPT, 5, lambda _: False)
        assert past.ids == [*PROMPT, *first.ids[:-1]]
        text = [*PROMPT, *first.ids, *MORE]
        rest = past.rest(text)
        assert rest == [first.ids[-1], *MORE]
        second = decoder.go_on(past, rest, 6, lambda _: False)
        assert past.ids == [*text, *second.ids[:-1]]
        again = past.rest([*text[:-1], 99, 98])  # the last of MORE and the second answer are taken back
        assert past.ids + again == [*text[:-1], 99, 98]
        assert len(again) == 2 or family == "gpt_oss"  # whose window is shorter than that
        third = decoder.go_on(past, again, 6, lambda _: False)
        whole = [decoder.decode(ids, 6, keep_logits=True) for ids in (text, [*text[:-1], 99, 98])]
    assert [second.ids, third.ids] == [one.ids for one in whole]
    n_prompt = len(rest)
    assert np.array_equal(second.trace.experts[n_prompt:], whole[0].trace.experts[len(text) :])
    assert second.trace.prefill.sum() == n_prompt


def test_a_carried_cache_serves_the_next_turn(folders):
    checkpoint = Checkpoint.open(folders("deepseek_v2"))
    with OffloadedDecoder(checkpoint, EXPERTS, settings=Settings(warm="carry")) as decoder:
        past = Past()
        first = decoder.go_on(past, PROMPT, NEW, lambda _: False)
        second = decoder.go_on(past, past.rest([*PROMPT, *first.ids, *MORE]), NEW, lambda _: False)
        used = [set(first.trace.decode().experts[:, layer].ravel()) for layer in range(decoder.n_layers)]
        new = sum(
            len(set(second.trace.decode().experts[:, layer].ravel()) - used[layer]) for layer in range(decoder.n_layers)
        )
    assert second.counts.misses == new < first.counts.misses


def test_an_error_leaves_a_past_that_begins_anew(folders):
    checkpoint = Checkpoint.open(folders("deepseek_v2"))

    def stop(_token):
        raise KeyboardInterrupt

    with OffloadedDecoder(checkpoint, 3, settings=Settings(warm="carry")) as decoder:
        past = Past()
        first = decoder.go_on(past, PROMPT, 5, lambda _: False)
        with pytest.raises(KeyboardInterrupt):
            decoder.go_on(past, MORE, 5, stop)
        assert past.ids == [] and past.rest(PROMPT) == PROMPT
        assert decoder.go_on(past, PROMPT, 5, lambda _: False).ids == first.ids


def test_past_a_window_nothing_is_taken_back(tmp_path):
    checkpoint = Checkpoint.open(tiny_models.make("gpt_oss", tmp_path, sliding_window=4))
    with OffloadedDecoder(checkpoint, 3) as decoder:
        past = Past()
        first = decoder.go_on(past, PROMPT, 5, lambda _: False)
        text = [*PROMPT, *first.ids[:-2], 99]
        assert past.rest(text) == text and past.ids == []
        assert decoder.go_on(past, text, 5, lambda _: False).ids == decoder.decode(text, 5).ids


def test_a_model_that_keeps_another_state_reads_all_again(tmp_path):
    checkpoint = Checkpoint.open(tiny_models.make("qwen3_next", tmp_path))
    with OffloadedDecoder(checkpoint, 3) as decoder:
        past = Past()
        first = decoder.go_on(past, PROMPT, 5, lambda _: False)
        text = [*PROMPT, *first.ids, *MORE]
        assert past.ids == [] and past.rest(text) == text
        assert decoder.go_on(past, text, 5, lambda _: False).ids == decoder.decode(text, 5).ids


@pytest.mark.parametrize("held, text, rest, left", [
    ([], [1, 2], [1, 2], []),
    ([1, 2], [1, 2, 3], [3], [1, 2]),
    ([1, 2], [1, 2], [2], [1]),  # a last token is fed in any case
    ([1, 2, 3], [1, 9], [9], [1]),
    ([1, 2, 3], [9], [9], []),
])  # fmt: skip
def test_the_common_beginning(held, text, rest, left):
    class Cache:
        def crop(self, change):
            assert change < 0

    past = Past()
    past.ids, past._cache = list(held), {"cache": Cache()}
    assert past.rest(text) == rest and past.ids == left


def test_loads_for_a_step_that_never_came_are_the_last_ones():
    loads = [[(0, 1)], [(1, 2)], [(0, 3)], []]
    cut(loads, 2)
    assert loads == [[(0, 1)], [(1, 2), (0, 3)]]
    cut(loads, 2)
    assert loads == [[(0, 1)], [(1, 2), (0, 3)]]
    cut(loads, 0)
    assert loads == []


def test_time_aside_counts_nowhere(monkeypatch):
    clock = iter([0.0, 1.0, 11.0, 12.0])
    monkeypatch.setattr("remoe_cli.offload.timing.perf_counter", lambda: next(clock))
    timeline = Timeline(torch.device("cpu"))
    timeline.to("aside")
    timeline.to("dense")
    timeline.token()
    latency, split = timeline.finish()
    assert latency.ttft_s == 2.0 == split.prefill["dense"]

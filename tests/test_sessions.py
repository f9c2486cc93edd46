"""Sessions that take turns in one cache: tokens of lone requests, counts of the replay, times that add up."""

from itertools import product

import numpy as np
import pytest
import torch
from commands import refused, report_of
from decoding import PROMPT
from tiny_models import EXPERTS, VOCABULARY

from remoe_cli.cache import replay
from remoe_cli.errors import UsageError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, Sampling, Settings, take_turns
from remoe_cli.offload.sessions import _times
from remoe_cli.offload.timing import Latency, Split
from remoe_cli.routing import RoutingTrace

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = [[(7 * i + 31 * row + 5) % VOCABULARY for i in range(4 + 2 * row)] for row in range(5)]
CARRY = Settings(warm="carry")


@pytest.mark.parametrize("policy, admission", product(("lru", "lfu", "arc"), ("forced", "bypass")))
@pytest.mark.parametrize("family", ("deepseek_v2", "gpt_oss"))
def test_sessions_say_what_they_say_alone_and_count_as_the_replay(folders, family, policy, admission):
    checkpoint = Checkpoint.open(folders(family))
    with OffloadedDecoder(checkpoint, EXPERTS) as decoder:
        alone = [decoder.decode(prompt, 6) for prompt in PROMPTS]
    with OffloadedDecoder(checkpoint, 4, policy, admission=admission, settings=CARRY) as decoder:
        done = [*take_turns(decoder, PROMPTS[:3], 6), *take_turns(decoder, PROMPTS[3:], 6)]
    for one, other in zip(done, alone, strict=True):
        assert one.ids == other.ids and np.array_equal(one.trace.experts, other.trace.experts)
        assert one.trace.prefill.tolist() == other.trace.prefill.tolist()
    trace = RoutingTrace.concat([one.trace for one in done])
    found = replay(trace, policy, 4, admission=admission, warm="carry", sessions=3)
    assert found.request_misses.tolist() == [one.counts.misses for one in done]
    assert found.request_accesses.tolist() == [one.counts.accesses for one in done]
    assert found.evictions == sum(one.counts.evictions for one in done)
    for one in done:
        assert one.counts.decode.reads == one.counts.misses == sum(map(len, one.loads))
        assert one.counts.decode.bytes == one.counts.misses * decoder.expert_bytes


def test_guesses_forced_tokens_and_samples(folders):
    checkpoint = Checkpoint.open(folders("mixtral"))
    forced = [[(3 * i + row) % VOCABULARY for i in range(5)] for row in range(2)]
    with OffloadedDecoder(checkpoint, 4, settings=Settings(warm="carry", guess=1)) as decoder:
        done = take_turns(decoder, PROMPTS[:2], 5, forced=forced)
        assert [one.ids for one in done] == forced
        for one in done:
            assert one.counts.decode.reads == one.counts.misses - one.counts.guessed + one.counts.guesses
        sampling = Sampling(temperature=1.0, seed=3)
        sampled = take_turns(decoder, PROMPTS[:2], 8, sampling=sampling)
        assert [one.ids for one in sampled] == [decoder.decode(p, 8, sampling=sampling).ids for p in PROMPTS[:2]]


def test_times_of_a_session_run_on_while_others_have_their_turn():
    steps = Latency(1.0, (2.0, 10.0, 20.0, 100.0, 200.0))  # two prompts, then two tokens of each in turn
    split = Split({"wait": 1.0}, {"wait": (2.0, 10.0, 20.0, 100.0, 200.0)})
    assert _times(steps, split, 0, 2) == (Latency(1.0, (12.0, 120.0)), Split({"wait": 1.0}, {"wait": (10.0, 100.0)}))
    assert _times(steps, split, 1, 2) == (Latency(3.0, (30.0, 300.0)), Split({"wait": 2.0}, {"wait": (20.0, 200.0)}))


def test_a_policy_that_loads_ahead_of_the_next_token_is_refused(folders):
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 4, settings=CARRY) as decoder:
        decoder.policy = "gate_ahead"
        with pytest.raises(UsageError, match="another request's comes next"):
            take_turns(decoder, [PROMPT, PROMPT], 3)


def test_a_session_that_fails_leaves_a_decoder_that_works(folders, monkeypatch):
    with OffloadedDecoder(Checkpoint.open(folders("olmoe")), 3, settings=CARRY) as decoder:
        first = [one.ids for one in take_turns(decoder, PROMPTS[:2], 4)]
        with monkeypatch.context() as patch:
            patch.setattr("remoe_cli.offload.rows.run_expert", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                take_turns(decoder, PROMPTS[:2], 4)
        assert [one.ids for one in take_turns(decoder, PROMPTS[:2], 4)] == first
        assert torch.equal(*(decoder.decode(PROMPTS[0], 4, keep_logits=True).logits for _ in range(2)))


def test_the_command_shows_shared_and_single_figures(remoe, model, texts):
    asked = ("decode", model, "--prompts", texts, "--requests", 5, "--tokens", 6, "--cache", 4)
    row = report_of(remoe(*asked, "--warm", "carry", "--sessions", 2, "--json"))["rows"][0]
    lone = report_of(remoe(*asked, "--warm", "carry", "--json"))["rows"][0]
    assert row["texts"] == lone["texts"] and lone["sessions"] is None
    first, second = row["sessions"]
    assert (first["requests"], second["requests"]) == (3, 2) and first["steps"] == 15
    for name in ("hits", "misses", "steps"):
        assert first[name] + second[name] == row[name]
    said = remoe(*asked, "--warm", "carry", "--sessions", 2).out
    assert "2 sessions in turn (hit 0." in said
    forced = ("--context", 4, "--forced")
    assert report_of(remoe(*asked, *forced, "--warm", "carry", "--sessions", 2, "--json"))["rows"][0][
        "perplexity"
    ] == pytest.approx(report_of(remoe(*asked, *forced, "--json"))["rows"][0]["perplexity"], rel=1e-5)


def test_sessions_are_refused_where_they_cannot_be(remoe, model, texts):
    asked = ("decode", model, "--cache", 4, "--prompts", texts)
    refused(remoe(*asked, "--sessions", 0), "--sessions is at least 1, not 0")
    refused(remoe(*asked, "--sessions", 2), "--sessions goes with --warm carry", "--warm carry")
    carry = ("--warm", "carry", "--sessions", 2)
    refused(remoe("decode", model, "--cache", 4, *carry), "it needs --prompts", "--prompts demo")
    refused(remoe(*asked, *carry, "--batch", 2), "takes no --batch")
    refused(remoe(*asked, *carry, "--reroute", "cache-prior:0.1"), "takes no --reroute")
    refused(remoe(*asked, *carry, "--policy", "gate_ahead"), "another request's comes next")

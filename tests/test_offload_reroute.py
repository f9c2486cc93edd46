"""Rerouting in the offloaded decoder: the same choices as in the measured text, and counts of its own trace as the replay's."""

import json
from itertools import product

import numpy as np
import pytest
import torch
from commands import refused
from decoding import heads_of, NEW, PROMPT, slow_counts
from tiny_models import EXPERTS, TOP_K, VOCABULARY

from remoe_cli.cache import replay
from remoe_cli.cache.reroute import Rule
from remoe_cli.errors import UsageError
from remoe_cli.families import find_gates
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.offloaded import measure_offloaded
from remoe_cli.measure.prompts import default_recipe, lay_out, load_in_order
from remoe_cli.measure.requests import Requests
from remoe_cli.measure.rerouted import measure_rerouted
from remoe_cli.offload import OffloadedDecoder, Settings
from remoe_cli.train.data import load_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

RULES = [Rule("cache-prior", 0.5, 1), Rule("max-rank", 5, 1), Rule("threshold", 0.8, 0)]
OFF = [Rule("cache-prior", 0, 1), Rule("max-rank", TOP_K, 0), Rule("threshold", 0, 0)]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss", "olmoe"])
def test_it_chooses_as_the_measured_text_does(folders, family):
    """A text of which the first token is the prompt and all others are fed, both from a cold cache."""
    ids = [(7 * i * i + 3) % VOCABULARY for i in range(24)]
    checkpoint = Checkpoint.open(folders(family))
    model = load_resident(checkpoint, torch.float32, "cpu")
    model.set_experts_implementation("eager")
    with OffloadedDecoder(checkpoint, 3, settings=Settings(warm="batch")) as decoder:
        for rule, policy in product(RULES, ("lru", "gate")):
            theirs = measure_rerouted(model, find_gates(model), [ids], len(ids), 1, rule, capacity=3, policy=policy)
            decoder.configure(3, policy, reroute=rule)
            ours = decoder.decode(ids[:1], len(ids), forced=[*ids[1:], 0])
            assert np.array_equal(ours.trace.experts, theirs.trace.experts), (rule, policy)
            np.testing.assert_allclose(
                ours.trace.weights.astype(np.float32), theirs.trace.weights.astype(np.float32), atol=2e-3
            )
            counts = ours.counts
            assert (counts.hits, counts.misses + counts.prefill.reads, counts.evictions) == theirs.counts
            assert counts.rerouted == theirs.changed > 5


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_counts_are_those_of_its_own_trace(folders, rule):
    """With policies that read ahead too: what is on its way counts as resident."""
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe", torch.bfloat16)), EXPERTS) as decoder:
        decoder.apply_gates({}, heads_of(decoder))
        for policy, admission in (
            ("lru", "forced"), ("lfu", "bypass"), ("temporal", "bypass"), ("spatio_temporal:4", "forced"),
            ("gate_ahead:3", "bypass"), ("spatio:5", "bypass"),
        ):  # fmt: skip
            decoder.configure(3, policy, admission=admission)
            stock = decoder.decode(PROMPT, NEW)
            decoder.configure(3, policy, admission=admission, reroute=rule)
            done = decoder.decode(PROMPT, NEW, keep_logits=True)
            again = decoder.decode(PROMPT, NEW, keep_logits=True)
            counts = done.counts
            assert slow_counts(done.trace, policy, 3, admission) == counts[1:5], policy
            simulated = replay(done.trace, policy, 3, admission=admission, threads=1)
            assert (simulated.hits, simulated.misses, simulated.evictions, simulated.proactive) == counts[1:5]
            assert counts.decode.reads == counts.misses + counts.proactive
            assert torch.equal(done.logits, again.logits) and counts.rerouted == again.counts.rerouted > 0
            assert counts.hits > stock.counts.hits and stock.counts.rerouted == 0


def test_switched_off_it_is_the_resident_model_bit_for_bit(checkpoint):
    with OffloadedDecoder(checkpoint, EXPERTS) as decoder:
        resident = decoder.decode(PROMPT, NEW, keep_logits=True)
        for rule in OFF:
            decoder.configure(3, reroute=rule, settings=Settings(guess=1))
            done = decoder.decode(PROMPT, NEW, keep_logits=True)
            assert torch.equal(done.logits, resident.logits) and done.counts.rerouted == 0
        decoder.configure(EXPERTS, reroute=RULES[1])
        assert decoder.decode(PROMPT, NEW).counts.rerouted > 0, "until all experts are there, residents come first"
        decoder.configure(3)
        assert torch.equal(decoder.decode(PROMPT, NEW, keep_logits=True).logits, resident.logits)


def test_a_rule_that_does_not_fit_is_refused(folders):
    with OffloadedDecoder(Checkpoint.open(folders("mixtral")), 3, batch=2) as decoder:
        with pytest.raises(UsageError, match="no batch"):
            decoder.configure(3, batch=2, reroute=RULES[0])
        with pytest.raises(UsageError, match="max-rank is 2"):
            decoder.configure(3, reroute=Rule("max-rank", 99, 0))
    for text, rule in (("cache-prior:0.2", Rule("cache-prior", 0.2, 1)), ("max-rank:5:0", Rule("max-rank", 5, 0))):
        assert Rule.parse(text, 2) == rule
    for text in (
        "cache-prior",
        "cache-prior:x",
        "cache-prior:0.1:3",
        "cache-prior:0.1:1:1",
        "prior:0.1",
        "threshold:2",
    ):
        with pytest.raises(UsageError):
            Rule.parse(text, 2)


def test_measured_cells(folders):
    rng = np.random.default_rng(0)
    requests = Requests(*(torch.from_numpy(rng.integers(3, VOCABULARY, shape)) for shape in ((2, 8), (2, 8))))
    with OffloadedDecoder(Checkpoint.open(folders("olmoe")), 3) as decoder:
        (plain,), (row,) = (
            measure_offloaded(decoder, {"base": {}}, requests, [3], reroute=rule).rows["base"]
            for rule in (None, RULES[0])
        )
    assert plain["exact"] and plain["rerouted"] == 0 and plain["counts_match"]
    assert row["exact"] is None and row["counts_match"] and row["rerouted"] > 0 and row["hits"] > plain["hits"]


def test_the_command(remoe, model):
    options = ("decode", model, "--cache", 3, "--tokens", 24)
    plain, row = (
        json.loads(remoe(*options, *more, "--json").out)["rows"][0] for more in ([], ["--reroute", "max-rank:6"])
    )
    assert (plain["reroute"], row["reroute"]) == (None, "max-rank:6") and plain["rerouted"] == 0
    assert row["hit_ratio"] > plain["hit_ratio"] and row["texts"] != plain["texts"]
    shown = remoe(*options, "--reroute", "max-rank:6").out
    assert "--reroute max-rank:6" in shown and f"{row['rerouted']} rerouted" in shown
    for more, words in (
        (["--reroute", "max-rank"], ["METHOD:STRENGTH", "--reroute cache-prior:0.1"]),
        (["--reroute", "max-rank:99"], ["a strength of max-rank is 2", "--reroute cache-prior:0.1"]),
        (["--reroute", "best:1"], ["cache-prior, max-rank, threshold", "--reroute cache-prior:0.1"]),
        (["--reroute", "cache-prior:0.1", "--batch", 2, "--temperature", 1], ["takes no --batch", "--reroute"]),
    ):
        refused(remoe(*options, *more), *words)


def test_a_row_beside_the_base_with_as_many_slots(remoe, model, texts):
    """Both go on with the texts' own tokens; the base's perplexity is the stock model's."""
    options = (
        "decode",
        model,
        "--cache",
        4,
        "--policy",
        "gate_ahead:3",
        "--admission",
        "bypass",
        "--reroute",
        "max-rank:5",
    )
    options = (
        *options,
        "--prompts",
        texts,
        "--requests",
        3,
        "--context",
        8,
        "--tokens",
        9,
        "--forced",
        "--beside-base",
    )
    done = json.loads(remoe(*options, "--json").out)
    row, base = done["rows"]
    assert done["conditions"]["prompt_tokens"] == [8, 8, 8] and row["texts"] == base["texts"]
    assert (base["gates"], base["policy"], base["admission"], base["reroute"]) == ("base", "lru", "forced", None)
    slots = 2 * row["capacity"] + row["staging"]
    assert (base["capacity"], base["staging"]) == (5, 0) and 2 * 4 < slots <= 2 * 5
    assert (
        row["bytes_of_base"] == pytest.approx(row["bytes"] / base["bytes"]) and row["rerouted"] > 0 == base["rerouted"]
    )
    assert row["perplexity_change"] == pytest.approx(row["perplexity"] / base["perplexity"] - 1) != 0

    stock = load_resident(Checkpoint.open(model), torch.float32, "cpu")
    tokenizer = load_tokenizer(Checkpoint.open(model))
    recipe = default_recipe(str(model), stock.config.model_type)
    found, _ = load_in_order(str(texts), recipe, tokenizer)
    wholes = [ids for _, ids in lay_out(found, 3, together=1, context=8 + 9, room=None)[0]]
    with torch.inference_mode():
        losses = [
            torch.nn.functional.cross_entropy(stock(torch.tensor([ids])).logits[0, 7:-1], torch.tensor(ids[8:]))
            for ids in wholes
        ]
    assert base["perplexity"] == pytest.approx(torch.stack(losses).mean().exp().item(), rel=1e-4)
    table = remoe(*options).out
    for words in ("of base", "perplexity", "change", "rerouted", "gate_ahead:3", "max-rank:5", "lru"):
        assert words in table
    assert "With" not in table
    alone = remoe(*[one for one in options if one != "--beside-base"]).out
    assert f"perplexity {row['perplexity']:.3f}" in alone


def test_what_goes_on_with_the_texts_own_tokens_needs(remoe, model, texts):
    options = ("decode", model, "--cache", 3)
    for more, words in (
        (["--forced"], ["needs --prompts, and --context", "--prompts demo", "--context 32", "--forced"]),
        (["--forced", "--prompts", texts], ["needs --prompts, and --context", "--context 32"]),
        (["--forced", "--prompts", texts, "--context", 4, "--top-k", 3], ["nothing is drawn", "--forced"]),
        (["--beside-base"], ["needs --forced", "--forced", "--beside-base"]),
    ):
        refused(remoe(*options, *more), *words)

"""The report's renderers and the demo checkpoint's own promises."""

import copy
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from remoe_cli import demo
from remoe_cli.demo import corpus
from remoe_cli.evaluate import finite
from remoe_cli.families import find_gates
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.decode_traces import decode
from remoe_cli.measure.text import measure_rows
from remoe_cli.report.figures import figures, Measured, text_figures
from remoe_cli.report.renderers.markdown import markdown
from remoe_cli.report.renderers.terminal import terminal
from remoe_cli.report.rows import cell, table


@pytest.fixture(scope="module")
def checkpoint():
    return resolve("demo")


@pytest.fixture(scope="module")
def model(checkpoint):
    return load_resident(checkpoint, torch.float32, "cpu")


@pytest.fixture(scope="module")
def prompts():
    return torch.arange(3, 3 + 4 * 8).view(4, 8)


@pytest.fixture(scope="module")
def decoded(model, prompts):
    return decode(model, find_gates(model), prompts, 10)


def measured(model, decoded, factor):
    """factor: of the loss in all rows."""
    documents = [torch.arange(start, start + 40).tolist() for start in range(10, 90, 20)]
    text = measure_rows(model, find_gates(model), documents, 20, 8)
    text = text._replace(loss_N=text.loss_N * factor)
    return Measured(text, {"forced": decoded, "greedy": decoded})


@pytest.fixture(scope="module")
def report(model, prompts, decoded):
    conditions = {
        "capacities": [4, 6], "requests": 4, "prompt_tokens": 8, "new_tokens": 10, "text_tokens": 100, "data": "d", "draws": 2,
        "measured_requests": 0, "device_name": "x", "dtype": "float32", "threads": 1, "io": "buffered", "torch": "2",
        "transformers": "5",
    }  # fmt: skip
    base = {
        "id": "demo", "commit": None, "model_type": "deepseek_v2", "moe_layers": 5, "n_experts": 64, "top_k": 6,
        "expert_bytes": 1000,
    }  # fmt: skip
    other = decode(model, find_gates(model), prompts.flip(1), 10)
    both = {"base": measured(model, decoded, 1.0), "remoe": measured(model, other, 1.1)}
    roles = {"base": "base", "remoe": "tuned"}

    def arms(policies, draws, **more):
        found = figures(both, [4, 6], policies, 1000, draws)
        return [{"name": name, "role": roles[name], **of, **more} for name, of in zip(both, found, strict=True)]

    domain = {"name": "poems", "source": "d", "trained": False, "draws": 1, "arms": arms(["lru"], 1)}
    skipped = [{"capacity": 4, "skipped": "needs C >= 6"}]
    return finite(
        {
            "conditions": conditions,
            "base": base,
            "notes": ["a note"],
            "arms": arms(["lru", "belady"], 2, measured=skipped),
            "domains": [domain],
        }
    )


@pytest.mark.parametrize("render", [terminal, markdown])
def test_every_renderer_shows_the_same_cells(report, render):
    shown = render(report)
    _, rows = table(report)
    for row in rows:
        assert row.label.strip() in shown
        for one in row.cells:
            assert one in shown
    assert "needs C >= 6" in shown and "a note" in shown and "poems (not trained on)" in shown
    assert f"{cell(report['arms'][0], 6)['misses']:,}" in shown
    assert "Measured:" not in shown and "Domains: poems of d, 4 requests, 152 tokens of text." in shown.replace(
        "\n", ""
    )


def test_measured_cells_of_now_and_of_older_versions(report):
    times = {"mean": 4.0, "p50": 3.0, "p95": 8.0, "p99": 9.0}
    old = {
        "capacity": 4, "skipped": None, "ttft_ms": times, "tpot_ms": times, "itl_ms": times, "mb_a_token": 1.5,
        "counts_match": True, "exact": None,
    }  # fmt: skip
    split = {"wait": 2.0, "experts": 1.0, "attention": 0.5, "dense": 0.5}
    new = {**old, "split_ms": split, "limit": {"by": "storage", "wait_share": 0.5}, "floor": {"share": 0.25}}
    shown = copy.deepcopy(report)
    for arm, row in zip(shown["arms"], (old, new), strict=True):
        arm["measured"] = [row]
    shown["conditions"] |= {"measured_requests": 2, "capacities": [4]}
    cells = {row.label: row.cells for row in table(shown)[1] if row.group == "C = 4"}
    assert cells["measured wait / experts / rest"] == ["n/a", "50 / 25 / 25 %"]
    assert cells["measured, limited by"] == ["n/a", "storage"]
    assert cells["measured, loads alone"] == ["n/a", "25.0 %"]
    assert "io buffered; torch" in markdown(shown)
    shown["arms"][1]["measured"] = [{**new, "floor": None}]
    assert "measured, loads alone" not in {row.label for row in table(shown)[1]}


@pytest.mark.parametrize(
    ("name", "source", "shown"),
    [
        ("poems", "d", "poems of d"), ("HumanEval", "HumanEval.jsonl.gz", "HumanEval.jsonl.gz"), ("gsm8k", "gsm8k", "gsm8k"),
        ("org/name", "org/name@0123", "org/name@0123"), ("d", "data.jsonl", "d of data.jsonl"), ("code", "demo (x)", "code of demo (x)"),
    ],
)  # fmt: skip
def test_a_domain_is_not_named_twice(report, name, source, shown):
    other = copy.deepcopy(report)
    other["domains"][0].update(name=name, source=source)
    assert f"Domains: {shown}, 4 requests," in markdown(other)


@pytest.mark.parametrize("width", [110, 80, 40])
def test_the_terminal_table_fits(report, width):
    assert max(map(len, terminal(report, width).splitlines())) <= width


def test_cells_hang_together(report):
    for arm in [*report["arms"], *report["domains"][0]["arms"]]:
        for one in arm["cache"]:
            assert one["hits"] + one["misses"] == one["accesses"] == 4 * 10 * 5 * 6
            assert one["mb_a_token"] == pytest.approx(one["misses"] * 1000 / 1e6 / 40)
            assert one["hit_ratio_95"][0] <= one["hit_ratio"] <= one["hit_ratio_95"][1]
        text = arm["text"]
        assert text["perplexity_95"][0] < text["perplexity"] < text["perplexity_95"][1]
        for kind in ("forced", "greedy"):
            part = arm["decode"][kind]
            assert part["eor_95"][0] <= part["eor"] <= part["eor_95"][1]
    json.dumps(report, allow_nan=False)  # nothing but plain values


def test_changes_are_those_of_the_figures(report):
    base, tuned = report["arms"]
    grown = tuned["text"]["perplexity"] / base["text"]["perplexity"] - 1
    assert tuned["text"]["perplexity_change"] == pytest.approx(grown)
    low, high = tuned["text"]["perplexity_change_95"]
    assert low < grown < high
    for before, after in zip(base["cache"], tuned["cache"], strict=True):
        assert after["misses_change"] == pytest.approx(after["misses"] / before["misses"] - 1)
        assert after["misses_change_95"][0] <= after["misses_change"] <= after["misses_change_95"][1]
        assert before["misses_change"] is before["misses_change_95"] is None
    eor = [arm["decode"]["forced"]["eor"] for arm in (base, tuned)]
    assert tuned["decode"]["forced"]["eor_change"] == pytest.approx(eor[1] - eor[0])
    assert base["text"]["perplexity_change"] is base["decode"]["greedy"]["eor_change"] is None


def test_draws_are_equal_parts_and_their_spread_is_a_standard_deviation(report):
    for arm in report["arms"]:
        lru = cell(arm, 6)
        first, second = arm["draws"]
        assert lru["hit_ratio"] == pytest.approx((first["lru_hit_ratio"][1] + second["lru_hit_ratio"][1]) / 2)
        assert lru["mb_a_token"] == pytest.approx((first["lru_mb_a_token"][1] + second["lru_mb_a_token"][1]) / 2)
        assert arm["decode"]["forced"]["eor"] == pytest.approx((first["eor_forced"] + second["eor_forced"]) / 2)
        difference = abs(first["perplexity"] - second["perplexity"])
        assert arm["spread"]["perplexity"] == pytest.approx(difference / 2**0.5)
        assert first["perplexity"] != second["perplexity"]
    (one,) = report["domains"][0]["arms"][0]["draws"]
    assert one["perplexity"] == report["domains"][0]["arms"][0]["text"]["perplexity"]
    assert report["domains"][0]["arms"][0]["spread"] is None


def test_a_change_is_shown_with_its_interval(report):
    part = {"misses_change": -0.279, "misses_change_95": [-0.301, -0.256]}
    arm = copy.deepcopy(report)
    cell(arm["arms"][1], 6).update(part)
    assert "-27.9 % [-30.1, -25.6]" in terminal(arm)
    cell(arm["arms"][1], 6).update({"misses_change": None, "misses_change_95": None})
    assert "n/a" in terminal(arm)


def test_what_is_not_finite_is_null(model):
    rows = measure_rows(model, find_gates(model), [list(range(10, 50))], 20, 2)
    broken = text_figures(rows._replace(loss_N=rows.loss_N * float("nan")), rows)
    assert {key for key, value in finite(broken).items() if value is None} == {
        "perplexity", "perplexity_95", "perplexity_change", "perplexity_change_95", "loss",
    }  # fmt: skip
    endless = finite(text_figures(rows._replace(loss_N=rows.loss_N + 1e6), rows))
    assert endless["perplexity"] is None and endless["loss"] > 1e4
    assert finite({"a": (1.0, [float("inf")])}) == {"a": [1.0, [None]]}


def test_rows_add_up_to_the_text(model):
    """Row by row as in one pass: the sums do not depend on the micro-batch."""
    documents = [list(range(10, 70)), list(range(100, 133))]
    one, many = (measure_rows(model, find_gates(model), documents, 16, 5, batch=batch) for batch in (1, 4))
    assert len(one.loss_N) == 5 and one.pairs_N.tolist() == many.pairs_N.tolist()
    assert one.loss_N == pytest.approx(many.loss_N, rel=1e-5)
    assert one.measures().tokens == one.pairs_N.sum()


def test_the_decode_trace_is_what_a_full_pass_routes(model, decoded):
    """Fed token by token with a cache, and in one pass over the same ids: the same experts."""
    from remoe_cli.families import RouterTap
    from remoe_cli.measure.decode_traces import canonical

    ids = torch.cat([torch.arange(3, 11), torch.tensor(decoded.ids_RS[0])])[None]
    with RouterTap(find_gates(model)) as tap, torch.no_grad():
        model(ids, use_cache=False)
        experts, _ = canonical(tap.take())
    same = (experts[8:] == decoded.trace.experts[:10]).mean()
    assert same > 0.98  # near-ties may flip between the two shapes of matrix product


def test_demo_is_a_plain_hugging_face_checkpoint():
    model = AutoModelForCausalLM.from_pretrained(demo.PATH)
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    assert model.config.model_type == "deepseek_v2" and model.dtype == torch.bfloat16
    assert 6e6 < sum(p.numel() for p in model.parameters()) < 8e6
    ids = tokenizer("def read(path):\n    return  open(path)", return_tensors="pt").input_ids
    assert ids[0, 0] == tokenizer.bos_token_id
    assert torch.isfinite(model(ids).logits).all()


def test_demo_was_really_trained():
    """On held-out text it is far better than chance (2048) and than a model of token frequencies."""
    tokenizer = AutoTokenizer.from_pretrained(demo.PATH)
    model = AutoModelForCausalLM.from_pretrained(demo.PATH, dtype=torch.float32)
    texts = [d.text for d in corpus.documents("heldout") if d.domain == "code"][:4]
    ids = torch.stack([torch.tensor(tokenizer(text).input_ids[:128]) for text in texts if len(text) > 1000])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 4.2


def test_corpus_splits_are_disjoint_and_stable():
    train, held = (corpus.documents(split) for split in ("train", "heldout"))
    assert not {d.name for d in train} & {d.name for d in held}
    assert 0.05 < len(held) / (len(train) + len(held)) < 0.2
    assert {d.domain for d in held} == {"code", "prose"}
    assert re.fullmatch("[0-9a-f]{64}", corpus.fingerprint())
    with pytest.raises(ValueError, match="heldout"):
        corpus.documents("test")

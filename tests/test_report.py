"""The report's renderers and the demo checkpoint's own promises."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from remoe_cli import demo
from remoe_cli.demo import corpus
from remoe_cli.families import find_gates
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.resolve import resolve
from remoe_cli.measure.decode_traces import decode
from remoe_cli.report.cells import cache_cells, decode_figures
from remoe_cli.report.renderers import RENDERERS
from remoe_cli.report.rows import cell, table


@pytest.fixture(scope="module")
def checkpoint():
    return resolve("demo")


@pytest.fixture(scope="module")
def decoded(checkpoint):
    model = load_resident(checkpoint, torch.float32, "cpu")
    prompts = torch.arange(3, 3 + 4 * 8).view(4, 8)
    return decode(model, find_gates(model), prompts, 10)


def make_arm(name, role, perplexity, decoded, base):
    figures = decode_figures(decoded.trace, decoded.ids_RS)
    cells = cache_cells(decoded.trace, base.trace, "forced", [4, 6], ["lru", "belady"], 1000)
    text = {"perplexity": perplexity, "loss": 1.0, "eor": 0.25, "tokens": 100}
    skipped = {"capacity": 4, "skipped": "needs C >= 6"}
    return {
        "name": name,
        "role": role,
        "text": text,
        "decode": {"forced": figures, "greedy": figures},
        "cache": cells,
        "measured": [skipped],
    }


@pytest.fixture(scope="module")
def report(decoded):
    conditions = {
        "capacities": [4, 6], "requests": 4, "prompt_tokens": 8, "new_tokens": 10, "text_tokens": 100, "data": "d", "measured_requests": 0,
        "device_name": "x", "dtype": "float32", "threads": 1, "io": "buffered", "torch": "2", "transformers": "5",
    }  # fmt: skip
    base = {
        "id": "demo",
        "commit": None,
        "model_type": "deepseek_v2",
        "moe_layers": 5,
        "n_experts": 64,
        "top_k": 6,
        "expert_bytes": 1000,
    }
    arms = [make_arm("base", "base", 40.0, decoded, decoded), make_arm("remoe", "tuned", 41.0, decoded, decoded)]
    return {"conditions": conditions, "base": base, "notes": ["a note"], "arms": arms}


@pytest.mark.parametrize("name", RENDERERS)
def test_every_renderer_shows_the_same_cells(report, name):
    shown = RENDERERS[name](report)
    _, rows = table(report)
    for row in rows:
        assert row.label.strip() in shown
    assert "+2.50 %" in shown and "needs C >= 6" in shown and "a note" in shown
    assert f"{cell(report['arms'][0], 6)['misses']:,}" in shown


def test_the_terminal_table_fits_100_columns(report):
    assert max(map(len, RENDERERS["terminal"](report).splitlines())) <= 100


def test_cells_hang_together(report):
    for arm in report["arms"]:
        for one in arm["cache"]:
            assert one["hits"] + one["misses"] == one["accesses"] == 4 * 10 * 5 * 6
            assert one["mb_a_token"] == pytest.approx(one["misses"] * 1000 / 1e6 / 40)
            assert one["hit_ratio_95"][0] <= one["hit_ratio"] <= one["hit_ratio_95"][1]
    json.dumps(report)  # nothing but plain values


def test_the_decode_trace_is_what_a_full_pass_routes(checkpoint, decoded):
    """Fed token by token with a cache, and in one pass over the same ids: the same experts."""
    from remoe_cli.families import RouterTap
    from remoe_cli.measure.decode_traces import canonical

    model = load_resident(checkpoint, torch.float32, "cpu")
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

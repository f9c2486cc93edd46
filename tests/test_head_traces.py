"""Gates with heads beside them: what remoe trace records of them, and their cells in remoe eval."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import refused, report_of
from transformers import AutoModelForCausalLM

from remoe_cli.cache import replay
from remoe_cli.delta import Delta, gates_for, put
from remoe_cli.families import find_gates, RouterTap
from remoe_cli.families.loader import gate_disk_names
from remoe_cli.hub.resolve import resolve
from remoe_cli.report.renderers.markdown import markdown
from remoe_cli.report.renderers.terminal import terminal
from remoe_cli.routing import read

SMALL = ["--requests", 3, "--prompt-tokens", 4, "--new-tokens", 6]


def give_heads(run: Path, kinds: tuple[str, ...] = ("temporal", "spatio")) -> Delta:
    """The run's delta, with heads that are its gates and some noise."""
    delta, draw = Delta.load(run / "delta"), torch.Generator().manual_seed(0)
    heads = {
        f"{name.removesuffix('.weight')}.{kind}": tensor.float() + 0.1 * torch.randn(tensor.shape, generator=draw)
        for kind in kinds
        for name, tensor in delta.tensors.items()
        if name.endswith(".weight")
    }
    shutil.rmtree(run / "delta")
    replace(delta, heads=heads).save(run / "delta")
    return Delta.load(run / "delta")


@pytest.mark.parametrize("kinds", [("temporal", "spatio"), ("spatio",)])
def test_a_trace_holds_what_heads_make_of_the_gates_own_input(remoe, made, run, kinds):
    """In float64, from one pass over all tokens of each request."""
    delta = give_heads(run, kinds)
    asked = ("trace", made / "model", "--delta", run, "--prompts", made / "texts.jsonl", *SMALL)
    done = report_of(remoe(*asked, "-o", "t.trace", "--json"))
    assert done["holds"] == ["ids", "weights", "probabilities", *kinds]
    assert done["bytes"] == Path("t.trace").stat().st_size
    trace, checkpoint = read(Path("t.trace")), resolve(str(made / "model"))
    model = AutoModelForCausalLM.from_pretrained(made / "model")
    names = gate_disk_names(model, checkpoint)
    put(model, gates_for(names, delta))
    gates = find_gates(model)
    ids_RT = _ids(made, trace)
    for request, ids in enumerate(ids_RT):
        with RouterTap(gates) as tap, torch.no_grad():
            model(ids[None], use_cache=False)
            inputs = [layer.hidden_ND.double() for layer in tap.take()]
        own = slice(*trace.borders[request : request + 2])
        for kind in kinds:
            for layer, (gate, hidden_ND) in enumerate(zip(gates, inputs, strict=True)):
                weight = delta.heads[names[gate.names[0]].removesuffix(".weight") + f".{kind}"].double()
                expected = (hidden_ND @ weight.T).softmax(-1).numpy()
                assert np.allclose(getattr(trace, kind)[own, layer], expected, atol=2e-3)
    missing = {"temporal", "spatio"} - {*kinds}
    found = remoe("replay", "t.trace", "--cache", 6, "--policy", "temporal,spatio:3,gate_ahead:3")
    assert found.code == 0 and ("no scores of a temporal head" in found.out) == bool(missing)


def _ids(made: Path, trace) -> torch.Tensor:
    from remoe_cli.measure.prompts import default_recipe, load_prompts
    from remoe_cli.measure.requests import cut_requests
    from remoe_cli.train.data import load_tokenizer

    model = str(made / "model")
    documents, _ = load_prompts(
        str(made / "texts.jsonl"), default_recipe(model, "deepseek_v2"), load_tokenizer(resolve(model))
    )
    cut = cut_requests(documents, trace.n_requests, 4, 7)
    return torch.cat([cut.prompts_RP, cut.continuations_RS[:, :-1]], 1)


def test_a_delta_of_heads_alone_is_traced_on_the_bases_gates(remoe, made, run):
    base = report_of(remoe("eval", run, "--cache", 4, "--no-measure", "--json"))["arms"][0]
    heads = give_heads(run)
    checkpoint = resolve(str(made / "model"))
    own = {name: checkpoint.read(name) for name in heads.tensors}
    shutil.rmtree(run / "delta")
    replace(heads, tensors=own, changed=0.0).save(run / "delta")
    report = report_of(remoe("eval", run, "--cache", 4, "--no-measure", "--json"))
    tuned = report["arms"][-1]
    assert tuned["text"]["perplexity"] == base["text"]["perplexity"]
    assert {"temporal", "spatio_temporal"} <= {cell["policy"] for cell in tuned["cache"]}


def test_eval_shows_cells_of_heads_where_there_are_heads(remoe, run):
    give_heads(run)
    report = report_of(remoe("eval", run, "--cache", "4,6", "--json"))
    base, tuned = report["arms"]
    shown = [{cell["policy"] for cell in arm["cache"]} for arm in (base, tuned)]
    assert shown[1] - shown[0] == {"temporal", "spatio_temporal"} and "decayed" in shown[0]
    assert report["conditions"]["policies"] == [
        "lru",
        "lfu",
        "fifo",
        "belady",
        "decayed",
        "temporal",
        "spatio_temporal",
    ]
    for cell in tuned["cache"]:
        ahead = cell["policy"] == "spatio_temporal"
        assert (cell["proactive"] > 0) == ahead
        assert (cell["adjusted_hit_ratio"] < cell["hit_ratio"]) == ahead
        assert cell["hits"] + cell["misses"] == cell["accesses"]
        if cell["policy"] in ("temporal", "spatio_temporal"):
            assert cell["misses_change"] is None
    measured = {(row["policy"], row["capacity"]) for row in tuned["measured"]}
    assert measured == {(name, size) for name in ("lru", "temporal", "spatio_temporal") for size in (4, 6)}
    assert all(row["counts_match"] and row["exact"] for arm in report["arms"] for row in arm["measured"])
    assert {row["policy"] for row in base["measured"]} == {"lru"}
    for words in (terminal(report), markdown(report)):
        assert "temporal: hit, MB, gap" in words and "measured spatio_temporal" in words


def test_policies_of_heads_that_are_not_there(remoe, run):
    refused(remoe("eval", run, "--cache", 4, "--policy", "lru,temporal"), "temporal reads heads", "--policy lru")
    report = report_of(remoe("eval", run, "--cache", 4, "--policy", "all", "--no-measure", "--json"))
    assert not {"temporal", "spatio", "spatio_temporal"} & {*report["conditions"]["policies"]}
    assert "gate_ahead" in report["conditions"]["policies"]
    give_heads(run, ("temporal",))
    report = report_of(remoe("eval", run, "--cache", 4, "--no-measure", "--json"))
    assert report["conditions"]["policies"][-2:] == ["decayed", "temporal"]
    asked = ("--policy", "lru,temporal_decayed:0.5")
    report = report_of(remoe("eval", run, "--cache", 4, *asked, "--no-measure", "--json"))
    (cell,) = [
        one for one in report["arms"][1]["cache"] if (one["policy"], one["trace"]) == ("temporal_decayed:0.5", "forced")
    ]
    assert cell["proactive"] == 0


def test_one_recording_serves_every_policy_alike(remoe, made, run):
    """Replayed by both engines from what was recorded, prompts included."""
    give_heads(run)
    asked = ("trace", made / "model", "--delta", run, "--prompts", made / "texts.jsonl", *SMALL)
    assert remoe(*asked, "-o", "t.trace").code == 0
    trace = read(Path("t.trace"))
    for policy in ("temporal", "temporal_decayed:2:0.5", "gate_ahead:4", "spatio_temporal:4", "spatio:4"):
        one, other = (replay(trace, policy, 4, admission="bypass", engine=name) for name in ("compiled", "python"))
        assert (one.hits, one.misses, one.evictions, one.proactive) == (
            other.hits,
            other.misses,
            other.evictions,
            other.proactive,
        )

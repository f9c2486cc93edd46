"""remoe trace: what it records of every family, what the trace says about itself, and every mistake as one line."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from commands import make_model, make_run, make_texts, refused, report_of, write_rows
from tiny_models import MODEL_TYPES
from transformers import AutoModelForCausalLM

from remoe_cli.families import find_gates, RouterTap
from remoe_cli.measure.decode_traces import canonical, decode
from remoe_cli.measure.requests import cut_prompts, cut_requests
from remoe_cli.routing import read

SMALL = ["--requests", 3, "--prompt-tokens", 4, "--new-tokens", 6]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("trace"), steps=4)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_every_family(remoe, tmp_path, model_type):
    """The trace is what one pass over prompt and continuation routes; probabilities and weights agree."""
    model, texts = make_model(tmp_path / "m", model_type), make_texts(tmp_path / "t.jsonl")
    done = report_of(remoe("trace", model, "--prompts", texts, *SMALL, "--probabilities", "-o", "t.trace", "--json"))
    trace = read(Path("t.trace"))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    gates = find_gates(loaded)
    assert trace.experts.shape == (3 * 10, len(gates), gates[0].top_k) and trace.borders.tolist() == [0, 10, 20, 30]
    assert trace.prefill.tolist() == ([True] * 4 + [False] * 6) * 3
    assert done["holds"] == ["ids", "weights", "probabilities"] and done["bytes"] == Path("t.trace").stat().st_size
    assert trace.weights is not None and trace.probabilities is not None
    same, ids_RT = [], _texts_of(remoe, model, texts)
    for request, ids in enumerate(ids_RT):
        with RouterTap(gates) as tap, torch.no_grad():
            loaded(ids[None], use_cache=False)
            routed = tap.take()
        own = slice(request * 10, request * 10 + 10)
        same.append(canonical(routed)[0] == trace.experts[own])
        logits = np.stack([layer.logits_NE.float().numpy() for layer in routed], 1).astype(np.float64)
        expected = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        assert np.allclose(trace.probabilities[own], expected, atol=5e-3)
    assert np.mean(same) > 0.95  # near-ties may flip between the two shapes of matrix product
    chosen = np.take_along_axis(trace.probabilities, trace.experts.astype(int), -1).astype(np.float32)
    weights = trace.weights.astype(np.float32)
    shares = [part / part.sum(-1, keepdims=True) for part in (chosen, weights)]
    assert np.allclose(*shares, atol=3e-3)
    assert (np.diff(weights, axis=-1) <= 0).all()  # the recorded order
    assert np.allclose(trace.probabilities.astype(np.float32).sum(-1), 1, atol=5e-3)


def _texts_of(remoe, model: Path, texts: Path) -> torch.Tensor:
    """Prompt and fed tokens of the three requests, cut once more from the command's own texts."""
    from remoe_cli.measure.prompts import default_recipe, load_prompts
    from remoe_cli.train.data import load_tokenizer

    tokenizer = load_tokenizer(_checkpoint(model))
    documents, _ = load_prompts(str(texts), default_recipe(str(model), "qwen3_moe"), tokenizer)
    cut = cut_requests(documents, 3, 4, 7)
    return torch.cat([cut.prompts_RP, cut.continuations_RS[:, :-1]], 1)


def _checkpoint(model: Path):
    from remoe_cli.hub.resolve import resolve

    return resolve(str(model))


def test_its_decode_part_is_what_eval_records(remoe, model, texts):
    """The same requests, with and without the prompts."""
    remoe("trace", model, "--prompts", texts, *SMALL, "-o", "t.trace")
    ids = _texts_of(remoe, model, texts)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    alone = decode(loaded, find_gates(loaded), ids[:, :4], 6, ids[:, 4:]).trace
    decoded = read(Path("t.trace")).decode()
    assert not alone.prefill.any() and np.array_equal(alone.experts, decoded.experts)
    assert np.array_equal(alone.weights, decoded.weights) and np.array_equal(alone.borders, decoded.borders)


@torch.no_grad()
def test_prompts_of_many_lengths_come_back_in_their_order(model):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    gates = find_gates(loaded)
    prompts = [torch.arange(3, 3 + length) for length in (5, 2, 5, 1, 2)]
    together = decode(loaded, gates, prompts, 4, prefill=True, probabilities=True, batch=2)
    assert together.trace.borders.tolist() == [0, 9, 15, 24, 29, 35]
    for row, prompt in enumerate(prompts):
        alone = decode(loaded, gates, [prompt], 4, prefill=True, probabilities=True)
        own = slice(*together.trace.borders[row : row + 2])
        assert together.ids_RS[row].tolist() == alone.ids_RS[0].tolist()
        assert np.array_equal(together.trace.experts[own], alone.trace.experts)
        assert np.array_equal(together.trace.prefill[own], alone.trace.prefill)
        assert np.allclose(together.trace.probabilities[own], alone.trace.probabilities, atol=1e-3)


def test_tokens_and_requests_are_counted_as_they_are_done(model):
    loaded = AutoModelForCausalLM.from_pretrained(model)
    tokens, batches = [], []
    prompts = [torch.arange(3, 3 + length) for length in (2, 3, 3)]
    decode(loaded, find_gates(loaded), prompts, 2, on_tokens=tokens.append, on_batch=batches.append)
    assert tokens == [2, 3, 4, 10, 12, 14] and batches == [1, 3]


def test_greedy(remoe, model, texts):
    done = report_of(remoe("trace", model, "--prompts", texts, *SMALL, "--greedy", "-o", "g.trace", "--json"))
    assert (done["requests"], done["prefill_tokens"], done["decode_tokens"]) == (3, 12, 18)
    about = done["provenance"]
    assert about["kind"] == "greedy" and 0 <= about["distinct_4"] <= 1 and 0 <= about["repetition"] <= 1
    shown = remoe("trace", model, "--prompts", texts, *SMALL, "--greedy", "-o", "g2.trace").out
    assert "distinct-4" in shown and "g2.trace: 3 requests, 12 prefill and 18 decode tokens" in shown
    assert read(Path("g2.trace")).provenance == about
    remoe("trace", model, "--prompts", texts, *SMALL, "--forced", "-o", "f.trace")
    greedy, forced = read(Path("g.trace")), read(Path("f.trace"))
    assert np.array_equal(greedy.experts[greedy.prefill], forced.experts[forced.prefill])  # the same prompts
    assert not np.array_equal(greedy.experts, forced.experts)


def test_greedy_takes_prompts_that_are_shorter_than_a_request(remoe, model, tmp_path):
    texts = write_rows(tmp_path / "short.jsonl", [{"text": "a b c d e"[: 2 * n]} for n in (1, 2, 3, 4)] * 2)
    refused(
        remoe("trace", model, "--prompts", texts, "-o", "t.trace"),
        "tokens of a request",
        "--prompt-tokens 4 --new-tokens 4",
    )
    done = report_of(
        remoe("trace", model, "--prompts", texts, "--greedy", "--new-tokens", 5, "-o", "t.trace", "--json")
    )
    lengths = np.diff(read(Path("t.trace")).borders)
    assert done["decode_tokens"] == 5 * len(lengths) and len(set(lengths.tolist())) > 1
    assert done["prefill_tokens"] == lengths.sum() - done["decode_tokens"]


def test_cut_prompts():
    documents = [list(range(9)), [20, 21, 1], [30, 1], [1], [], list(range(40, 44))]
    cut = [ids.tolist() for ids in cut_prompts(documents, 99, 2, 2, end=1)]
    assert cut == [[0, 1], [40, 41], [4, 5], [20, 21], [30]]  # whole requests first, as cut_requests takes them
    assert [ids.tolist() for ids in cut_prompts(documents, 2, 2, 2, end=1)] == cut[:2]
    assert cut_requests(documents, 3, 2, 2).prompts_RP.tolist() == cut[:3]


def test_a_delta_and_what_the_trace_says_of_it(remoe, run):
    model, texts = run.parent / "model", run.parent / "texts.jsonl"
    for name, delta in (("base", []), ("tuned", ["--delta", run])):
        done = remoe("trace", model, "--prompts", texts, *SMALL, *delta, "-o", f"{name}.trace", "--json")
        assert ("may have been trained" in done.err) == (name == "tuned")
    base, tuned = (read(Path(f"{name}.trace")) for name in ("base", "tuned"))
    assert not np.array_equal(base.weights, tuned.weights)
    assert np.array_equal(base.borders, tuned.borders)
    assert (base.provenance["delta"], tuned.provenance["delta"]) == (None, str(run))
    assert tuned.provenance["delta_recipe"] == "remoe"
    refused(
        remoe("trace", make_model(Path("other"), "olmoe"), "--prompts", texts, "--delta", run, "-o", "x.trace"), "delta"
    )


def test_provenance_and_seeds(remoe, model, texts):
    traces = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        remoe("trace", model, "--prompts", texts, *SMALL, "--seed", seed, "-o", f"{name}.trace")
        traces[name] = Path(f"{name}.trace").read_bytes()
    assert traces["a"] == traces["b"] != traces["c"]
    about = read(Path("c.trace")).provenance
    sizes = [path.stat().st_size for path in model.glob("*.safetensors")]
    assert about["seed"] == 1 and about["layers"] == [1, 2] and 0 < about["expert_bytes"] < sum(sizes) / 16
    assert (about["model"], about["revision"], about["kind"]) == (str(model), None, "forced")
    assert (about["prompt_tokens"], about["new_tokens"], about["dtype"]) == (4, 6, "float32")
    assert about["data"] == texts.name and len(about["data_sha256"]) == 64


def test_the_demo_has_its_own_texts(remoe):
    done = report_of(remoe("trace", "demo", *SMALL, "-o", "runs/new/t.trace", "--json"))
    assert done["trace"] == "runs/new/t.trace" and Path(done["trace"]).stat().st_size == done["bytes"]
    assert done["provenance"]["data"].startswith("demo") and (done["top_k"], done["n_experts"]) == (6, 64)
    assert 0 < done["eor"] < 1


def test_fewer_requests_than_asked(remoe, model, texts):
    ran = remoe("trace", model, "--prompts", texts, "--requests", 10**6, *SMALL[2:], "-o", "t.trace")
    assert "of the 1000000 requests asked for" in ran.err and ran.code == 0


def test_what_cannot_be_recorded(remoe, model, texts, tmp_path):
    Path("taken.trace").write_text("mine")
    Path("folder").mkdir()
    good = ["trace", model, "--prompts", texts]
    for command, words in (
        ([*good, "--requests", 0, "-o", "t.trace"], "--requests is at least 1"),
        ([*good, "--prompt-tokens", 0, "-o", "t.trace"], "--prompt-tokens is at least 1"),
        ([*good, "--new-tokens", -1, "-o", "t.trace"], "--new-tokens is at least 1"),
        ([*good, "--new-tokens", 300, "-o", "t.trace"], "longer than the 256"),
        ([*good, "--seed", -1, "-o", "t.trace"], "--seed is at least 0"),
        ([*good, "--device", "tpu", "-o", "t.trace"], "--device is cpu"),
        ([*good, "--delta", "nothing-here", "-o", "t.trace"], "nothing-here"),
        ([*good, "-o", "taken.trace"], "taken.trace exists"),
        ([*good, "-o", "folder"], "folder is a folder"),
        ([*good, "-o", "taken.trace/t.trace"], "taken.trace is a file"),
        (["trace", model, "-o", "t.trace"], "name the texts"),
        (["trace", model, "--prompts", "none.jsonl", "-o", "t.trace"], "none.jsonl"),
        (["trace", "no/such/model", "--prompts", texts, "-o", "t.trace"], "no/such/model"),
        (["trace", "import", "none.npz", "-o", "t.trace"], "no file none.npz"),
        (["trace", "import", texts, "-o", "t.trace"], "neither an npz nor a route CSV"),
        (["trace", "import", texts, "--format", "csv", "-o", "t.trace"], "allowed: route-csv, esft-npz"),
        (["trace", "import", texts, "--format", "route-csv", "-o", "t.trace"], "line 1: the columns are"),
        (["trace", "import", texts, "--experts", 0, "-o", "t.trace"], "--experts is at least 1"),
        (["trace", "import", texts, "-o", "taken.trace"], "taken.trace exists"),
    ):
        refused(remoe(*command), words)
    assert Path("taken.trace").read_text() == "mine" and not list(tmp_path.glob("*t.trace*"))


def test_import_and_its_summary(remoe, tmp_path):
    experts = np.array([[[0, 3], [2, 1], [0, 2]]], dtype=np.int16)
    np.savez("t.npz", experts=experts, meta=np.array('{"model": "m", "num_experts": 4}'))
    shown = remoe("trace", "import", "t.npz", "-o", "t.trace").out
    assert "t.trace: 1 request, 0 prefill and 3 decode tokens; 1 MoE layer" in shown
    assert "Holds ids; imported, EOR 0.2500" in shown and "touch_order listed, step sequential, reset never" in shown
    assert "Next: remoe replay t.trace --cache 2,4 --policy all" in shown
    assert read(Path("t.trace")).experts.tolist() == [[[0, 3]], [[2, 1]], [[0, 2]]]
    done = report_of(remoe("trace", "import", "t.npz", "--experts", 9, "-o", "u.trace", "--json"))
    assert done["n_experts"] == 9 and done["provenance"]["format"] == "cacheable-npz"


def test_the_first_word_is_a_model_unless_it_is_a_command(remoe, model, texts):
    ran = remoe("trace", "--prompts", texts, "--requests", 1, *SMALL[2:], "-o", "a.trace", model)  # options first
    assert ran.code == 0 and Path("a.trace").exists()
    assert remoe("trace", "record", model, "--prompts", texts, *SMALL, "-o", "b.trace").code == 0
    group, own = remoe("trace", "--help").out, remoe("trace", "record", "--help").out
    assert "import" in group and "record" in group and "--probabilities" in own and "--greedy" in own
    assert remoe("trace", "demo", "--help").out == own
    assert "import" in remoe("trace").out + remoe("trace").err


def test_import_needs_no_torch(tmp_path):
    code = (
        "import sys; import remoe_cli.trace; from remoe_cli.routing.imports import read_foreign; "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0


def test_the_next_command_of_each_mistake_runs(remoe, model, texts, tmp_path):
    """Each Try line is run as it stands, with all that was asked for, and writes a trace."""
    Path("taken.trace").write_text("mine")
    Path("taken-2.trace").write_text("mine too")
    Path("my folder").mkdir()
    Path("notes.md").write_text("# notes")
    write_rows(Path("short.jsonl"), [{"text": "a b c d e"[: 2 * n]} for n in (1, 2, 3, 4)] * 2)
    long = write_rows(Path("long.jsonl"), [{"text": f"{i} " + "over the lazy dog " * 99} for i in range(4)])
    good = ["--prompts", texts, "--probabilities"]
    for options, mended in (
        ([*good, *SMALL, "-o", "taken.trace"], "taken-3.trace"),
        ([*good, *SMALL, "-o", "my folder"], "my folder/t.trace"),
        ([*good, *SMALL, "-o", "taken.trace/x.trace"], "x.trace"),
        ([*good, *SMALL, "--seed", -1, "-o", "a.trace"], "a.trace"),
        ([*good, *SMALL[2:], "--requests", 0, "-o", "b.trace"], "b.trace"),
        (["--prompts", long, "--probabilities", *SMALL[:4], "--new-tokens", 9999, "-o", "c.trace"], "c.trace"),
        ([*SMALL, "--probabilities", "-o", "d.trace"], "d.trace"),
        (["--prompts", "notes.md", *SMALL, "--probabilities", "-o", "e.trace"], "e.trace"),
        (["--prompts", "short.jsonl", "--probabilities", "-o", "f.trace"], "f.trace"),
        ([*good, *SMALL, "--device", "tpu", "-o", "g.trace"], "g.trace"),
    ):
        ran = remoe("trace", model, *options)
        assert ran.code != 0, options
        words = shlex.split(ran.err.partition("Try: ")[2])
        again = remoe(*words[1:])
        assert again.code == 0, (options, words, again.err)
        trace = read(Path(words[words.index("-o") + 1]))
        assert trace.probabilities is not None and words[words.index("-o") + 1] == mended
    assert Path("taken.trace").read_text() == "mine" and Path("taken-2.trace").read_text() == "mine too"


def test_options_are_refused_before_torch_is_loaded(remoe, model, texts):
    """Nothing is said of loading, which takes seconds, when the line needs none."""
    Path("taken.trace").write_text("mine")
    for options in (["-o", "taken.trace"], ["-o", "."], ["--requests", 0, "-o", "t.trace"], ["-o", "taken.trace/x"]):
        ran = remoe("trace", model, "--prompts", texts, *options)
        refused(ran, "Try: remoe trace")
        assert "Loading" not in ran.err
    code = (
        "import sys; from pathlib import Path; from remoe_cli import trace; from remoe_cli.errors import RunError\n"
        "try: trace.record('demo', Path('.'), trace.Asked(), delta=None, prompts=None, device=None)\n"
        "except RunError: sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_an_interruption_after_the_file_is_whole_says_so(tmp_path, monkeypatch, capsys):
    from remoe_cli import trace as verb

    np.savez(tmp_path / "t.npz", experts=np.zeros((1, 3, 1), int), meta=np.array('{"num_experts": 4}'))
    replace = os.replace

    def late(*names):
        replace(*names)
        raise KeyboardInterrupt

    out = tmp_path / "t.trace"
    monkeypatch.setattr("remoe_cli.atomic.os.replace", late)
    with pytest.raises(KeyboardInterrupt):
        verb.import_trace(tmp_path / "t.npz", out, format=None, n_experts=None)
    assert f"{out} was whole before the interruption" in " ".join(capsys.readouterr().err.split())
    assert read(out).n_tokens == 3
    out.unlink()
    monkeypatch.setattr("remoe_cli.atomic.os.fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        verb.import_trace(tmp_path / "t.npz", out, format=None, n_experts=None)
    assert not out.exists() and "whole" not in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_after_all(remoe, tmp_path, monkeypatch):
    """The folder looks well and the file cannot be opened: the Try line writes elsewhere."""
    np.savez(tmp_path / "t.npz", experts=np.zeros((1, 3, 1), int), meta=np.array('{"num_experts": 4}'))
    monkeypatch.setattr("remoe_cli.trace.tempfile.gettempdir", lambda: str(tmp_path))
    refused(ran := remoe("trace", "import", "t.npz", "-o", "/proc/x.trace"), "/proc cannot be written")
    assert remoe(*shlex.split(ran.err.partition("Try: ")[2])[1:]).code == 0 and read(tmp_path / "x.trace").n_tokens == 3


def test_nothing_is_left_to_interrupt_after_the_file_is_there(tmp_path, monkeypatch):
    from remoe_cli import trace as verb

    np.savez(tmp_path / "t.npz", experts=np.zeros((1, 3, 1), int), meta=np.array('{"num_experts": 4}'))
    order = []
    monkeypatch.setattr(verb, "facts", lambda *given: order.append("facts") or {})
    monkeypatch.setattr(verb, "write", lambda *given: order.append("write") or 1)
    verb.import_trace(tmp_path / "t.npz", tmp_path / "t.trace", format=None, n_experts=None)
    assert order == ["facts", "write"]


def test_a_small_disk_is_told_in_its_own_unit(remoe, model, texts, monkeypatch):
    from remoe_cli.sizes import show_size

    monkeypatch.setattr("remoe_cli.trace.shutil.disk_usage", lambda _: SimpleNamespace(free=123))
    refused(remoe("trace", model, "--prompts", texts, *SMALL, "-o", "t.trace"), "480 bytes", "123 bytes free")
    shown = {0: "0 bytes", 999: "999 bytes", 1000: "1 kB", 45_678: "45.7 kB", 12_345_678: "12.3 MB"}
    shown |= {7_000_000_000: "7 GB", 1_234_000_000_000: "1,234 GB"}
    assert {size: show_size(size) for size in shown} == shown

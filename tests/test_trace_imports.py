"""Traces of other tools: read as their files say, refused where they are damaged, and known by their published figures."""

from __future__ import annotations

import csv
import gzip
import json
import re
import shlex
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from commands import refused, report_of

from remoe_cli.errors import TraceError
from remoe_cli.report import locality
from remoe_cli.routing import read, write
from remoe_cli.routing.imports import guess, IMPORTS, read_foreign

HEAD = """# route_trace v1
# model=/data/x/Tiny.gguf arch=tiny n_layer=3 n_expert=5 n_expert_used=2
# layer=1 expert_bytes=300 dense_bytes=1
# layer=2 expert_bytes=200 dense_bytes=1
turn,phase,step,layer,slot,expert,weight,residency,expert_bytes
"""


def rows(*tokens: tuple, columns: str = ",0,300") -> str:
    """(turn, phase, step, layer, experts), weights .75, .25."""
    return "".join(
        f"{turn},{phase},{step},{layer},{slot},{expert},{0.75 / 3**slot}{columns}\n"
        for turn, phase, step, layer, experts in tokens
        for slot, expert in enumerate(experts)
    )


PROMPT = [(0, 0, 0, 1, (4, 0)), (0, 0, 1, 1, (3, 2)), (0, 0, 0, 2, (1, 2)), (0, 0, 1, 2, (2, 4))]
DECODED = [(0, 1, 2, 1, (0, 3)), (0, 1, 2, 2, (4, 1))]


def save(path: Path, text: str) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.mark.parametrize("name", ["r.csv", "r.csv.gz"])
def test_route_csv_by_hand(tmp_path, name):
    path = save(tmp_path / name, HEAD + rows(*PROMPT, *DECODED, (1, 1, 0, 1, (1, 0)), (1, 1, 0, 2, (3, 0))))
    assert guess(path) == "route-csv"
    trace = read_foreign(path)
    assert trace.experts.tolist() == [[[4, 0], [1, 2]], [[3, 2], [2, 4]], [[0, 3], [4, 1]], [[1, 0], [3, 0]]]
    assert trace.borders.tolist() == [0, 3, 4] and trace.prefill.tolist() == [True, True, False, False]
    assert trace.weights is not None and (trace.weights == [0.75, 0.25]).all()
    assert trace.n_experts == 5
    facts = trace.provenance
    assert (facts["layers"], facts["expert_bytes"], facts["filled"]) == ([1, 2], [300, 200], [])
    assert (facts["model"], facts["kind"], facts["format"]) == ("Tiny.gguf", "imported", "route-csv")
    assert facts["accounting"] == {"pool": "bytes", "warm": "batch", "touch_order": "listed", "reset": "never"}


def test_a_layer_that_served_only_the_prompts_last_token(tmp_path):
    """The other tokens get its experts, so that the batch asks for the same ones in the same order."""
    path = save(tmp_path / "r.csv", HEAD + rows(PROMPT[0], PROMPT[1], PROMPT[3], *DECODED))
    trace = read_foreign(path)
    assert trace.experts[:2, 1].tolist() == [[2, 4], [2, 4]] and trace.provenance["filled"] == [2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "neither an npz nor a route CSV"),
        ("# route_trace v2\n" + HEAD.partition("\n")[2] + rows(*DECODED), "begins with '# route_trace v2'"),
        (HEAD, "has no row"),
        (HEAD.replace("turn,phase", "request,phase") + rows(*DECODED), "line 5: the columns are 'request,phase"),
        (HEAD + rows(*DECODED)[:-5], "line 9 has 8 of 9 columns: the file is truncated"),
        (HEAD + rows(*PROMPT, DECODED[0]), "turn 0, phase 1, step 2, layer 2 has no row"),
        (HEAD + rows(*PROMPT[:3], *DECODED), "turn 0, phase 0, step 1, layer 2 has no row"),
        (
            HEAD + rows(*PROMPT, *DECODED[:1], (0, 1, 2, 2, (4, 1, 0))),
            "line 16: a token uses 3 experts, those before 2",
        ),
        (HEAD + rows(*DECODED).replace("0,1,2,2,1,", "0,1,2,2,2,"), "line 9: slot 2 where 1 should follow"),
        (HEAD + rows(*DECODED).replace(",0.75", ",heavy", 1), "line 6: weight is 'heavy', not a number"),
        (HEAD + rows(*DECODED).replace(",0.75", ",-0.75", 1), "line 6: weight is '-0.75', not a number from 0"),
        (HEAD + rows(*DECODED).replace(",0.75", ",inf", 1), "line 6: weight is 'inf'"),
        (HEAD + rows(*DECODED).replace("0,1,2,1,0,0,", "0,1,2,1,0,0x,"), "line 6: expert is '0x', not a whole number"),
        (HEAD + rows((0, 2, 0, 1, (0, 1))), "line 6: phase 2 is neither 0 nor 1"),
        (HEAD + rows((0, 1, 0, 1, (0, 5)), (0, 1, 0, 2, (0, 1))), "want ids 0 to 4, got 0 to 5"),
        (HEAD + rows((0, 1, 0, 1, (3, 3)), (0, 1, 0, 2, (0, 1))), "token 0 names an expert twice in layer 0"),
        (HEAD.replace("n_expert=5", "") + rows(*DECODED), "does not say n_expert"),
        (HEAD.replace("# layer=2 ", "# ") + rows(*DECODED), "gives no expert_bytes for layer 2"),
    ],
)
def test_a_bad_route_csv(tmp_path, text, words):
    path = save(tmp_path / "r.csv", text)
    with pytest.raises(TraceError) as stopped:
        read_foreign(path)
    assert words in stopped.value.message and str(path) in stopped.value.message


def test_damaged_zips_are_refused_in_one_line(tmp_path):
    """Every bit of the first 40 bytes and of the directory: read all the same, or refused; never anything else."""
    path = tmp_path / "t.npz"
    meta = json.dumps({"num_experts": 4, "k": 1, "n_moe_layers": 1, "model": "m"})
    np.savez_compressed(path, experts=np.array([[[1], [2], [3]]], np.int16), meta=meta)
    raw, refused = path.read_bytes(), 0
    assert read_foreign(path).n_tokens == 3
    for bit in [*range(8 * 40), *range(8 * (len(raw) - 150), 8 * len(raw))]:
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            read_foreign(path)
        except TraceError:
            refused += 1
    assert refused > 100


def test_a_truncated_gzip(tmp_path, shared):
    whole = shared("data/traces/bigmoe-on-edge/qwen.route.csv.gz").read_bytes()
    path = tmp_path / "r.csv.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match="truncated or damaged"):
        read_foreign(path)


def test_experts_that_the_file_does_not_say(tmp_path):
    path = save(tmp_path / "r.csv", HEAD.replace("n_expert=5", "") + rows(*DECODED))
    assert read_foreign(path, n_experts=7).n_experts == 7


def esft_file(path: Path, **changes) -> Path:
    arrays = {
        "experts": np.array([[[0, 3], [1, 2], [5, 63]], [[7, 8], [0, 1], [2, 9]]], dtype=np.uint8),
        "weights": np.arange(12, dtype=np.float16).reshape(2, 3, 2),
        "sample_lengths": np.array([2, 1], dtype=np.int32),
        "layers": np.array([1, 2]),
    }
    np.savez(path, **{name: array for name, array in {**arrays, **changes}.items() if array is not None})
    return path


def test_esft_npz_by_hand(tmp_path):
    path = esft_file(tmp_path / "t.npz")
    assert guess(path) == "esft-npz"
    trace = read_foreign(path)
    assert trace.experts.tolist() == [[[0, 3], [7, 8]], [[1, 2], [0, 1]], [[5, 63], [2, 9]]]
    assert trace.weights is not None and trace.weights[2].tolist() == [[4, 5], [10, 11]]
    assert trace.borders.tolist() == [0, 2, 3] and not trace.prefill.any() and trace.n_experts == 64
    assert trace.provenance["layers"] == [1, 2]
    assert trace.provenance["accounting"] == {"touch_order": "listed", "step": "atomic", "reset": "request"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experts": np.full((2, 3, 1), 64), "weights": None}, "names expert 64, and without --experts"),
        ({"experts": np.zeros((2, 3, 2), int)}, "token 0 names an expert twice"),
        ({"experts": np.zeros((3, 2), int)}, "experts is int64 [3, 2]"),
        ({"experts": np.zeros((2, 3, 2))}, "experts is float64"),
        ({"weights": np.full((2, 3, 2), -1.0)}, "weights holds values that are no finite numbers from 0 on"),
        ({"weights": np.full((2, 3, 2), np.inf)}, "weights holds values that are no finite numbers from 0 on"),
        ({"weights": np.zeros((2, 3, 1))}, "weights is [2, 3, 1], experts [2, 3, 2]"),
        ({"sample_lengths": np.array([2, 2])}, "rising positions from 0 to 3"),
        ({"sample_lengths": np.array([3, 0])}, "request 1 is empty"),
        ({"sample_lengths": None}, "arrays are experts, layers, weights"),
    ],
)
def test_a_bad_esft_npz(tmp_path, changes, words):
    path = esft_file(tmp_path / "t.npz", **changes)
    with pytest.raises(TraceError) as stopped:
        read_foreign(path)
    assert words in stopped.value.message and str(path) in stopped.value.message


def cacheable_file(path: Path, meta: str, **changes) -> Path:
    experts = np.array([[[0, 3], [2, 1]], [[7, 6], [0, 1]], [[4, 5], [6, 0]]], dtype=np.int16)
    np.savez(path, **{"experts": experts, "meta": np.array(meta), **changes})
    return path


def test_cacheable_npz_by_hand(tmp_path):
    path = cacheable_file(tmp_path / "t.npz", json.dumps({"model": "m", "num_experts": 8, "source": "s"}))
    assert guess(path) == "cacheable-npz"
    trace = read_foreign(path)
    assert trace.experts.tolist() == [[[0, 3], [7, 6], [4, 5]], [[2, 1], [0, 1], [6, 0]]]
    assert (trace.n_experts, trace.weights, trace.borders.tolist()) == (8, None, [0, 2])
    assert trace.provenance["accounting"] == {"touch_order": "listed", "step": "sequential", "reset": "never"}


@pytest.mark.parametrize(
    ("meta", "changes", "words"),
    [
        ("{", {}, "meta does not give num_experts"),
        ("[1]", {}, "meta does not give num_experts"),
        ('{"model": "m"}', {}, "meta does not give num_experts"),
        ('{"num_experts": 4}', {}, "want ids 0 to 3, got 0 to 7"),
        ('{"num_experts": 8}', {"experts": np.zeros((1, 0, 2), int)}, "request 0 is empty"),
        ('{"num_experts": 8}', {"sample_lengths": np.array([2])}, "the format of"),
    ],
)
def test_a_bad_cacheable_npz(tmp_path, meta, changes, words):
    path = cacheable_file(tmp_path / "t.npz", meta, **changes)
    with pytest.raises(TraceError) as stopped:
        read_foreign(path)
    assert words in stopped.value.message


@pytest.mark.parametrize("format", IMPORTS)
def test_damage_of_any_kind(tmp_path, format):
    whole = esft_file(tmp_path / "whole.npz").read_bytes()
    for name, content in (("cut.npz", whole[:-40]), ("noise", b"\xff" * 100), ("pickle.npy", b"\x93NUMPY\x01\x00")):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(TraceError, match="cannot be imported"):
            read_foreign(path, format)
        if name != "cut.npz":
            with pytest.raises(TraceError, match=r"format of .* cannot be told"):
                read_foreign(path)
    for asked in (format, None):
        with pytest.raises(TraceError, match="there is no file") as stopped:
            read_foreign(tmp_path / "none", asked)
        assert stopped.value.hint == f"ls {tmp_path}"
        with pytest.raises(TraceError, match="is a folder"):
            read_foreign(tmp_path, asked)


def test_every_key_that_a_trace_has_is_documented(remoe, tmp_path):
    page = (Path(__file__).parent.parent / "docs/trace-format.md").read_text()
    table = page.partition("### Provenance")[2].partition("\n## ")[0]
    rows_ = re.findall(r"^\| ([a-z_0-9, ]+) \|", table, re.MULTILINE)
    documented = {key for row in rows_ for key in row.split(", ")}
    files = (
        save(tmp_path / "r.csv", HEAD + rows(*PROMPT, *DECODED)),
        esft_file(tmp_path / "t.npz"),
        cacheable_file(tmp_path / "c.npz", json.dumps({"model": "m", "num_experts": 8})),
    )
    found = {key for file in files for key in read_foreign(file).provenance}
    size = ["--requests", 1, "--prompt-tokens", 2, "--new-tokens", 2]
    found |= set(report_of(remoe("trace", "demo", *size, "--greedy", "-o", "d.trace", "--json"))["provenance"])
    assert found <= documented and {"phase", "accounting", "distinct_4"} <= found


def test_a_wrong_option_is_mended_by_the_next_command(remoe, tmp_path):
    """Each Try line is run as it stands, with the user's own -o, and imports the file."""
    esft_file(Path("e s.npz"))
    esft_file(Path("big.npz"), experts=np.full((2, 3, 1), 99), weights=None)
    cacheable_file(Path("c.npz"), json.dumps({"model": "m", "num_experts": 8}))
    cacheable_file(Path("bare.npz"), json.dumps({"model": "m"}))
    esft_file(Path("both.npz"), meta=np.array("{}"))
    save(Path("r.csv.gz"), HEAD + rows(*PROMPT, *DECODED))
    save(Path("unsaid.csv"), HEAD.replace("n_expert=5", "") + rows(*DECODED))
    for number, (file, options, words, mended) in enumerate(
        (
            ("e s.npz", ["--format", "route-csv"], "its content is esft-npz", {"n_experts": 64}),
            ("c.npz", ["--format", "esft-npz"], "its content is cacheable-npz", {"n_experts": 8}),
            ("r.csv.gz", ["--format", "cacheable-npz"], "its content is route-csv", {"n_experts": 5}),
            ("e s.npz", ["--format", "csv"], "there is no format 'csv'", {"n_experts": 64}),
            ("e s.npz", ["--experts", 10], "names expert 63, so --experts 10 is too few", {"n_experts": 64}),
            ("big.npz", ["--experts", 10], "names expert 99, so --experts 10 is too few", {"n_experts": 128}),
            ("big.npz", [], "names expert 99, and without --experts", {"n_experts": 128}),
            ("c.npz", ["--experts", 2], "names expert 7, so --experts 2 is too few", {"n_experts": 8}),
            ("r.csv.gz", ["--experts", 4], "names expert 4, so --experts 4 is too few", {"n_experts": 5}),
            ("unsaid.csv", ["--experts", 1], "names expert 4, so --experts 1 is too few", {"n_experts": 8}),
            ("unsaid.csv", [], "does not say n_expert", {"n_experts": 128}),
            ("bare.npz", [], "does not give num_experts", {"n_experts": 128}),
            ("c.npz", ["--experts", 0], "--experts is at least 1", {"n_experts": 8}),
            ("both.npz", [], "cannot be told", {"n_experts": 64}),
        )
    ):
        out = f"my {number}.trace"
        ran = remoe("trace", "import", file, *options, "-o", out)
        refused(ran, words)
        hint = shlex.split(ran.err.partition("Try: ")[2])
        assert hint[:3] == ["remoe", "trace", "import"] and out in hint
        done = report_of(remoe(*hint[1:], "--json"))
        assert {key: done[key] for key in mended} == mended and read(Path(out)).n_experts == mended["n_experts"]


def test_what_is_no_trace_at_all_names_the_formats(remoe, tmp_path):
    Path("README.md").write_text("# a tool\n")
    Path("notes.gz").write_bytes(gzip.compress(b"# a tool"))
    for file in ("README.md", "notes.gz"):
        ran = remoe("trace", "import", file, "-o", "t.trace")
        refused(ran, "route-csv, esft-npz, cacheable-npz")
        assert remoe(*shlex.split(ran.err.partition("Try: ")[2])[1:]).code == 0
    np.savez("other.npz", x=np.zeros(3))
    refused(remoe("trace", "import", "other.npz", "-o", "t.trace"), "its arrays are x", "route-csv, esft-npz")
    refused(
        remoe("trace", "import", "README.md", "--format", "route-csv", "-o", "t.trace"), "it begins with '# a tool'"
    )
    Path("noise.npz").write_bytes(b"\xff" * 100)
    refused(remoe("trace", "import", "noise.npz", "--format", "route-csv", "-o", "t.trace"), "it is no text")


def test_a_trace_of_remoe_is_no_import(tmp_path):
    path = tmp_path / "t.trace"
    write(read_foreign(esft_file(tmp_path / "t.npz")), path)
    with pytest.raises(TraceError, match="a trace of remoe already"):
        read_foreign(path)


@pytest.mark.parametrize(
    ("file", "tokens", "prefill", "layers", "top_k", "n_experts", "requests", "eor"),
    [
        ("esft/intent.npz", 8222, 0, 26, 6, 64, 127, 0.2624),
        ("esft/summary.npz", 8479, 0, 26, 6, 64, 13, 0.2907),
        ("cacheable-by-design/a-main-s1/trace_code.npz", 499_712, 0, 8, 2, 16, 1, 0.4060),
        ("cacheable-by-design/b-main-s1/trace_code.npz", 499_712, 0, 8, 2, 16, 1, 0.6942),
        ("cacheable-by-design/qwen3-30b-a3b/code.npz", 8000, 0, 48, 8, 128, 1, None),
        ("cacheable-by-design/qwen3-30b-a3b/general.npz", 8000, 0, 48, 8, 128, 1, None),
        ("bigmoe-on-edge/qwen.route.csv.gz", 156, 28, 48, 6, 128, 1, None),
        ("bigmoe-on-edge/gemma.route.csv.gz", 157, 29, 30, 6, 128, 1, None),
    ],
)
def test_every_shared_trace(shared, tmp_path, file, tokens, prefill, layers, top_k, n_experts, requests, eor):
    """eor: as published, for two of them as P(reuse, lag 1)."""
    trace = read_foreign(shared(f"data/traces/{file}"))
    assert trace.experts.shape == (tokens, layers, top_k) and trace.prefill.sum() == prefill
    assert (trace.n_experts, trace.n_requests) == (n_experts, requests)
    if eor is not None:
        overlap = locality.overlap(trace)
        assert abs(overlap[0].sum() / overlap[1].sum() - eor) < 5e-5
    write(trace, tmp_path / "t.trace")
    assert np.array_equal(read(tmp_path / "t.trace").experts, trace.experts)


@pytest.mark.parametrize("model", ["qwen", "gemma"])
def test_the_byte_budget_curves_of_the_route_csv(shared, model):
    """The published LRU column, by the rules in route_csv's docstring, written out here once more and slowly."""
    trace = read_foreign(shared(f"data/traces/bigmoe-on-edge/{model}.route.csv.gz"))
    with open(shared(f"data/traces/bigmoe-on-edge/{model}-curve.csv")) as lines:
        points = [row for row in csv.DictReader(lines) if row["policy"] == "lru"]
    assert len(points) == 11
    prompt = int(trace.prefill.sum())
    batches = [(layer, trace.experts[:prompt, layer].ravel().tolist()) for layer in range(trace.n_layers)]
    steps = [(layer, token[layer].tolist()) for token in trace.experts[prompt:] for layer in range(trace.n_layers)]
    for point in points[2::4]:
        cache = _Bytes(int(point["budget_mib"]) * 2**20, trace.provenance["expert_bytes"])
        before = sum(cache.serve(*batch) for batch in batches)
        looked_up = cache.lookups
        decoded = sum(cache.serve(*step) for step in steps)
        assert f"{100 * (before + decoded) / cache.lookups:.3f}" == point["hit_pct_cum"]
        assert f"{100 * decoded / (cache.lookups - looked_up):.3f}" == point["hit_pct_decode"]


class _Bytes:
    """LRU over all layers with a budget in bytes."""

    def __init__(self, budget: int, sizes: list[int]) -> None:
        self.budget, self.sizes, self.lookups, self.used = budget, sizes, 0, 0
        self.held: OrderedDict[tuple[int, int], None] = OrderedDict()

    def serve(self, layer: int, ids: list[int]) -> int:
        hits, own = 0, set()
        for expert in ids:
            key = (layer, expert)
            if key not in own:
                own.add(key)
                self.lookups += 1
                hits += key in self.held
            if key not in self.held:
                self.held[key] = None
                self.used += self.sizes[layer]
            self.held.move_to_end(key)
        while self.used > self.budget and (leaving := next((key for key in self.held if key not in own), None)):
            del self.held[leaving]
            self.used -= self.sizes[leaving[0]]
        return hits

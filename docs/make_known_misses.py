"""Rewrites remoe_cli/report/known_misses.json: how often LRU hit in recorded traces, by cache size, and what tuned gates saved.

    python docs/make_known_misses.py [--shared ../shared]

Traces that were published lie below --shared (each folder names its source); the demo's is recorded here, in about a minute.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from remoe_cli import atomic, trace
from remoe_cli.cache.curve import lru_curve
from remoe_cli.report.known_misses import PATH
from remoe_cli.routing import read, RoutingTrace
from remoe_cli.routing.imports import read_foreign

ESFT = "github.com/deepseek-ai/ESFT, commit 579a7711"
BIGMOE = "github.com/Helldez/BigMoeOnEdge, commit 2d4f2b11, Apache-2.0"
CACHEABLE = "github.com/Shriniwas410/cacheable-by-design, commit 03366ef1, MIT"
DEEPSEEK = ("deepseek_v2", "deepseek-ai/DeepSeek-V2-Lite", 2048)
QWEN3 = ("qwen3_moe", "Qwen/Qwen3-30B-A3B", 2048)


class Row(NamedTuple):
    """family: as remoe calls it, None for a model that transformers does not have; width: of the hidden state, None where it
    is not told; file: below shared/data/traces."""

    of: tuple[str | None, str, int | None]
    text: str
    source: str
    file: str


ROWS = [
    Row(DEEPSEEK, "intent, teacher-forced", ESFT, "esft/intent.npz"),
    Row(DEEPSEEK, "summary, teacher-forced", ESFT, "esft/summary.npz"),
    Row(QWEN3, "code, teacher-forced", CACHEABLE, "cacheable-by-design/qwen3-30b-a3b/code.npz"),
    Row(QWEN3, "general, teacher-forced", CACHEABLE, "cacheable-by-design/qwen3-30b-a3b/general.npz"),
    Row(QWEN3, "one chat, decoded with 6 experts a token", BIGMOE, "bigmoe-on-edge/qwen.route.csv.gz"),
    Row(
        ("gemma4_text", "google/gemma-4-26B-A4B", 2816),
        "one chat, decoded with 6 experts a token",
        BIGMOE,
        "bigmoe-on-edge/gemma.route.csv.gz",
    ),
    Row((None, "a-main-s1 (137M)", None), "code, teacher-forced", CACHEABLE, "cacheable-by-design/a-main-s1/trace_code.npz"),
]  # fmt: skip
REMOE = "ReMoE, arXiv 2605.27081"
PUBLISHED = {4: (0.2058, 0.2374), 6: (0.3187, 0.3687), 8: (0.3629, 0.4142), 12: (0.4519, 0.5035)}  # base, tuned
# loads of gates tuned with the recipe `remoe`, docs/results.md
DEMO = {8: -0.301, 12: -0.343, 16: -0.377}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    traces = parser.parse_args().shared / "data/traces"
    rows = [_curve(one, read_foreign(traces / one.file)) for one in ROWS]
    family, model, width = DEEPSEEK
    rows.append({
        "family": family, "model": model, "width": width, "text": "ShareGPT, decoded", "source": REMOE,
        "layers": 26, "experts": 64, "top_k": 6, "request_tokens": 64,
        "hits": {str(capacity): base for capacity, (base, _) in PUBLISHED.items()},
    })  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "demo.trace"
        trace.record("demo", out, trace.Asked(), delta=None, prompts=None, device="cpu")
        demo = Row(
            ("deepseek_v2", "demo", 128), "held-out texts, forced decode", "python docs/make_known_misses.py", ""
        )
        rows.append(_curve(demo, read(out)))
    gains = [
        {
            "family": family, "model": model, "width": width, "experts": 64, "source": REMOE,
            "misses": {str(c): round((1 - tuned) / (1 - base) - 1, 4) for c, (base, tuned) in PUBLISHED.items()},
        },
        {
            "family": family, "model": "demo", "width": 128, "experts": 64,
            "source": "the recipe remoe, docs/results.md", "misses": {str(c): change for c, change in DEMO.items()},
        },
    ]  # fmt: skip
    lines = [f' "{name}": [\n  ' + ",\n  ".join(map(json.dumps, part)) + "\n ]" for name, part in
             (("rows", rows), ("gains", gains))]  # fmt: skip
    atomic.write(PATH, "{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{PATH}: {len(rows)} curves, {len(gains)} gains")


def _curve(row: Row, trace: RoutingTrace) -> dict[str, Any]:
    """Hits of decoded tokens as a share of their accesses with C = 1..E slots a layer, from a cold cache a request."""
    family, model, width = row.of
    tokens = int((~trace.prefill).sum())
    hits = lru_curve(trace).sum(axis=0)[1:] / (tokens * trace.n_layers * trace.top_k)
    return {
        "family": family, "model": model, "width": width, "text": row.text, "source": row.source,
        "layers": trace.n_layers, "experts": trace.n_experts, "top_k": trace.top_k,
        "request_tokens": round(tokens / trace.n_requests),
        "hits": {str(capacity): round(float(hit), 4) for capacity, hit in enumerate(hits, 1)},
    }  # fmt: skip


if __name__ == "__main__":
    main()

"""The offloaded decoder against the peers, in equal memory, and against what the bytes allow.

    make bench-decode                                   everything: about an hour, 40 GB of disk, root for memory limits
    python benchmarks/decode.py --parts floor,demo      some parts; no root needed but for peers and accelerate
    python benchmarks/decode.py --tiny                  every part on a checkpoint of a few kB an expert, to try the command

All systems decode the same ids with the same threads, in turns; between them the page cache is emptied of the model. The
checkpoint has random weights in the layer geometry of DeepSeek-V2-Lite. Results (JSON, Markdown, plots) land in --out after
each part. benchmarks/README.md says what each part measures and what it needs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from decode import demo, floors, llama, peers, plot, report
from decode.rounds import Bar
from decode.setup import geometry, Setup

PARTS = {
    "peers": peers.peers, "accelerate": peers.accelerate, "ram": peers.ram, "floor": floors.floor, "linear": floors.linear,
    "sizes": floors.sizes, "context": floors.context, "layers": floors.layers, "ttft": floors.ttft, "demo": demo.demo,
}  # fmt: skip
WITH_LLAMA = ("peers", "ram")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="of " + ", ".join(PARTS) + "; floor:3 takes 3 rounds")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=32, help="decoded a request")
    parser.add_argument("--threads", type=int, default=1, help="to compute; remoe's two readers are not counted")
    parser.add_argument("--work", type=Path, default=Path("build/bench"), help="checkpoints, builds")
    parser.add_argument("--out", type=Path, default=Path("build/bench/results"))
    parser.add_argument("--llama", type=Path, help="a folder with llama.cpp built in it, instead of building it")
    parser.add_argument("--no-llama", action="store_true", help="leave llama.cpp out")
    parser.add_argument("--delta", help="a run on the demo for the demo part, instead of training demo-strong")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    wanted = {
        name: int(rounds or asked.rounds) for name, _, rounds in (w.partition(":") for w in asked.parts.split(","))
    }
    if unknown := [name for name in wanted if name not in PARTS]:
        sys.exit(f"error: no part {unknown[0]}; there are {', '.join(PARTS)}.")
    work = asked.work.resolve() / ("tiny" if asked.tiny else "dsv2")
    work.mkdir(parents=True, exist_ok=True)
    setup = Setup(work, geometry(asked.tiny), asked.rounds, asked.tokens, asked.threads, delta=asked.delta)
    if asked.tiny and setup.delta is None:
        wanted.pop("demo", None)  # whose gates take minutes to tune
    with_llama = not asked.no_llama and any(name in WITH_LLAMA for name in wanted)
    if with_llama:
        setup.program = llama.driver(asked.work.resolve(), asked.llama)
    setup.checkpoints(gguf=with_llama)
    results: dict[str, Any] = {"conditions": report.conditions(setup), "notes": setup.notes, "parts": {}}
    asked.out.mkdir(parents=True, exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S")
    for part, setup.rounds in wanted.items():
        start = time.monotonic()
        arguments = {"copies": 8} if part == "demo" and asked.tiny else {}
        results["parts"][part] = PARTS[part](setup, **arguments)
        print(f"{part}: {time.monotonic() - start:.0f} s in all", file=sys.stderr)
        write(results, asked.out / f"decode-{name}")
    print(report.markdown(results))


def write(results: dict[str, Any], stem: Path) -> None:
    """STEM.json, STEM.md, and a picture a part that has one."""

    def plain(value: object) -> object:
        return value.row() if isinstance(value, Bar) else str(value)

    stem.with_suffix(".json").write_text(json.dumps(results, default=plain))
    stem.with_suffix(".md").write_text(report.markdown(results) + "\n")
    plot.draw(results["parts"], stem)


if __name__ == "__main__":
    main()

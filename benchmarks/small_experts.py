"""Experts in 8 and 4 bits against the stored ones: tokens a second from storage at equal C, in paired rounds.

    python benchmarks/small_experts.py MODEL --int8 EIGHT --int4 FOUR --cache 12 --rounds 5

EIGHT and FOUR are folders of `remoe pack MODEL --experts int8|int4`. All arms are fed the same ids, read with O_DIRECT and take turns in
each round, in an order that is turned by one from round to round; ratios are formed within a round. `mixed` reads the heaviest misses as they are
stored, the others from FOUR (--heavy). The first tokens, while the cache fills, are left out. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from remoe_cli.environment import device_name
from remoe_cli.hub.resolve import resolve
from remoe_cli.offload import OffloadedDecoder, Settings

PASS = {"int4": 2.0, "int8": 1.4}  # times the tokens a second of bf16
_PROMPT, _LEFT_OUT = 8, 4  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--int8", type=Path, required=True)
    parser.add_argument("--int4", type=Path, required=True)
    parser.add_argument("--cache", type=int, default=12)
    parser.add_argument("--heavy", type=float, default=0.6)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    checkpoint = resolve(asked.model)
    arms: dict[str, tuple[Path | None, Settings]] = {
        "bf16": (None, Settings()),
        "int8": (asked.int8, Settings()),
        "int4": (asked.int4, Settings()),
        "mixed": (asked.int4, replace(Settings(), heavy=asked.heavy)),
    }
    draw = random.Random(0)
    vocabulary = checkpoint.config["vocab_size"]
    with ExitStack() as stack:
        decoders = {
            name: stack.enter_context(
                OffloadedDecoder(checkpoint, asked.cache, threads=asked.threads, settings=settings, pack=pack)
            )
            for name, (pack, settings) in arms.items()
        }
        rounds = []
        for turn in range(asked.rounds):
            prompt, forced = (
                [draw.randrange(vocabulary) for _ in range(n)] for n in (_PROMPT, asked.tokens + _LEFT_OUT)
            )
            names = [*arms][turn % len(arms) :] + [*arms][: turn % len(arms)]
            rounds.append({name: measured(decoders[name], prompt, forced) for name in names})
        io = {decoder.io for decoder in decoders.values()}
    print(
        json.dumps(
            {
                "model": asked.model, "cache": asked.cache, "tokens": asked.tokens, "threads": asked.threads, "heavy": asked.heavy,
                "device": device_name("cpu"), "io": sorted(io), "arms": {name: figures(name, rounds) for name in arms}, "rounds": rounds,
            },
            indent=1,
        )
    )  # fmt: skip


def measured(decoder: OffloadedDecoder, prompt: list[int], forced: list[int]) -> dict[str, float]:
    """One request of one arm."""
    done = decoder.decode(prompt, len(forced), forced=forced)
    waits = done.latency.itl_s[_LEFT_OUT:]
    return {
        "tokens_a_second": len(waits) / sum(waits),
        "mb_a_token": done.counts.decode.bytes / 1e6 / len(done.latency.itl_s),
        "hit_ratio": done.counts.hits / done.counts.accesses,
        "wait_share": sum(done.split.tokens["wait"]) / sum(done.latency.itl_s),
    }


def figures(name: str, rounds: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Medians over rounds; against bf16 with the least and the greatest."""
    ratios = [one[name]["tokens_a_second"] / one["bf16"]["tokens_a_second"] for one in rounds]
    of = {key: median(one[name][key] for one in rounds) for key in rounds[0][name]}
    passed = None if name not in PASS else median(ratios) >= PASS[name]
    return {
        **of,
        "of_bf16": {"median": median(ratios), "least": min(ratios), "greatest": max(ratios)},
        "passed": passed,
    }


if __name__ == "__main__":
    main()

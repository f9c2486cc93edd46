"""What all parts share: where things are, what every system decodes, and how each is started."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decode import limits, llama
from decode.checkpoint import Geometry, make, TINY

ROOM_BYTES = 450_000_000  # beside weights: interpreter and libraries, activations, what passes through


@dataclass
class Setup:
    """work: folder of checkpoints (about 25 GB); tokens: decoded a request; prompt: ids before
    them; program: the llama.cpp driver, None without one."""

    work: Path
    geometry: Geometry
    rounds: int
    tokens: int
    threads: int = 1
    prompt: int = 8
    program: Path | None = None
    delta: str | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.work / "hf"

    @property
    def gguf(self) -> Path:
        return self.work / "model.gguf"

    @property
    def n_layers(self) -> int:
        """With experts."""
        return self.geometry.layers - 1

    @property
    def expert_bytes(self) -> int:
        return 3 * self.geometry.hidden * self.geometry.expert * 2

    @property
    def dense_bytes(self) -> int:
        index = json.loads((self.model / "model.safetensors.index.json").read_text())
        return index["metadata"]["total_size"] - self.n_layers * self.geometry.experts * self.expert_bytes

    def limit(self, capacity: int) -> int:
        """The memory that a system gets where the decoder may keep `capacity` experts a layer."""
        return self.dense_bytes + capacity * self.n_layers * self.expert_bytes + ROOM_BYTES

    def ids(self, n: int, seed: int = 0) -> list[int]:
        """The same ids for every system, so that all of them route alike."""
        draw = random.Random(seed)
        return [draw.randrange(2, self.geometry.vocabulary) for _ in range(n)]

    def request(self, tokens: int | None = None, prompt: int | None = None, seed: int = 0) -> dict[str, list[int]]:
        n = prompt or self.prompt
        ids = self.ids(n + (tokens or self.tokens) + 1, seed)
        return {"prompt": ids[:n], "forced": ids[n:]}

    def checkpoints(self, gguf: bool) -> None:
        """Makes what is not there yet."""
        whole = (self.model / "model.safetensors.index.json").is_file() and (self.gguf.is_file() or not gguf)
        if not whole:
            print(f"making the checkpoint in {self.work} (two minutes)", file=sys.stderr)
            make(self.work, self.geometry, gguf=gguf)

    # one call each: a fresh process, a cold page cache

    def ours(self, steps: Sequence[dict], *, limit: int | None = None, model: Path | None = None, **job: Any) -> Any:
        """What each step gave; of a single step, that itself with `peak_bytes`."""
        model = model or self.model
        limits.evict(model)
        asked = {"model": str(model), "threads": self.threads, "simulate": True, "steps": list(steps), **job}
        ran = limits.run(python("decode.ours"), limit=limit, stdin=json.dumps(asked))
        return {**ran.answer[0], "peak_bytes": ran.peak_bytes} if len(steps) == 1 else ran.answer

    def llama(
        self, *, tokens: int, limit: int | None = None, mapped: bool = True, read_ahead_kb: int | None = None
    ) -> dict:
        """read_ahead_kb: of the mapped file; None: as the machine is."""
        assert self.program is not None
        limits.evict(self.gguf)
        request = self.request(tokens)
        command = llama.command(self.program, self.gguf, threads=self.threads, prompt=self.prompt, mapped=mapped)
        ids = llama.ids_text(request["prompt"] + request["forced"][:tokens])
        mapping = (self.gguf, read_ahead_kb) if read_ahead_kb is not None else None
        ran = limits.run(command, limit=limit, stdin=ids, mapping=mapping)
        return {**ran.answer, "peak_bytes": ran.peak_bytes}

    def accelerate(self, *, tokens: int, limit: int | None, disk: str | None) -> dict:
        limits.evict(self.model)
        request = self.request(tokens)
        job = {
            "model": str(self.model), "ids": request["prompt"] + request["forced"][:tokens], "prompt": self.prompt,
            "threads": self.threads, "disk": disk, "offload": str(self.work / "accelerate"),
        }  # fmt: skip
        try:
            ran = limits.run(python("decode.accelerated"), limit=limit, stdin=json.dumps(job))
        except limits.Killed:
            return {"killed": True}
        return {**ran.answer, "peak_bytes": ran.peak_bytes}


def python(module: str) -> list[str]:
    return [sys.executable, "-m", module]


def geometry(tiny: bool) -> Geometry:
    return TINY if tiny else Geometry()

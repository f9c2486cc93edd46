"""What a killed run goes on from, bit for bit: gates, optimiser, random numbers, and the place in the texts.

One safetensors file for each saved step, whole under its name or not there; the two newest are kept.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from remoe_cli import atomic
from remoe_cli.errors import RunError
from remoe_cli.train.packing import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

KEPT = 2
FORMAT = 1
RANDOM = "random"


@dataclass(frozen=True)
class State:
    """After `step` completed steps. position: where the next micro-batch begins in the texts; elapsed: seconds of
    training so far. tensors: "part/name" for the gates ("master", and "proven", those before the last update) and each
    of the optimiser's moments ("exp_avg", ...); and "random", the state of torch's generator."""

    step: int
    position: Position
    elapsed: float
    tensors: "Mapping[str, Tensor]"

    def part(self, name: str) -> dict[str, Tensor]:
        """The tensors of one part, by parameter name."""
        prefix = f"{name}/"
        return {key.removeprefix(prefix): tensor for key, tensor in self.tensors.items() if key.startswith(prefix)}

    def save(self, folder: Path) -> None:
        """Writes state/step-<step>.safetensors and drops all but the newest ones. Raises RunError when it cannot."""
        from safetensors.torch import save

        atomic.make_folder(folder)
        facts = {
            "format": FORMAT,
            "step": self.step,
            "position": list(self.position),
            "elapsed": self.elapsed,
            "threads": torch.get_num_threads(),
        }
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        atomic.write(folder / f"step-{self.step:08d}.safetensors", save(tensors, {"remoe": json.dumps(facts)}))
        for old in [*saved(folder)[KEPT:], *folder.glob(".*.tmp*")]:
            old.unlink(missing_ok=True)


def saved(folder: Path) -> list[Path]:
    """The files of saved states, newest first."""
    return sorted(folder.glob("step-*.safetensors"), reverse=True)


def newest(folder: Path) -> tuple[State, int] | None:
    """The newest state that can be read, and the thread count it was made with; None when there is none.

    Raises RunError when there are files, and none of them can be read.
    """
    for path in saved(folder):
        try:
            return _read(path)
        except (OSError, ValueError, KeyError, TypeError):  # a disk fault: the one before it will do
            continue
    if saved(folder):
        raise RunError(f"no saved state in {folder} can be read.", "remoe finetune MODEL without --resume")
    return None


def _read(path: Path) -> tuple[State, int]:
    from safetensors import safe_open, SafetensorError

    try:
        with safe_open(path, framework="pt") as file:
            facts = json.loads(file.metadata()["remoe"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except SafetensorError as error:
        raise ValueError(str(error)) from None
    if facts["format"] != FORMAT:
        raise ValueError("another format")
    return State(facts["step"], Position(*facts["position"]), facts["elapsed"], tensors), facts["threads"]

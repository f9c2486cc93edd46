"""The Delta and its folder: gates.safetensors + remoe.json."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from remoe_cli import atomic
from remoe_cli.errors import DeltaError
from remoe_cli.hub.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch

FORMAT = 1
GATES, FACTS = "gates.safetensors", "remoe.json"
_TORCH_NAMES = {"BF16": "torch.bfloat16", "F16": "torch.float16", "F32": "torch.float32"}


@dataclass(frozen=True)
class Delta:
    """tensors: on-disk name -> gate in the base's stored dtype. base_sha256: on-disk name -> digest of the base's bytes.

    changed: share of gate elements whose stored value differs from the base's (0..1).
    """

    tensors: dict[str, "torch.Tensor"]
    base: str
    commit: str | None
    model_type: str
    base_sha256: dict[str, str]
    changed: float
    recipe: str
    environment: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, gates: dict[str, "torch.Tensor"], recipe: str, environment: dict[str, str]
    ) -> "Delta":
        """From trained gates, on-disk name -> tensor of any float dtype; cast to the base's stored dtype."""
        tensors, different, total = {}, 0, 0
        for name, gate in gates.items():
            base = checkpoint.read(name)
            tensors[name] = gate.detach().to("cpu", base.dtype).contiguous()
            different += int((tensors[name] != base).sum())
            total += base.numel()
        sha256 = {name: checkpoint.sha256(name) for name in gates}
        return cls(
            tensors,
            checkpoint.id,
            checkpoint.commit,
            checkpoint.model_type,
            sha256,
            different / total,
            recipe,
            environment,
        )

    def save(self, folder: Path) -> None:
        """Writes both files, each whole or not at all."""
        from safetensors.torch import save

        atomic.make_folder(folder)
        facts = {
            "format": FORMAT,
            "base": self.base,
            "commit": self.commit,
            "model_type": self.model_type,
            "recipe": self.recipe,
            "changed": self.changed,
            "gates": {
                name: {
                    "dtype": str(t.dtype).removeprefix("torch."),
                    "shape": list(t.shape),
                    "base_sha256": self.base_sha256[name],
                }
                for name, t in self.tensors.items()
            },
            "environment": self.environment,
        }
        atomic.write(folder / GATES, save(self.tensors, metadata={"format": "pt"}))
        atomic.write(folder / FACTS, json.dumps(facts, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Delta":
        """Raises DeltaError when the folder is not a delta, or is damaged."""
        from safetensors import SafetensorError
        from safetensors.torch import load

        folder = Path(folder)
        if not is_delta(folder):
            raise DeltaError(f"{folder} is not a delta: it must hold {GATES} and {FACTS}.", "remoe finetune demo")
        try:
            facts = json.loads((folder / FACTS).read_text())
            if facts["format"] != FORMAT:
                raise DeltaError(
                    f"{folder} has delta format {facts['format']}; this remoe reads format {FORMAT}.",
                    "pip install -U remoe-cli",
                )
            tensors = load((folder / GATES).read_bytes())
            sha256 = {name: gate["base_sha256"] for name, gate in facts["gates"].items()}
            if set(sha256) != set(tensors):
                raise DeltaError(
                    f"{folder}: {GATES} and {FACTS} name different gates.", "download or make the delta again"
                )
            return cls(
                tensors, facts["base"], facts["commit"], facts["model_type"], sha256, facts["changed"], facts["recipe"], facts["environment"]
            )  # fmt: skip
        except (ValueError, KeyError, TypeError, SafetensorError) as error:
            raise DeltaError(
                f"{folder} is a damaged delta ({str(error).splitlines()[0]}).", "download or make the delta again"
            ) from None

    def is_applied(self, checkpoint: Checkpoint) -> bool:
        """True when the checkpoint's gates are the tuned ones already, False when they are the base's.

        Raises DeltaError, with the reason, when they are neither: another model, another revision, changed gates.
        """
        hint = f"remoe apply DELTA {self.base}" + (f"@{self.commit}" if self.commit else "")
        if checkpoint.model_type != self.model_type:
            raise DeltaError(
                f"this delta belongs to {self.base} ({self.model_type}), but {checkpoint.id} is {checkpoint.model_type}.",
                hint,
            )
        for name, tensor in self.tensors.items():
            if name not in checkpoint.tensors:
                raise DeltaError(f"this delta belongs to {self.base}; {checkpoint.id} has no gate {name}.", hint)
            info = checkpoint.tensors[name]
            if info.shape != tuple(tensor.shape):
                raise DeltaError(
                    f"{name} is {list(info.shape)} in {checkpoint.id} but {list(tensor.shape)} in the delta of {self.base}.",
                    hint,
                )
            if str(tensor.dtype) != _TORCH_NAMES.get(info.dtype):
                raise DeltaError(
                    f"{name} is stored as {info.dtype} in {checkpoint.id} but as {tensor.dtype} in the delta.", hint
                )
        states = set()
        for name, tensor in self.tensors.items():
            found, base, tuned = checkpoint.sha256(name), self.base_sha256[name], _sha256(tensor)
            if found not in (base, tuned):
                raise DeltaError(
                    f"the gate {name} of {checkpoint.id} is not the one this delta was made from "
                    f"({self.base}{'@' + self.commit[:12] if self.commit else ''}): another revision, dtype, or gates changed since.",
                    hint,
                )
            if base != tuned:  # a gate that did not change tells nothing
                states.add(found == tuned)
        if len(states) == 2:
            raise DeltaError(f"{checkpoint.id} holds a mix of base gates and tuned gates.", hint)
        return states == {True}


def is_delta(folder: Path) -> bool:
    return (folder / GATES).is_file() and (folder / FACTS).is_file()


def _sha256(tensor: "torch.Tensor") -> str:
    return hashlib.sha256(stored_bytes(tensor)).hexdigest()


def stored_bytes(tensor: "torch.Tensor") -> bytes:
    """A tensor's bytes as safetensors stores them."""
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()

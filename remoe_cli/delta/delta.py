"""The Delta and its folder: gates.safetensors + remoe.json, and heads.safetensors where heads were trained."""

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from remoe_cli import atomic
from remoe_cli.errors import CheckpointError, DeltaError
from remoe_cli.hub.checkpoint import Checkpoint, read_header, read_object

if TYPE_CHECKING:
    import torch

FORMAT = 1
GATES, HEADS, FACTS = "gates.safetensors", "heads.safetensors", "remoe.json"
BESIDE = (HEADS, "README.md", "recipe.yaml", "report.json")  # what a pushed delta's folder may hold besides
_TORCH_NAMES = {"BF16": "torch.bfloat16", "F16": "torch.float16", "F32": "torch.float32"}


@dataclass(frozen=True)
class Delta:
    """tensors: on-disk name -> gate in the base's stored dtype. base_sha256: on-disk name -> digest of the base's bytes.

    changed: share of gate elements whose stored value differs from the base's (0..1). heads: fp32, each under its gate's
    on-disk name with the last part replaced by its kind ("model.layers.3.mlp.gate.temporal").
    """

    tensors: dict[str, "torch.Tensor"]
    base: str
    commit: str | None
    model_type: str
    base_sha256: dict[str, str]
    changed: float
    recipe: str
    environment: dict[str, str] = field(default_factory=dict)
    heads: dict[str, "torch.Tensor"] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        gates: dict[str, "torch.Tensor"],
        recipe: str,
        environment: dict[str, str],
        heads: dict[str, "torch.Tensor"] | None = None,
    ) -> "Delta":
        """From trained gates, on-disk name -> tensor of any float dtype; cast to the base's stored dtype."""
        import torch

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
            {name: head.detach().to("cpu", torch.float32).contiguous() for name, head in (heads or {}).items()},
        )

    def save(self, folder: Path) -> None:
        """Writes its files, each whole or not at all. The same delta gives the same bytes."""
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
                name: {**_facts(t), "base_sha256": self.base_sha256[name], "sha256": _sha256(t)}
                for name, t in sorted(self.tensors.items())
            },
            "environment": self.environment,
        }
        if self.heads:
            facts["heads"] = {name: {**_facts(t), "sha256": _sha256(t)} for name, t in sorted(self.heads.items())}
            atomic.write(folder / HEADS, save(self.heads, metadata={"format": "pt"}))
        else:
            (folder / HEADS).unlink(missing_ok=True)
        atomic.write(folder / GATES, save(self.tensors, metadata={"format": "pt"}))
        atomic.write(folder / FACTS, json.dumps(facts, indent=1) + "\n")

    @classmethod
    def load(cls, folder: Path) -> "Delta":
        """Raises DeltaError when the folder is not a delta, or is damaged."""
        from safetensors import SafetensorError

        folder = Path(folder)
        if not is_delta(folder):
            raise DeltaError(f"{folder} is not a delta: it must hold {GATES} and {FACTS}.", "remoe finetune demo")
        try:
            facts = read_object(folder / FACTS)
            if facts["format"] != FORMAT:
                raise DeltaError(
                    f"{folder} has delta format {facts['format']}; this remoe reads format {FORMAT}.",
                    "pip install -U remoe-cli",
                )
            gates = _described(facts["gates"], "gates", "base_sha256")
            heads = _described(facts["heads"], "heads", "sha256") if "heads" in facts else {}
            return cls(
                _read(folder, GATES, gates),
                _text(facts, "base"),
                _text(facts, "commit") if facts["commit"] is not None else None,
                _text(facts, "model_type"),
                {name: gate["base_sha256"] for name, gate in gates.items()},
                float(facts["changed"]),
                _text(facts, "recipe"),
                dict(facts["environment"]),
                _read(folder, HEADS, heads) if heads else {},
            )
        except KeyError as error:
            raise _damaged(folder, f"{FACTS} lacks {error}") from None
        except CheckpointError as error:  # names the file itself
            raise DeltaError(error.message, error.hint) from None
        except (ValueError, TypeError, OSError, SafetensorError) as error:
            raise _damaged(folder, str(error)) from None

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
                raise DeltaError(
                    f"this delta belongs to {self.base}; {checkpoint.id} has no gate {name}{_instead(name, checkpoint)}.",
                    hint,
                )
            info = checkpoint.tensors[name]
            if info.shape != tuple(tensor.shape):
                raise DeltaError(
                    f"{name} is {list(info.shape)} in {checkpoint.id} but {list(tensor.shape)} in the delta of {self.base}.",
                    hint,
                )
            if str(tensor.dtype) != _TORCH_NAMES.get(info.dtype):
                raise DeltaError(
                    f"{name} is stored as {info.dtype} in {checkpoint.id} but as {tensor.dtype} in the delta"
                    f"{'' if info.dtype in _TORCH_NAMES else ': that gate is quantised'}.",
                    hint,
                )
        states = set()
        for name, tensor in self.tensors.items():
            found, base, tuned = checkpoint.sha256(name), self.base_sha256[name], _sha256(tensor)
            if found not in (base, tuned):
                raise DeltaError(
                    f"the gate {name} of {checkpoint.id} is not the one this delta was made from "
                    f"({self.base}{'@' + self.commit[:12] if self.commit else ''}): another revision, or gates that were changed since (a quantiser may smooth them).",
                    hint,
                )
            if base != tuned:  # a gate that did not change tells nothing
                states.add(found == tuned)
        if len(states) == 2:
            raise DeltaError(f"{checkpoint.id} holds a mix of base gates and tuned gates.", hint)
        return states == {True}


def is_delta(folder: Path) -> bool:
    return (folder / GATES).is_file() and (folder / FACTS).is_file()


def _described(found: object, what: str, digest: str) -> dict[str, dict]:
    """The gates or heads of remoe.json. Raises ValueError unless each has this digest."""
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{FACTS} describes no {what}")
    for name, one in found.items():
        if not isinstance(one, dict) or not isinstance(one.get(digest), str):
            raise ValueError(f"{FACTS} has no {digest} for {name}")
    return found


def _read(folder: Path, file: str, described: dict[str, dict]) -> dict[str, "torch.Tensor"]:
    """Raises ValueError where the file holds other tensors than described."""
    from safetensors.torch import load

    what = file.partition(".")[0]
    if set(described) != set(read_header(folder / file)):  # before anything large is read
        raise ValueError(f"{file} and {FACTS} name different {what}")
    tensors = load((folder / file).read_bytes())
    for name, one in described.items():
        if "sha256" in one and one["sha256"] != _sha256(tensors[name]):
            raise ValueError(f"the {what[:-1]} {name} is not the one that {FACTS} describes")
    return tensors


def _facts(tensor: "torch.Tensor") -> dict[str, object]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _text(facts: dict, key: str) -> str:
    if not isinstance(facts[key], str):
        raise ValueError(f"{key} in {FACTS} is no text")
    return facts[key]


def _damaged(folder: Path, why: str) -> DeltaError:
    return DeltaError(
        f"{folder} is a damaged delta ({why.splitlines()[0] if why else 'unreadable'}).",
        "download or make the delta again",
    )


def _instead(name: str, checkpoint: Checkpoint) -> str:
    """What lies there in the gate's place, if it was quantised."""
    stem = name.removesuffix("weight")
    packed = next(
        (other for other in checkpoint.tensors if other.startswith(f"{stem}q") or other == f"{name}_packed"), None
    )
    return f" (a quantised one, {packed}, stands in its place)" if packed else ""


def _sha256(tensor: "torch.Tensor") -> str:
    return hashlib.sha256(stored_bytes(tensor)).hexdigest()


def stored_bytes(tensor: "torch.Tensor") -> bytes:
    """A tensor's bytes as safetensors stores them."""
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes()

"""The Delta and its folder: gates.safetensors + remoe.json, and heads.safetensors where heads were trained."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TYPE_CHECKING

from remoe_cli import atomic
from remoe_cli.delta import fingerprint
from remoe_cli.delta.stored import digest, dtype_label, FLOATS, stored_bytes
from remoe_cli.errors import CheckpointError, DeltaError
from remoe_cli.hub.checkpoint import Checkpoint, read_header, read_object

if TYPE_CHECKING:
    import torch

FORMAT = 1
GATES, HEADS, FACTS = "gates.safetensors", "heads.safetensors", "remoe.json"
BESIDE = (HEADS, "README.md", "recipe.yaml", "report.json")  # what a pushed delta's folder may hold besides
_LARGE = 2**63


@dataclass(frozen=True)
class Delta:
    """tensors: on-disk name -> gate in the base's stored dtype, or in float32 where the run kept that. base_sha256: on-disk
    name -> digest of the base's bytes; base_sha256_f16: of the same gate rounded to float16, known where the base is bfloat16.

    changed: share of gate elements whose value here differs from the base's (0..1), None where it is not known (merged
    deltas). base_dtypes: on-disk name -> the base's stored dtype, where it may be another than the tensor's. heads: fp32, each
    under its gate's on-disk name with the last part replaced by its kind ("model.layers.3.mlp.gate.temporal"). report: what
    `remoe eval` found, in a few flat figures; empty where it was not run.
    """

    tensors: dict[str, "torch.Tensor"]
    base: str
    commit: str | None
    model_type: str
    base_sha256: dict[str, str]
    changed: float | None
    recipe: str
    environment: dict[str, str] = field(default_factory=dict)
    heads: dict[str, "torch.Tensor"] = field(default_factory=dict)
    base_dtypes: dict[str, "torch.dtype"] = field(default_factory=dict)
    base_sha256_f16: dict[str, str] = field(default_factory=dict)
    report: dict[str, float | str | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        gates: dict[str, "torch.Tensor"],
        recipe: str,
        environment: dict[str, str],
        heads: dict[str, "torch.Tensor"] | None = None,
        dtype: "torch.dtype | None" = None,
    ) -> "Delta":
        """From trained gates, on-disk name -> tensor of any float dtype; cast to `dtype`, by default the base's stored one."""
        import torch

        tensors, base_dtypes, sha256, sha256_f16 = {}, {}, {}, {}
        different, total = 0, 0
        for name, gate in gates.items():
            base = checkpoint.read(name)
            tensors[name] = gate.detach().to("cpu", dtype or base.dtype).contiguous()
            different += int((tensors[name] != base).sum())
            total += base.numel()
            base_dtypes[name], sha256[name] = base.dtype, checkpoint.sha256(name)
            if base.dtype == torch.bfloat16:
                sha256_f16[name] = digest(stored_bytes(base.half()))
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
            base_dtypes,
            sha256_f16,
        )

    def base_dtype(self, name: str) -> "torch.dtype":
        """What the base stores that gate in."""
        return self.base_dtypes.get(name, self.tensors[name].dtype)

    def tensor(self, name: str, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """The tuned gate, in that dtype where one is given."""
        return self.tensors[name].to(dtype or self.tensors[name].dtype)

    def stored(self, name: str, dtype: "torch.dtype | None" = None) -> "torch.Tensor":
        """The tuned gate rounded to what the base stores, then in that dtype where one is given."""
        rounded = self.tensors[name].to(self.base_dtype(name))
        return rounded.to(dtype or rounded.dtype)

    @property
    def is_float32(self) -> bool:
        """Whether any gate is kept in float32 whose base is not."""
        return any(tensor.dtype != self.base_dtype(name) for name, tensor in self.tensors.items())

    def is_applied(self, checkpoint: Checkpoint) -> bool:
        """True when the checkpoint's gates are the tuned ones already, False when they are the base's.

        Raises DeltaError, with the reason, when they are neither: another model, another revision, changed gates.
        """
        return fingerprint.is_applied(self, checkpoint)

    def save(self, folder: Path) -> None:
        """Writes its files, each whole or not at all. The same delta gives the same bytes."""
        from safetensors.torch import save

        atomic.make_folder(folder)
        facts: dict[str, Any] = {
            "format": FORMAT,
            "base": self.base,
            "commit": self.commit,
            "model_type": self.model_type,
            "recipe": self.recipe,
            "changed": self.changed,
            "gates": {name: self._gate(name) for name in sorted(self.tensors)},
            "environment": self.environment,
        }
        if self.report:
            facts["report"] = self.report
        if self.heads:
            facts["heads"] = {name: {**_facts(t), "sha256": _sha256(t)} for name, t in sorted(self.heads.items())}
            atomic.write(folder / HEADS, save(self.heads, metadata={"format": "pt"}))
        else:
            (folder / HEADS).unlink(missing_ok=True)
        atomic.write(folder / GATES, save(self.tensors, metadata={"format": "pt"}))
        atomic.write(folder / FACTS, json.dumps(facts, indent=1) + "\n")

    def _gate(self, name: str) -> dict[str, object]:
        f16 = {"base_sha256_f16": self.base_sha256_f16[name]} if name in self.base_sha256_f16 else {}
        return {
            **_facts(self.tensors[name]),
            "base_dtype": dtype_label(self.base_dtype(name)),
            "base_sha256": self.base_sha256[name],
            **f16,
            "sha256": _sha256(self.tensors[name]),
        }

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
                    f"{folder} has delta format {str(facts['format'])[:20]}; this remoe reads format {FORMAT}.",
                    "pip install -U remoe-cli",
                )
            gates = _described(facts["gates"], "gates", "base_sha256")
            heads = _described(facts["heads"], "heads", "sha256") if "heads" in facts else {}
            tensors = _read(folder, GATES, gates)
            return cls(
                tensors,
                _text(facts, "base"),
                _text(facts, "commit") if facts["commit"] is not None else None,
                _text(facts, "model_type"),
                {name: gate["base_sha256"] for name, gate in gates.items()},
                _share(facts["changed"]),
                _text(facts, "recipe"),
                _flat(facts["environment"], "environment", (str,)),
                _read(folder, HEADS, heads) if heads else {},
                {name: _base_dtype(name, gate, tensors[name]) for name, gate in gates.items()},
                {name: _text(gate, "base_sha256_f16") for name, gate in gates.items() if "base_sha256_f16" in gate},
                _flat(facts.get("report", {}), "report", (str, int, float, type(None))),
            )
        except KeyError as error:
            raise _damaged(folder, f"{FACTS} lacks {error}") from None
        except CheckpointError as error:  # names the file itself
            raise DeltaError(error.message, error.hint) from None
        except (ValueError, TypeError, OSError, SafetensorError) as error:
            raise _damaged(folder, str(error)) from None


def is_delta(folder: Path) -> bool:
    return (folder / GATES).is_file() and (folder / FACTS).is_file()


def _described(found: object, what: str, sha256: str) -> dict[str, dict]:
    """The gates or heads of remoe.json. Raises ValueError unless each has this digest."""
    if not isinstance(found, dict) or not found:
        raise ValueError(f"{FACTS} describes no {what}")
    for name, one in found.items():
        if not isinstance(one, dict) or not isinstance(one.get(sha256), str):
            raise ValueError(f"{FACTS} has no {sha256} for {name}")
        if not name.isprintable():
            raise ValueError(f"{FACTS} names {what} that cannot be printed")
    return found


def _read(folder: Path, file: str, described: dict[str, dict]) -> dict[str, "torch.Tensor"]:
    """Raises ValueError where the file holds other tensors than described."""
    from safetensors.torch import load

    what = file.partition(".")[0]
    found = read_header(folder / file)
    if set(described) != set(found):  # before anything large is read
        raise ValueError(f"{file} and {FACTS} name different {what}")
    for name, one in described.items():
        dtype, shape = FLOATS.get(found[name].dtype), list(found[name].shape)
        if (
            dtype is None
            or not found[name].nbytes
            or (one.get("dtype", dtype), one.get("shape", shape)) != (dtype, shape)
        ):
            raise ValueError(f"{file} holds {name} as {found[name].dtype} {shape}, which is not what {FACTS} describes")
    end = min(one.offset for one in found.values()) + sum(one.nbytes for one in found.values())
    if (size := (folder / file).stat().st_size) != end:
        raise ValueError(f"{file} holds {size:,} bytes where its tensors end at {end:,}")
    tensors = load((folder / file).read_bytes())
    for name, one in described.items():
        if "sha256" in one and one["sha256"] != _sha256(tensors[name]):
            raise ValueError(f"the {what[:-1]} {name} is not the one that {FACTS} describes")
    return {name: tensors[name] for name in described}


def _base_dtype(name: str, gate: dict[str, Any], tensor: "torch.Tensor") -> "torch.dtype":
    """The first deltas do not say it: theirs is the tensor's. Raises ValueError for what no base stores."""
    import torch

    own = dtype_label(tensor.dtype)
    kept = gate.get("base_dtype", own)
    if kept not in FLOATS.values() or own not in (kept, "float32"):
        raise ValueError(f"the gate {name} is {own} but its base_dtype in {FACTS} is {str(kept)[:20]}")
    return getattr(torch, kept)


def _facts(tensor: "torch.Tensor") -> dict[str, object]:
    return {"dtype": dtype_label(tensor.dtype), "shape": list(tensor.shape)}


def _text(facts: Mapping[str, Any], key: str) -> str:
    """With a mark for what cannot be printed, as names of the machine that made it may hold. Raises ValueError."""
    if not isinstance(facts[key], str):
        raise ValueError(f"{key} in {FACTS} is no text")
    return "".join(one if one.isprintable() else "\ufffd" for one in facts[key])


def _share(value: object) -> float | None:
    if value is not None and (type(value) not in (int, float) or not 0 <= value <= 1):  # type: ignore[operator]
        raise ValueError(f"changed in {FACTS} is no share from 0 to 1")
    return None if value is None else float(value)  # type: ignore[arg-type]


def _flat(found: object, what: str, kinds: tuple[type, ...]) -> dict[str, Any]:
    """A table without tables in it, its texts as `_text` gives them, its numbers of a size to show. Raises ValueError."""
    if not isinstance(found, dict) or not all(
        type(value) in kinds and (not isinstance(value, (int, float)) or -_LARGE < value < _LARGE)
        for value in found.values()
    ):
        raise ValueError(f"{what} in {FACTS} is no table of single values")
    return {_text({"": key}, ""): _text(found, key) if isinstance(found[key], str) else found[key] for key in found}


def _damaged(folder: Path, why: str) -> DeltaError:
    return DeltaError(
        f"{folder} is a damaged delta ({why.splitlines()[0] if why else 'unreadable'}).",
        "download or make the delta again",
    )


def _sha256(tensor: "torch.Tensor") -> str:
    return digest(stored_bytes(tensor))

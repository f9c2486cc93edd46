"""remoe inspect: what a delta holds, and which base it belongs to."""

from collections import Counter
from pathlib import Path
from typing import Any

from remoe_cli import run as runs
from remoe_cli.apply import find_delta
from remoe_cli.delta import FACTS, is_delta
from remoe_cli.delta.stored import digest, dtype_label, stored_bytes
from remoe_cli.errors import command
from remoe_cli.hub.resolve import holds
from remoe_cli.sizes import show_size


def is_model(name: str) -> bool:
    """False for what `inspect` is to take: a delta or run, here or on the Hub, or a folder that is neither. Raises HubError."""
    folder = Path(name).expanduser()
    if any(is_delta(one) for one in (folder, folder / "delta", runs.ROOT / name / "delta")):
        return False
    if name == "demo" or (folder / "config.json").is_file():
        return True
    return not folder.exists() and not (runs.ROOT / name).is_dir() and not holds(name, FACTS)


def inspect(name: str) -> dict[str, Any]:
    """name: as `remoe apply` finds a delta. Raises DeltaError or HubError."""
    delta = find_delta(name)
    return {
        "delta": name,
        "base": delta.base,
        "commit": delta.commit,
        "model_type": delta.model_type,
        "recipe": delta.recipe,
        "changed": delta.changed,
        "bytes": sum(tensor.nbytes for tensor in (*delta.tensors.values(), *delta.heads.values())),
        "gates": {
            gate: {
                "shape": list(tensor.shape),
                "dtype": dtype_label(tensor.dtype),
                "base_dtype": dtype_label(delta.base_dtype(gate)),
                "base_sha256": delta.base_sha256[gate],
                "base_sha256_f16": delta.base_sha256_f16.get(gate),
                "sha256": digest(stored_bytes(tensor)),
            }
            for gate, tensor in delta.tensors.items()
        },
        "heads": {head: {"shape": list(tensor.shape)} for head, tensor in delta.heads.items()},
        "report": delta.report,
        "environment": delta.environment,
    }


def summary(found: dict[str, Any]) -> str:
    """The same for a person, and the next command."""
    pinned = found["base"] + (f"@{found['commit']}" if found["commit"] else "")
    changed = "an unknown share" if found["changed"] is None else f"{100 * found['changed']:.1f} %"
    lines = [
        f"{found['delta']}: a delta of {pinned} ({found['model_type']}), recipe {found['recipe']}, {show_size(found['bytes'])}",
        f"{len(found['gates'])} gates: {_kinds(found['gates'])}; {changed} of the elements differ from the base's",
    ]
    if found["heads"]:
        kinds = Counter(name.rpartition(".")[2] for name in found["heads"])
        lines.append(f"Heads: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}")
    if found["report"]:
        lines.append(f"Report: {', '.join(f'{key} {_shown(value)}' for key, value in found['report'].items())}")
    if found["environment"]:
        lines.append(f"Made with {', '.join(f'{key} {value}' for key, value in found['environment'].items())}")
    return "\n".join([*lines, f"Next: {command('apply', found['delta'], pinned, out='DIR')}"])


def _kinds(gates: dict[str, dict[str, Any]]) -> str:
    """26 of [64, 2048] bfloat16; what the base stores beside it where that is another dtype."""
    kinds = Counter((str(g["shape"]), g["dtype"], g["base_dtype"]) for g in gates.values())
    return ", ".join(
        f"{count} of {shape} {dtype}" + (f" (the base's are {kept})" if kept != dtype else "")
        for (shape, dtype, kept), count in kinds.items()
    )


def _shown(value: float | str | None) -> str:
    return "n/a" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

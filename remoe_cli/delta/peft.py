"""The form `peft`: an adapter that puts whole gates in place of the base's, exact, and nothing else.

PEFT's LNTuning keeps a copy of each target module and lets it run in the module's place, whatever kind of module that is:
a full-weight replacement. The adapter is written from the delta; PEFT itself is not needed.
"""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from remoe_cli import atomic
from remoe_cli.delta.delta import Delta
from remoe_cli.delta.forms import gates_to_write, note_applied, require_written
from remoe_cli.delta.stored import stored_bytes
from remoe_cli.errors import DeltaError
from remoe_cli.hub.checkpoint import Checkpoint, read_header

if TYPE_CHECKING:
    import torch

ADAPTER = CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_LAYER = re.compile(r"(?<=\.layers\.)(\d+)(?=\.)")


def peft_adapter(delta: Delta, checkpoint: Checkpoint, out: Path, cast: bool = False) -> Path:
    """A folder for `PeftModel.from_pretrained(model, out)`, and for transformers' `load_adapter`.

    Raises DeltaError for the wrong base and for a delta that holds more than gates, RunError when `out` is taken.
    """
    tensors = adapter_tensors(delta, checkpoint, cast)
    with atomic.new_folder(out) as scratch:
        base = checkpoint.id if checkpoint.commit else str(checkpoint.folder.absolute())
        write_adapter(tensors, scratch, base, checkpoint.commit)
        note_applied(scratch, delta, "peft")
    return out


def adapter_tensors(delta: Delta, checkpoint: Checkpoint, cast: bool = False) -> dict[str, "torch.Tensor"]:
    """In-memory name -> tensor, of every module that owns a gate: the tuned gates, and what else is in such a module (such as a
    bias that corrects scores) as the base has it. Raises as `peft_adapter`."""
    from remoe_cli.families import known
    from remoe_cli.families.loader import router_names

    if not known(checkpoint.model_type).adapts:
        raise DeltaError(
            f"{checkpoint.model_type}: its routers read a gate's weight past the module that PEFT replaces, so an adapter would "
            "change nothing.",
            f"remoe apply DELTA {checkpoint.id} --as copy --out DIR, or --as overlay",
        )
    gates = gates_to_write(delta, checkpoint, cast, keep_f32=True)
    names = router_names(checkpoint)
    further = set(gates) - set(names)
    if further:
        raise DeltaError(
            f"this delta changes more than gates, such as {min(further)}, and a PEFT adapter of remoe holds gates and what lies in the same module only.",
            f"remoe apply DELTA {checkpoint.id} --as copy --out DIR, or --as overlay",
        )
    owners = {names[name].rpartition(".")[0] for name in gates}
    return {
        memory: gates[disk] if disk in gates else checkpoint.read(disk)
        for disk, memory in names.items()
        if memory.rpartition(".")[0] in owners
    }


def write_adapter(tensors: dict[str, "torch.Tensor"], folder: Path, base: str, commit: str | None) -> None:
    """The adapter's two files, from what `adapter_tensors` gave. base, commit: where PEFT finds the model by itself.

    Raises RunError where the tensors do not read back.
    """
    from safetensors.torch import save

    modules = {name.rpartition(".")[0] for name in tensors}
    config = {
        "peft_type": "LN_TUNING",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": commit,
        "target_modules": pattern(modules),
        "inference_mode": True,
    }
    keys = {_key(name): tensor.contiguous() for name, tensor in tensors.items()}
    atomic.write(folder / WEIGHTS, save(keys, metadata={"format": "pt"}))
    require_written(folder / WEIGHTS, keys)
    atomic.write(folder / CONFIG, json.dumps(config, indent=1) + "\n")


def holds_gates(folder: Path, delta: Delta) -> bool:
    """Whether the adapter there has every gate of the delta, whatever it calls them in memory; False for a damaged one."""
    try:
        stored = (folder / WEIGHTS).read_bytes()
        found = {stored[info.offset : info.offset + info.nbytes] for info in read_header(folder / WEIGHTS).values()}
    except (OSError, ValueError):
        return False
    return all(stored_bytes(tensor) in found for tensor in delta.tensors.values())


def pattern(modules: Iterable[str]) -> str:
    """A regular expression that matches, as a whole, these modules and no others."""
    layers: dict[str, list[int]] = {}
    for module in modules:
        found = _LAYER.search(module)
        if found is None:
            layers.setdefault(re.escape(module), [])
        else:
            before, after = re.escape(module[: found.start()]), re.escape(module[found.end() :])
            layers.setdefault(f"{before}(%s){after}", []).append(int(found[1]))
    return "|".join(
        form.replace("%s", "|".join(map(str, sorted(numbers)))) if numbers else form
        for form, numbers in sorted(layers.items())
    )


def _key(name: str) -> str:
    module, _, tensor = name.rpartition(".")
    return f"base_model.model.{module}.ln_tuning_layers.{tensor}"

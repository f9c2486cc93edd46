"""remoe pack: a copy of a model's experts in which each takes one read."""

from pathlib import Path
from typing import Any

from remoe_cli import atomic
from remoe_cli.console import progress
from remoe_cli.copies import require_room
from remoe_cli.errors import command, RunError, UsageError
from remoe_cli.families import family_of
from remoe_cli.families.loader import experts_on_disk
from remoe_cli.hub.resolve import fetch_config, resolve
from remoe_cli.offload import pack as store
from remoe_cli.offload.small import GROUPS, INT4, SMALL
from remoe_cli.sizes import show_size

_WORTH_PACKING = 1.05  # reads an expert; a sharded checkpoint has a few experts that lie in two shards


def pack(
    model: str, out: Path, *, experts: str = store.STORED.experts, group: int = 64, force: bool = False
) -> dict[str, Any]:
    """Writes the folder `out`; what is in it. experts: "stored", "int8" or "int4"; group: inputs that share a scale of int4, at
    most. force: as they are stored, also where hardly any expert takes more than one read.

    Raises RemoeError for every mistake; then nothing is written.
    """
    form = _form(model, out, experts, group)
    atomic.require_free(out)
    found = fetch_config(model)
    family_of(found.config, model)
    checkpoint = resolve(found)
    layers = experts_on_disk(checkpoint)
    before, top_k = store.reads_an_expert(layers), layers[0].top_k
    if form == store.STORED and before < _WORTH_PACKING and not force:
        reads = "one read" if before == 1 else f"{before:.4g} reads on average"
        raise RunError(
            f"the experts of {model} need no packing: each takes {reads} as it lies; --force packs them all the same, "
            "--experts int4 in fewer bits.",
            command("decode", model, cache=top_k),
        )
    stored, needed = store.packed_bytes(layers), store.packed_bytes(layers, form)
    require_room(needed, out)
    with progress("pack", needed, in_bytes=True) as bar:
        store.write(layers, checkpoint, out, form=form, on_bytes=bar.update)
    return {
        "folder": str(out),
        "model": checkpoint.id,
        "commit": checkpoint.commit,
        "layers": len(layers),
        "experts": layers[0].n_experts,
        "top_k": top_k,
        "experts_as": form.experts,
        "group": form.group or None,
        "bytes": needed,
        "stored_bytes": stored,
        "reads_an_expert": {"before": before, "after": 1.0},
    }


def _form(model: str, out: Path, experts: str, group: int) -> store.Form:
    if experts not in (allowed := (store.STORED.experts, *SMALL)):
        raise UsageError(
            f"--experts is {', '.join(allowed[:-1])} or {allowed[-1]}, not {experts!r}.",
            command("pack", model, experts=INT4, out=out),
        )
    if group not in GROUPS:
        raise UsageError(
            f"--group is {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]}, not {group}.",
            command("pack", model, experts=INT4, out=out),
        )
    return store.Form(experts, group if experts == INT4 else 0)


def summary(done: dict[str, Any]) -> str:
    """What was packed, and the next command."""
    return "\n".join(
        [
            f"{done['folder']}: {done['layers']} MoE layers of {done['experts']} experts, {_size(done)}; "
            f"an expert takes 1 read, {done['reads_an_expert']['before']:.4g} before",
            f"Next: {command('decode', done['model'], cache=done['top_k'], pack=done['folder'])}",
        ]
    )


def _size(done: dict[str, Any]) -> str:
    if done["experts_as"] == store.STORED.experts:
        return show_size(done["bytes"])
    return f"{show_size(done['bytes'])} in {done['experts_as']}, {show_size(done['stored_bytes'])} as stored"

"""remoe apply: a delta's gates in a loaded model, or in a patched copy of the checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING

from remoe_cli import atomic
from remoe_cli import run as runs
from remoe_cli.delta import BESIDE, Delta, FACTS, GATES, is_delta, patched_copy, put
from remoe_cli.errors import DeltaError, UsageError
from remoe_cli.hub.resolve import fetch_repository, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def find_delta(name: str) -> Delta:
    """A delta folder, a run folder or a run's name under runs/ (its delta/), or a Hub id[@revision].

    Raises DeltaError or HubError.
    """
    folder = Path(name).expanduser()
    for candidate in (folder, folder / "delta", runs.ROOT / name / "delta"):
        if is_delta(candidate):
            return Delta.load(candidate)
    if folder.exists() or (runs.ROOT / name).is_dir():
        raise DeltaError(f"{name} is not a delta: it must hold {GATES} and {FACTS}.", "remoe finetune demo")
    return Delta.load(fetch_delta(name)[0])


def fetch_delta(name: str) -> tuple[Path, str]:
    """The folder of a delta from the Hub, in the cache, and its commit. name: "org/name[@revision]". Raises HubError."""
    return fetch_repository(name, (FACTS, GATES), BESIDE)


def apply(delta: str, base: str, out: Path) -> Path:
    """Writes a full copy of `base` to `out` in which only the gates' bytes differ, and returns it."""
    atomic.require_free(out)  # before a long download, not after it
    found = find_delta(delta)
    return patched_copy(found, resolve(base), out)


def load(base: str, delta: str, **kwargs) -> "PreTrainedModel":
    """See remoe_cli.load."""
    if kwargs.get("trust_remote_code"):
        raise UsageError(
            "remoe loads the native classes of transformers only, so trust_remote_code cannot be used.",
            f"remoe_cli.load({base!r}, {delta!r}) without it",
        )
    from transformers import AutoModelForCausalLM

    from remoe_cli.families import family_of
    from remoe_cli.families.loader import in_memory, quiet

    found = find_delta(delta)
    checkpoint = resolve(base)
    family_of(checkpoint.config, base)
    already = found.is_applied(checkpoint)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, **{"dtype": "auto", **kwargs})
    if not already:
        put(model, in_memory(model, checkpoint, found.tensors))
    return model.eval()

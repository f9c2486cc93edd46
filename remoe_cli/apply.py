"""remoe apply: a delta's gates in a loaded model, or written in the form that a runtime takes."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from remoe_cli import atomic
from remoe_cli import run as runs
from remoe_cli.console import note
from remoe_cli.delta import BESIDE, Delta, FACTS, FORMS, GATES, is_delta, put
from remoe_cli.delta.fingerprint import quantised_note
from remoe_cli.errors import DeltaError, UsageError
from remoe_cli.hub.resolve import fetch_repository, resolve

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from remoe_cli.gguf import Patched


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


def fetch_delta(name: str, further: Sequence[str] = ()) -> tuple[Path, str]:
    """The folder of a delta from the Hub, in the cache, and its commit. name: "org/name[@revision]". further: patterns of files
    that have to be there too. Raises HubError."""
    return fetch_repository(name, (FACTS, GATES), BESIDE, further)


def apply(delta: str, base: str, out: Path, form: str = "copy", cast: bool = False) -> Path:
    """Writes `base` with the delta's gates to the folder `out`, and returns it. form: one of FORMS.

    cast: the gates are rounded to what the base stores, also where the delta holds them in float32. Says on stderr what a
    reader of the result should know. Raises RemoeError; then nothing is written.
    """
    if form not in FORMS:
        raise UsageError(
            f"there is no form {form!r} of a model folder; allowed: {', '.join(FORMS)}.", "remoe apply --help"
        )
    atomic.require_free(out)  # before a long download, not after it
    found, checkpoint = find_delta(delta), resolve(base)
    written = FORMS[form](found, checkpoint, out, cast)
    if quantised := quantised_note(checkpoint):
        note(quantised)
    if found.is_float32 and (cast or form == "copy"):
        note("Note: the delta holds gates in float32; they were cast to what the base stores")
    return written


def apply_gguf(delta: str, file: Path, out: Path | None, cast: bool = False) -> "Patched":
    """The delta's gates in a copy of a GGUF, or with out=None in the file itself, with a journal beside it for undo.

    file: any part of a split one. Raises RemoeError; then nothing is written.
    """
    from remoe_cli import gguf

    found = find_delta(delta)
    return gguf.patch_in_place(found, file, cast) if out is None else gguf.patch_copy(found, file, out, cast)


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

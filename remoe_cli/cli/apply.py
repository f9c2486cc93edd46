"""The command `remoe apply`. Heavy imports stay inside, so that --help is quick."""

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from remoe_cli.errors import command, UsageError

FORMS = ("copy", "overlay", "peft", "gguf")
_DONE = {"copy": "Patched checkpoint", "overlay": "Overlay", "peft": "PEFT adapter"}


def apply(
    delta: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(help="Delta folder, run folder or name, or Hub id (with @revision). Left out with --undo."),
    ] = None,
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            help="The base: Hub id (with @revision), local folder, `demo`, or a .gguf file (any part of a split one)."
        ),
    ] = None,
    form: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--as", metavar="FORM", help=f"{', '.join(FORMS)}; by default copy, of a .gguf file gguf."),
    ] = None,
    out: Annotated[Optional[Path], typer.Option(help="Folder (of a GGUF: file) to write; must not exist yet.")] = None,  # noqa: UP045
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Patch the GGUF itself; what it held is kept for --undo.")
    ] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Give a GGUF that was patched in place its own gates back.")
    ] = False,
    cast: Annotated[
        bool, typer.Option("--cast", help="Round gates that are kept in float32 to what the base stores.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")] = False,
) -> None:
    """Write BASE with the gates of DELTA, in the form that a runtime takes; BASE itself stays as it is (but for --in-place).

    copy: a checkpoint that every loader reads. overlay: links to the base and one small file. peft: an adapter.
    gguf: a patched GGUF. `remoe apply --undo FILE.gguf` takes a patch in place back.
    """
    from remoe_cli.console import data as print_data

    if undo:
        done = _undo(delta, base, out=out, form=form, others=in_place or cast)
    elif delta is None or base is None:
        raise UsageError("apply needs a DELTA and a BASE.", "remoe apply DELTA BASE --out DIR")
    elif (form or "gguf") == "gguf" and _is_gguf(base):
        done = _gguf(delta, base, out, in_place, cast)
    else:
        done = _folder(delta, base, out, form or "copy", in_place, cast)
    print_data(json.dumps(done) if as_json else _summary(done))


def _folder(delta: str, base: str, out: Path | None, form: str, in_place: bool, cast: bool) -> dict[str, Any]:
    words = ("apply", delta, base)
    if form not in FORMS:
        raise UsageError(f"there is no form {form!r}; allowed: {', '.join(FORMS)}.", command(*words, out="DIR"))
    if form == "gguf":
        raise UsageError(
            f"--as gguf takes a .gguf file as BASE, not {base}.", command(*words[:2], "FILE.gguf", out="NEW.gguf")
        )
    if _is_gguf(base):
        raise UsageError(
            f"a .gguf file can only be written --as gguf, not --as {form}.", command(*words, out="NEW.gguf")
        )
    if in_place or out is None:
        what = "--in-place is for a .gguf file" if in_place else f"--as {form} needs --out, the folder to write"
        raise UsageError(f"{what}.", command(*words, **{"as": form}, out="DIR"))
    from remoe_cli import apply as verb
    from remoe_cli.delta.forms import APPLIED

    folder = verb.apply(delta, base, out, form, cast)
    return {**json.loads((folder / APPLIED).read_text()), "folder": str(folder)}


def _gguf(delta: str, base: str, out: Path | None, in_place: bool, cast: bool) -> dict[str, Any]:
    if in_place == (out is not None):
        raise UsageError(
            "a .gguf file is patched to a copy (--out NEW.gguf) or --in-place, one of the two.",
            command("apply", delta, base, out="NEW.gguf"),
        )
    from remoe_cli import apply as verb

    return _patched(verb.apply_gguf(delta, Path(base).expanduser(), out, cast))


def _undo(delta: str | None, base: str | None, *, out: Path | None, form: str | None, others: bool) -> dict[str, Any]:
    file = base or delta
    if file is None or not _is_gguf(file) or out is not None or others or form not in (None, "gguf"):
        raise UsageError(
            "--undo takes the .gguf file that was patched in place, and nothing else (of every other form the folder is to "
            "be removed: the base was never changed).",
            "remoe apply --undo FILE.gguf",
        )
    from remoe_cli import gguf

    return _patched(gguf.undo(Path(file).expanduser()))


def _patched(done: Any) -> dict[str, Any]:
    return {**asdict(done), "form": "gguf", "files": [str(file) for file in done.files]}


def _summary(done: dict[str, Any]) -> str:
    if done["form"] == "gguf":
        return (
            f"{done['files'][0]}: {done['state']}, {done['gates']} gates, {done['written_bytes']:,} bytes written in "
            f"{done['seconds']:.2f} s"
        )
    folder = shlex.quote(done["folder"])
    following = {
        "copy": f"remoe decode {folder} --cache 8, or any loader",
        "overlay": f"vllm serve {folder}, or transformers; the base's own files have to stay where they are",
        "peft": f"peft.PeftModel.from_pretrained(model, {done['folder']!r})",
    }
    return f"{_DONE[done['form']]}: {done['folder']}\nNext: {following[done['form']]}"


def _is_gguf(name: str) -> bool:
    return name.lower().endswith(".gguf")

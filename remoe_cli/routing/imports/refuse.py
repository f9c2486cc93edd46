"""How the readers refuse a file, and the command that mends it."""

from pathlib import Path

import numpy as np

from remoe_cli.errors import command, TraceError

OUT = "-o t.trace"  # stands for the user's own -o, which readers do not know


def again(path: Path, **options: object) -> str:
    """The import of this file, with these options alone."""
    return f"{command('trace', 'import', path, **options)} {OUT}"


def bad(path: Path, why: str, hint: str) -> TraceError:
    return TraceError(f"{path} cannot be imported: {why}.", hint)


def check_experts(path: Path, experts: np.ndarray, asked: int | None, own: int | None) -> None:
    """Refuses --experts (asked) that are fewer than the ids need. own: how many the file itself says, None if it does not."""
    if asked is None or not experts.size or experts.max() < asked:
        return
    most = int(experts.max())
    enough = None if own is not None and own > most else 1 << most.bit_length()
    raise bad(path, f"it names expert {most}, so --experts {asked} is too few", again(path, experts=enough))

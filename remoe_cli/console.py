"""What a person reads while work goes on: notes and progress, on stderr only."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def note(text: str) -> None:
    """One line for a person; scripts read stdout and never see it."""
    _stderr.print(text, markup=False)


class Bar:
    """Progress of one job. On a terminal a live bar; in a log a line at most every `every` seconds."""

    def __init__(self, title: str, total: int, every: float = 5.0) -> None:
        self._title, self._total, self._every = title, total, every
        self._begin = self._said = time.monotonic()
        self._live = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[detail]}"), console=_stderr,
        ) if _stderr.is_terminal else None  # fmt: skip
        self._task = self._live.add_task(title, total=total, detail="") if self._live else None

    def update(self, done: int, detail: str = "") -> None:
        """done: units finished of `total`; detail: what else to show, such as losses or a rate."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, detail=detail)
            return
        now = time.monotonic()
        if done in (1, self._total) or now - self._said >= self._every:
            self._said = now
            eta = (now - self._begin) / max(done, 1) * (self._total - done)
            note(f"{self._title} {done}/{self._total}  eta {_clock(eta)}  {detail}".rstrip())


@contextmanager
def progress(title: str, total: int) -> Iterator[Bar]:
    bar = Bar(title, total)
    if bar._live is None:
        yield bar
        return
    with bar._live:
        yield bar


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes}:{rest:02d}"


def data(text: str) -> None:
    """What a script may read: stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()

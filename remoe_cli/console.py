"""What a person reads while work goes on: notes and progress, on stderr only."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_stderr = Console(stderr=True, highlight=False, soft_wrap=True)


def mute() -> None:
    """Nothing but errors is said from now on, on either stream."""
    global _stderr
    _stderr = Console(file=open(os.devnull, "w"), force_terminal=False)  # noqa: SIM115  until the process ends
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def note(text: str) -> None:
    """One line for a person; scripts read stdout and never see it."""
    _stderr.print(text, markup=False)


def live() -> Console | None:
    """Where lines can be redrawn while work goes on: stderr, where it is a terminal that can."""
    return _stderr if _stderr.is_terminal and not _stderr.is_dumb_terminal else None


class Bar:
    """Progress of one job. On a terminal a live bar; in a log a line at most every `every` seconds.

    in_bytes: the units are bytes, so a rate is shown too. already: units that were finished before.
    """

    def __init__(self, title: str, total: int, every: float = 5.0, in_bytes: bool = False, already: int = 0) -> None:
        self._title, self._total, self._every, self._in_bytes = title, total, every, in_bytes
        self._already = already
        self._begin = self._said = time.monotonic()
        self._shown = 0
        self._live = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(),
            *([DownloadColumn(), TransferSpeedColumn()] if in_bytes else [MofNCompleteColumn()]), TimeElapsedColumn(),
            TextColumn("eta"), TimeRemainingColumn(), TextColumn("{task.fields[detail]}", markup=False), console=_stderr,
        ) if _stderr.is_terminal else None  # fmt: skip
        self._task = self._live.add_task(title, total=total, completed=already, detail="") if self._live else None

    def update(self, done: int, detail: str = "") -> None:
        """done: units finished of `total`; detail: what else to show, such as losses or a rate."""
        if self._live is not None and self._task is not None:
            self._live.update(self._task, completed=done, detail=detail)
            return
        now = time.monotonic()
        if (done in (1, self._total) and done != self._shown) or now - self._said >= self._every:
            self._said, self._shown = now, done
            eta = (now - self._begin) / max(done - self._already, 1) * (self._total - done)
            count, rate = f"{done}/{self._total}", ""
            if self._in_bytes:
                count = f"{done / 1e9:.2f}/{self._total / 1e9:.2f} GB"
                rate = f"{done / 1e6 / max(now - self._begin, 1e-3):.1f} MB/s"
            note(f"{self._title} {count}  eta {_clock(eta) if done else '?'}  {rate}{detail}".rstrip())


@contextmanager
def progress(title: str, total: int, in_bytes: bool = False, already: int = 0) -> Iterator[Bar]:
    bar = Bar(title, total, in_bytes=in_bytes, already=already)
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

"""What a person reads while work goes on: notes and progress, on stderr only."""

import os
import shutil
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
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_NARROW = 70  # columns
_usual = Console(stderr=True, highlight=False, soft_wrap=True)
_silent = Console(quiet=True, force_terminal=False)
_stderr = _usual
_began: float | None = None  # with --verbose


def say_as_usual() -> None:
    """Notes and progress, without details."""
    global _stderr, _began
    _began = None
    if _stderr is _silent:
        _stderr = _usual


def say_less() -> None:
    """--quiet: no notes and no progress from now on; errors and data only."""
    global _stderr
    _stderr = _silent


def say_more() -> None:
    """--verbose: notes carry the seconds since now, details are said, errors come with where they were raised."""
    global _began
    _began = time.monotonic()


def verbose() -> bool:
    return _began is not None


def mute() -> None:
    """Nothing but errors is said from now on, on either stream."""
    global _stderr
    _stderr = _silent
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def note(text: str) -> None:
    """One line for a person; scripts read stdout and never see it."""
    _stderr.print(text if _began is None else f"{time.monotonic() - _began:7.2f} s  {text}", markup=False)


def detail(text: str) -> None:
    """A note that is said with --verbose only."""
    if _began is not None:
        note(text)


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
        self._live = Progress(*self._columns(), console=_stderr) if _stderr.is_terminal else None
        shown = title if _stderr.width >= _NARROW else title[: max(10, _stderr.width - 20)]
        self._task = self._live.add_task(shown, total=total, completed=already, detail="") if self._live else None

    def _columns(self) -> list[ProgressColumn | str]:
        """On a narrow terminal the figures alone."""
        title, detail = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[detail]"))
        count: list[ProgressColumn] = (
            [DownloadColumn(), TransferSpeedColumn()] if self._in_bytes else [MofNCompleteColumn()]
        )
        if _stderr.width < _NARROW:
            return [title, count[0], TimeRemainingColumn(compact=True)]
        return [title, BarColumn(), *count, TimeElapsedColumn(), "eta", TimeRemainingColumn(), detail]

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


def width(without: int = 120) -> int:
    """Columns for tables: the terminal's ($COLUMNS where that is set), or so many in a pipe or a file."""
    return shutil.get_terminal_size((without, 24)).columns


def data(text: str) -> None:
    """What a script may read: stdout."""
    sys.stdout.write(text if text.endswith("\n") else text + "\n")
    sys.stdout.flush()

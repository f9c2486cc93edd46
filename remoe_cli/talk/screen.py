"""Text on stdout as it comes and, on a terminal, a line of figures below it; in a log nothing but the text."""

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from remoe_cli import console

_PER_SECOND = 8  # redraws


class Screen:
    """`say` what comes, `tell` how it goes; a context manager, after which the text ends with a newline.

    Figures are shown while it runs where stderr is a terminal. Where stdout is one too, the line that is being written is part of
    what is redrawn, and finished lines stand above it. What a terminal would obey is shown as a mark there.
    """

    def __init__(self) -> None:
        self._line, self._status = "", ""
        self._on_terminal = sys.stdout.isatty()
        notes = console.live()
        self._redrawn = Console(file=sys.stdout, highlight=False) if notes is not None and self._on_terminal else None
        where = self._redrawn or notes
        self._live = None if where is None else Live(
            console=where, transient=True, refresh_per_second=_PER_SECOND, redirect_stdout=False, redirect_stderr=False,
            get_renderable=self._shown,
        )  # fmt: skip

    def __enter__(self) -> "Screen":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._line:
            sys.stdout.write(f"{self._line if self._redrawn else ''}\n")
        sys.stdout.flush()

    def say(self, piece: str) -> None:
        if not piece:
            return
        if self._on_terminal:
            piece = "".join(one if one.isprintable() or one in "\n\t" else "\ufffd" for one in piece)
        *lines, self._line = (self._line + piece).split("\n")
        if self._redrawn is None:
            sys.stdout.write(piece)
            sys.stdout.flush()
        elif lines:
            self._redrawn.print(Text("\n".join(lines)), soft_wrap=True)

    def tell(self, figures: str) -> None:
        self._status = figures

    def _shown(self) -> Group | Text:
        status = Text(self._status, style="dim", no_wrap=True, overflow="ellipsis")
        if self._redrawn is None or not self._line:
            return status
        room = self._redrawn.width * max(1, self._redrawn.height - 2)  # of a longer line the end
        return Group(Text(self._line[-room:], overflow="fold"), status)

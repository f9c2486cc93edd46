"""Running remoe's command line in this process: fast, and with the same exit codes and streams."""

import sys
from typing import NamedTuple

import pytest

from remoe_cli.__main__ import main


class Ran(NamedTuple):
    code: int
    out: str
    err: str


class Remoe:
    def __init__(self, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
        self._capsys, self._monkeypatch = capsys, monkeypatch

    def __call__(self, *arguments: object) -> Ran:
        self._monkeypatch.setattr(sys, "argv", ["remoe", *map(str, arguments)])
        self._capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Ran(code, *self._capsys.readouterr())

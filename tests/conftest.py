"""Where ../shared lies, and a list of the goldens that were skipped without it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("ci", derandomize=True)  # a red run must be red again
if os.environ.get("CI"):
    settings.load_profile("ci")

ABSENT = "golden skipped: ../shared absent"
SHARED = Path(os.environ.get("REMOE_SHARED") or Path(__file__).resolve().parents[2] / "shared")


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """shared("data/traces/esft/intent.npz") is that path in the shared folder; where it isn't there, the test skips."""

    def find(what: str) -> Path:
        path = SHARED / what
        if not path.exists():
            pytest.skip(f"{ABSENT}: {what}")
        return path

    return find


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [
        (report.nodeid, report.longrepr[2].removeprefix("Skipped: "))
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and ABSENT in report.longrepr[2]
    ]
    if skipped:
        terminalreporter.section(f"{len(skipped)} goldens skipped: {SHARED} is absent or incomplete")
        for nodeid, reason in sorted(skipped):
            terminalreporter.write_line(f"{nodeid}  ({reason})")

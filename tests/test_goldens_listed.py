"""A golden that is skipped because ../shared is absent is named at the end of the run, under xdist too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent / "test_replay_goldens.py"


@pytest.mark.parametrize("workers", ["0", "1"])
def test_skipped_goldens_are_listed(tmp_path, workers):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", workers, "-p", "no:cacheprovider", "-k", "esft_eor", str(GOLDENS)],
        env={**os.environ, "REMOE_SHARED": str(tmp_path / "absent")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 goldens skipped" in done.stdout
    for name in ("intent", "summary"):
        reason = f"golden skipped: ../shared absent: data/traces/esft/{name}.npz"
        assert f"test_replay_goldens.py::test_esft_eor[{name}]  ({reason})" in done.stdout

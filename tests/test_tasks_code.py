"""Code that a model wrote: what passes, and what its limits stop."""

import os
import time

import pytest

from remoe_cli.errors import UsageError
from remoe_cli.measure import run_code
from remoe_cli.measure.run_code import check_limits, passes


@pytest.mark.parametrize(
    "program",
    [
        "assert sorted([2, 1]) == [1, 2]",
        "print('what it says is dropped' * 100000)",
        "import sys\nsys.stdout.close()",
        "if __name__ == '__main__':\n    x = 'é'\nassert x == 'é'",
        "import os\nassert os.listdir('.') == [] and 'SECRET' not in os.environ and 'HOME' not in os.environ",
    ],
)
def test_what_runs_to_its_end_passes(program, monkeypatch):
    monkeypatch.setenv("SECRET", "token")
    assert passes(program)


@pytest.mark.parametrize(
    "program",
    [
        "assert 1 == 2",
        "def f(:",
        "raise SystemExit(0)",
        "import sys\nsys.exit(0)",
        "import os\nos._exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "x = bytearray(1 << 31)",
        "open('large', 'wb').write(bytes(1 << 25))",
    ],
)
def test_what_fails_or_leaves_early_does_not(program):
    assert not passes(program)


def test_time_is_limited_and_nothing_goes_on_running(tmp_path):
    begin = time.monotonic()
    assert not passes("while True:\n    pass", seconds=0.5)
    marker = tmp_path / "it-went-on"
    child = f"import time\ntime.sleep(1)\nopen({str(marker)!r}, 'w')"
    assert passes(f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])")
    time.sleep(1.5)
    assert not marker.exists() and time.monotonic() - begin < 20


def test_where_nothing_can_be_limited_no_code_is_run(monkeypatch):
    monkeypatch.setattr(run_code, "_START", "import no_such_module")
    with pytest.raises(UsageError, match="does not grant"):
        check_limits()


def test_the_folder_it_ran_in_is_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(run_code.tempfile, "tempdir", str(tmp_path))
    assert passes("open('left', 'w').write('x')")
    assert os.listdir(tmp_path) == []

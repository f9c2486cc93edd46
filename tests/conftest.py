"""Where ../shared lies, and a list of the goldens that were skipped without it."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import error_sites
import pytest
import tiny_models
import torch
from commands import make_model, make_run, make_texts, Remoe
from hub_client import TOKEN
from hypothesis import settings
from loopback_hub import Account, LoopbackHub

from remoe_cli.hub.checkpoint import Checkpoint

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


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """(model_type, dtype) -> a checkpoint folder, made once; tests that write into it copy it first."""
    made: dict = {}

    def folder(model_type: str, dtype: torch.dtype = torch.float32) -> Path:
        if (model_type, dtype) not in made:
            made[model_type, dtype] = tiny_models.make(model_type, tmp_path_factory.mktemp("tiny"), dtype)
        return made[model_type, dtype]

    return folder


@pytest.fixture(
    params=[(family, dtype) for family in tiny_models.MODEL_TYPES for dtype in (torch.float32, torch.bfloat16)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def checkpoint(request, folders) -> Checkpoint:
    """Each family in each dtype."""
    return Checkpoint.open(folders(*request.param))


@pytest.fixture(scope="module")
def one_thread():
    """Computes on one thread: products round alike however many cores there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def remoe(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("HF_TOKEN", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("REMOE_CONFIG", os.devnull)
    return Remoe(capsys, monkeypatch)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A folder with a model, texts and a run of 2 steps; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("made")
    make_run(folder)
    return folder


@pytest.fixture
def run(made, remoe):
    """A copy in the working folder, which a test may change."""
    return Path(shutil.copytree(made / "run", "run"))


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model")


@pytest.fixture
def texts(tmp_path):
    return make_texts(tmp_path / "texts.jsonl")


@pytest.fixture
def hub():
    with LoopbackHub() as server:
        server.accounts[TOKEN] = Account("ada", granted=("org/gated-open",))
        yield server


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


def pytest_configure() -> None:
    """A shell's background job starts with Ctrl-C ignored, and Python then raises no KeyboardInterrupt; tests send it."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    error_sites.folder()
    error_sites.record()
    recorder = str(Path(__file__).parent / "recorder")
    if recorder not in (paths := os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        os.environ["PYTHONPATH"] = os.pathsep.join([recorder, *filter(None, paths)])


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """After a whole suite that passed: an error that no test provoked, and that is not listed, makes it fail."""
    config = session.config
    if hasattr(config, "workerinput"):
        return
    whole = config.args_source == pytest.Config.ArgsSource.TESTPATHS and not (
        config.option.keyword or config.option.markexpr
    )
    if whole and not exitstatus:
        unseen, listed = {*error_sites.unseen(error_sites.folder())}, {*error_sites.listed()}
        if os.environ.get("REMOE_ERRORS") == "shrink":
            error_sites.write(sorted(unseen & listed))
        if missing := sorted(unseen - listed):
            print(f"\n{len(missing)} errors that no test provokes (tests/error_sites.py):", *missing, sep="\n  ")
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
    error_sites.forget()


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

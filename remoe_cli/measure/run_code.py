"""Runs a program that a model wrote, in a process of its own with limits. A limit, no sandbox: the program may do what its user may."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

from remoe_cli.errors import UsageError

SECONDS = 10.0
MEMORY = 1 << 30  # bytes of address space
_FILE = 1 << 24  # bytes of the largest file that it may write
# set by the child itself: between fork and exec of a process with threads nothing else is safe
_START = """
import os, resource, sys
for limit, most in ((resource.RLIMIT_AS, {memory}), (resource.RLIMIT_CPU, {cpu}), (resource.RLIMIT_FSIZE, {file}), (resource.RLIMIT_CORE, 0)):
    resource.setrlimit(limit, (most, most))
said = os.fdopen(os.dup(1), "w")
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
exec(compile(sys.stdin.read(), "program", "exec"), {{"__name__": "__main__"}})
said.write({word!r})
said.flush()
"""


def passes(program: str, seconds: float = SECONDS, memory: int = MEMORY) -> bool:
    """Whether the program ran to its end: no error, no exit before it, within the seconds (of the clock) and bytes.

    It runs in an empty folder that is gone afterwards, with none of this process's environment, and what it left running is
    killed. What it prints is dropped. A way out such as sys.exit(0) or os._exit(0) is no end: after the last line a word is said
    that only this process chose.
    """
    word = secrets.token_hex(16)
    start = _START.format(memory=memory, cpu=int(seconds) + 1, file=_FILE, word=word)
    with tempfile.TemporaryDirectory(prefix="remoe-code-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", start], cwd=folder, env={"PATH": os.defpath, "PYTHONHASHSEED": "0"},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(program.encode("utf-8", "replace"), timeout=seconds)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.communicate()
    return process.returncode == 0 and said.endswith(word.encode())


def check_limits() -> None:
    """Raises UsageError where a program can't be limited here, as on systems without setrlimit: every one would then fail."""
    if not passes("assert True", seconds=60):
        raise UsageError(
            "--run-code needs time and memory limits for the code it runs, which this system does not grant.",
            "the same command without humaneval",
        )

"""Runs the commands of docs/quickstart.md in its order, in an empty folder, and puts what each printed below it.

    python docs/make_quickstart.py

A ```text block that follows a command is what that command wrote to stdout; of a command that writes nothing there, the last
lines of stderr. About 8 minutes on two idle cores.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

PAGE = Path(__file__).with_name("quickstart.md")
BLOCK = re.compile(r"(?m)^    remoe (?P<words>.+)\n\n```text\n(?P<output>(?:.*\n)*?)```\n")
LAST = 8  # lines of stderr


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        PAGE.write_text(BLOCK.sub(lambda found: rewritten(found, folder), PAGE.read_text()))


def rewritten(found: re.Match, folder: str) -> str:
    words = found["words"]
    print(f"remoe {words}", flush=True)
    ran = subprocess.run(
        [sys.executable, "-m", "remoe_cli", *shlex.split(words)],
        cwd=folder,
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
    )
    if ran.returncode:
        sys.exit(ran.stderr)
    return f"    remoe {words}\n\n```text\n{output(ran.stdout, ran.stderr)}\n```\n"


def output(stdout: str, stderr: str) -> str:
    lines = stdout.rstrip().splitlines() or stderr.rstrip().splitlines()[-LAST:]
    return "\n".join(line.rstrip() for line in lines)


if __name__ == "__main__":
    main()

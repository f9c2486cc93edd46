"""A command on a terminal of a given size: what it writes to it, in a process of its own."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path


def on_a_terminal(arguments: list, columns: int, cwd: Path, **environment: str) -> tuple[int, str]:
    """(exit code, everything that was written), standard output and error together as a person sees them."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {
        name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR")
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "remoe_cli", *map(str, arguments)],
        cwd=cwd, env={**clean, "TERM": "xterm-256color", **environment}, stdin=follower, stdout=follower, stderr=follower,
    )  # fmt: skip
    os.close(follower)
    written, end = b"", time.monotonic() + 120
    while time.monotonic() < end:
        if select.select([leader], [], [], 0.2)[0]:
            try:
                piece = os.read(leader, 65536)
            except OSError:  # the other end is closed
                break
            if not piece:
                break
            written += piece
    os.close(leader)
    return process.wait(10), written.decode(errors="replace").replace("\r\n", "\n")


def colours(text: str) -> list[str]:
    """The colours that escape sequences ask for; bold and the like are none."""
    asked = [part for found in re.findall(r"\x1b\[([0-9;]*)m", text) for part in [found] if found]
    return [one for one in asked if re.search(r"(^|;)(3[0-8]|4[0-8]|9[0-7]|10[0-7])(;|$)", one)]


def plain(text: str) -> str:
    """Without escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)

"""Ctrl-C where Python would drop it."""

import subprocess
import sys

import pytest

CODE = """
import os, signal, time
import remoe_cli.__main__ as command

class Loud:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.001)

def work():
    Loud()
    time.sleep({seconds})

command._run = work
command.main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_ctrl_c_in_a_destructor_is_not_lost():
    ran = subprocess.run([sys.executable, "-c", CODE.format(seconds=30)], capture_output=True, text=True, timeout=25)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "Interrupted.\n")

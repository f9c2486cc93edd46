"""A process with the real huggingface_hub that evaluates calls, one after another, against a loopback Hub."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from loopback_hub import LoopbackHub

TOKEN = "hf_a-secret-of-this-test"
SCRIPT = """
import json, resource, sys
from pathlib import Path
from huggingface_hub import hf_hub_download
from remoe_cli.errors import RemoeError
from remoe_cli.hub.resolve import fetch_config, fetch_repository, resolve
from remoe_cli.hub.upload import push_folder, target_of
for call in sys.stdin:
    try:
        value = eval(call)
        print(json.dumps(vars(value) if hasattr(value, "__dataclass_fields__") else value, default=str), flush=True)
    except RemoeError as error:
        print(json.dumps({"error": type(error).__name__, "message": error.message, "hint": error.hint}), flush=True)
"""


class Client:
    """client(call) is what the call returned (a dataclass as its fields), or its error's words."""

    def __init__(self, hub: LoopbackHub, home: Path, token: str | None = None, **env: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115  open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            env={**clean, **hub.environment(home, token), **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def __call__(self, call: str):
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(call + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self.stderr()
        assert "hf_" not in answer, "a token was shown"
        return json.loads(answer)

    def stderr(self) -> str:
        self._stderr.seek(0)
        text = self._stderr.read()
        assert "hf_" not in text, "a token was shown"
        return text

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
        self._stderr.close()

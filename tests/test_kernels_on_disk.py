"""Compiled kernels: kept on disk, made anew where they can't be kept, and never served for a policy that has changed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

TRACE = """
import numpy as np
from remoe_cli.cache import POLICIES, replay
from remoe_cli.cache.curve import lru_curve
from remoe_cli.cache.replay import prepare
from remoe_cli.routing import RoutingTrace

experts = np.argsort(np.random.default_rng(0).random((60, 2, 8)), axis=-1)[..., :2]
trace = RoutingTrace(experts, np.array([0, 25, 60]), np.zeros(60, bool), 8)
"""


def run(code: str, folder: Path, path: Path | None = None) -> str:
    env = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(path or "")}
    done = subprocess.run(
        [sys.executable, "-c", TRACE + textwrap.dedent(code)], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_kernel_is_compiled_once(tmp_path):
    code = "print(prepare('lfru') is None, replay(trace, 'lfru', 3).hits)"
    first, second = run(code, tmp_path).split(), run(code, tmp_path).split()
    assert first[0] == "False" and second[0] == "True" and first[1] == second[1]


def test_without_a_folder_to_write_to_it_compiles_each_time(tmp_path):
    """numba finds no locator, as in a read-only installation of a user without a home."""
    code = """
        print(prepare("lru") is not None, prepare("belady") is not None, replay(trace, "lru", 3).hits,
              replay(trace, "belady", 3).hits, lru_curve(trace)[:, 3].sum())
    """
    nowhere = "from numba.core import caching\ncaching.CompileResultCacheImpl._locator_classes = []\n"
    patched = tmp_path / "sitecustomize.py"
    patched.write_text(nowhere)
    compiled, foreseen, *counts = run(code, tmp_path / "unused", tmp_path).split()
    assert compiled == foreseen == "True"
    assert counts == run(code, tmp_path / "cache").split()[2:] and counts[0] == counts[2]
    assert not (tmp_path / "unused").exists()


@pytest.mark.parametrize("cap", [1, 3])
def test_a_changed_policy_is_compiled_anew(tmp_path, cap):
    """The same module with another text: what lies on disk is not taken for it."""
    policy = tmp_path / "capped.py"
    code = """
        import capped
        POLICIES["capped"] = capped.POLICY
        plain, fast = (replay(trace, "capped", 3, engine=engine) for engine in ("python", "compiled"))
        print(prepare("capped") is not None, plain.hits == fast.hits, fast.hits)
    """
    outs = []
    for most in (2, cap, cap):
        policy.write_text(
            "from remoe_cli.cache.policy import Policy\n"
            f"def touch(m, expert, hit, value):\n    m.count[expert] = min(m.count[expert] + 1, {most})\n"
            "def key(m, expert):\n    return float(m.count[expert])\n"
            "POLICY = Policy(title='capped', source='here', touch=touch, key=key)\n"
        )
        outs.append(run(code, tmp_path / "cache", tmp_path).split())
    assert [out[0] for out in outs] == ["True", "True", "False"]
    assert {out[1] for out in outs} == {"True"} and outs[1] == ["True", *outs[2][1:]]
    assert np.unique([out[2] for out in outs]).size == 2  # the cap matters here


def test_a_changed_helper_of_a_policy_is_compiled_anew(tmp_path):
    """What a policy imports is part of its text."""
    (tmp_path / "signed.py").write_text(
        "from helping import sign\nfrom remoe_cli.cache.policy import Policy\n"
        "def key(m, expert):\n    return sign(float(m.last[expert]))\n"
        "POLICY = Policy(title='signed', source='here', key=key)\n"
    )
    code = """
        import signed
        POLICIES["signed"] = signed.POLICY
        plain, fast = (replay(trace, "signed", 3, engine=engine).hits for engine in ("python", "compiled"))
        print(plain, fast)
    """
    outs = []
    for sign in ("", "-"):
        helper = f"from numba.extending import register_jitable\n@register_jitable\ndef sign(x):\n    return {sign}x\n"
        (tmp_path / "helping.py").write_text(helper)
        outs.append(run(code, tmp_path / "cache", tmp_path).split())
    assert outs[0][0] == outs[0][1] != outs[1][0] == outs[1][1]

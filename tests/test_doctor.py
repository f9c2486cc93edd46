"""`remoe doctor`: every line says what was found and what to do; nothing that fails hides the rest."""

import json
import os
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
from hub_client import TOKEN

from remoe_cli import doctor
from remoe_cli.hub import failures
from remoe_cli.memory import Room
from remoe_cli.offload import store


def examined(home: Path, *arguments: object, **environment: str):
    """(exit code, lines by name, all that was printed) of the real command in a process of its own."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "REMOE_"))}
    home.mkdir(exist_ok=True)
    ran = subprocess.run(
        [sys.executable, "-m", "remoe_cli", "doctor", "--json", "--folder", str(home), *map(str, arguments)],
        env={**clean, "HF_HOME": str(home), "XDG_CONFIG_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in ran.stderr, ran.stderr
    return ran.returncode, {row["name"]: row for row in json.loads(ran.stdout)}, ran.stdout + ran.stderr


def test_a_good_machine_with_a_hub_and_a_token(hub, home):
    begin = time.monotonic()
    code, lines, said = examined(home, **hub.environment(home, TOKEN))
    assert time.monotonic() - begin < 30, "15 s on a machine that is doing nothing else"
    assert code == 0 and all(row["status"] in ("ok", "warn") for row in lines.values()), lines
    assert lines["Hub"] == {"name": "Hub", "status": "ok", "text": f"{hub.url} answers", "next": ""}
    assert lines["token"]["text"] == "accepted, of ada"
    assert TOKEN not in said and TOKEN.removeprefix("hf_") not in said
    assert "torch" in lines["packages"]["text"] and "cores" in lines["device"]["text"]
    assert str(home) in lines["disk"]["text"] and "/s" in lines["disk"]["text"]
    assert "none set" in lines["settings"]["text"]
    assert not [path for path in home.iterdir() if "probe" in path.name], "the measured file stayed"


def test_a_token_that_is_not_accepted_fails_and_is_not_shown(hub, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_wrong")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    reached, token = doctor._hub()
    assert reached.status == "ok" and token.status == "fail" and token.next == "hf auth login --force"
    assert "hf_wrong" not in str(token)


def test_settings_that_cannot_be_read_are_a_line_and_the_exit_code_says_so(remoe, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_disk", lambda _folder: iter([]))
    monkeypatch.setattr(doctor, "_hub", lambda: [doctor.Line("Hub", "ok", "")])
    (path := tmp_path / "mine.toml").write_text("[eval]\ncache = 6\n")
    monkeypatch.setenv("REMOE_CONFIG", str(path))
    ran = remoe("doctor", "--json")
    assert ran.code == 0 and json.loads(ran.out)[-1]["text"] == f"{path}: eval --cache 6"
    path.write_text("[eval]\nchache = 6\n")
    ran = remoe("doctor")
    assert ran.code == 1 and "did you mean cache?" in ran.out and ran.out.splitlines()[-1].startswith("1 fail")


def test_offline_is_no_failure(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    hub, token = doctor._hub()
    assert hub.status == token.status == "warn" and "HF_HUB_OFFLINE" in hub.next and token.next == "hf auth login"


def test_a_hub_that_does_not_answer_is_no_failure(monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(doctor, "endpoint", lambda: "http://127.0.0.1:9")
    hub, _ = doctor._hub()
    assert hub.status == "warn" and "127.0.0.1:9" in hub.text and "network" in hub.next
    monkeypatch.setattr(doctor, "PATIENCE", 0.05)
    stuck = doctor._aside(lambda: time.sleep(1) or [])
    assert [line.status for line in stuck()] == ["warn"]


def test_packages_that_are_absent_or_too_old(monkeypatch):
    wanted = ["torch>=2.7", "numpy>=99", "no-such-package>=1", "other; python_version < '3'", "peft; extra == 'peft'"]
    monkeypatch.setattr(doctor, "requires", lambda _name: wanted)
    lines = {line.name: line for line in doctor._packages()}
    assert lines["numpy"].status == "fail" and lines["numpy"].next == "pip install -U 'numpy>=99'"
    assert lines["no-such-package"].status == "fail" and "absent" in lines["no-such-package"].text
    assert lines["packages"].text == f"torch {metadata.version('torch')}" and not {"other", "peft"} & set(lines)

    def not_installed(_name):
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(doctor, "requires", not_installed)
    assert [line.status for line in doctor._packages()] == ["ok", "warn"]
    assert [line.name for line in doctor._optional()] == ["llama.cpp", "vLLM"]


def test_extras_say_how_to_get_them(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _name: ["no-such-package; extra == 'plot'", 'numpy>1; extra == "x"'])
    plot, x, *_ = doctor._optional()
    assert plot.status == "ok" and "no-such-package" in plot.text and plot.next == "pip install 'remoe-cli[plot]'"
    assert x.name == "extra x" and x.text.startswith("numpy ") and not x.next


def test_memory_and_disks(monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "available", lambda: Room(10**9, "the memory cgroup /a"))
    assert doctor._memory().status == "warn" and "1 GB free, as the memory cgroup /a allows" in doctor._memory().text
    (line,) = doctor._disk(Path("/proc"))
    assert line.status == "fail" and line.next
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage._replace(free=10**6))
    (line,) = doctor._disk(tmp_path / "not/there/yet")
    assert line.status == "fail" and f"{tmp_path}: 1 MB free" in line.text


def test_a_slow_disk_and_one_without_direct_reads(monkeypatch, tmp_path):
    monkeypatch.setattr("remoe_cli.train.rates.disk_rate", lambda *_: (90e6, "buffered"))
    monkeypatch.setattr(store, "file_system", lambda _path: "tmpfs")
    disk, direct = doctor._disk(tmp_path)
    assert disk.status == "warn" and "reads 90 MB/s" in disk.text and "--ram" in disk.next
    assert direct.status == "warn" and "tmpfs is memory" in direct.text and "buffered" in direct.next


def test_a_driver_that_torch_does_not_see(monkeypatch):
    monkeypatch.setattr(doctor, "pick_device", lambda _wanted: "cpu")
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert doctor._device().status == "warn" and "sees no GPU" in doctor._device().text

    def broken():
        raise RuntimeError("driver too old\nand more")

    assert [*doctor._safely("device", broken, "look there")] == [
        doctor.Line("device", "fail", "RuntimeError: driver too old", "look there")
    ]


@pytest.mark.parametrize("width", [40, 80, 120])
def test_lines_keep_within_the_terminal(width):
    line = doctor.Line("disk", "warn", "a word " * 40, "do this " * 10)
    shown = doctor.shown(line, width).splitlines()
    assert shown[0].startswith("warn  disk") and max(map(len, shown)) <= width
    assert any(part.strip().startswith("-> do this") for part in shown)
    assert " ".join(" ".join(shown).split()).count("a word") == 40


def test_the_summary_counts():
    line = doctor.Line("x", "ok", "")
    assert doctor.summary([line]) == "All is well."
    assert doctor.summary([line, line._replace(status="warn"), line._replace(status="fail")]) == "1 fail; 1 warn."


def test_the_cache_is_measured_where_no_folder_is_named(monkeypatch):
    seen = []
    monkeypatch.setattr(doctor, "_disk", lambda folder: iter([seen.append(folder) or doctor.Line("disk", "ok", "")]))
    monkeypatch.setattr(doctor, "_hub", lambda: [])
    list(doctor.doctor(None, []))
    assert seen == [failures.cache()]

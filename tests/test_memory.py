"""How much memory may still be taken: real cgroup limits where they can be set, and trees as other machines show them."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from memory_limits import LIMITED, limited

from remoe_cli.memory import available

MIB = 1 << 20


def test_the_machine_has_memory():
    room = available()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < room.nbytes <= total and room.limit


def report(limit: int, before: str = "") -> tuple[int, str]:
    """What a process in a cgroup of that limit sees, once it ran `before`."""
    code = f"{before}\nfrom remoe_cli.memory import available\nroom = available()\nprint(room.nbytes, room.limit, sep='\\n')"
    done = limited(limit, [sys.executable, "-c", code])
    assert done.returncode == 0, done.stderr
    nbytes, why = done.stdout.splitlines()
    return int(nbytes), why


@LIMITED
def test_a_real_cgroup_binds_and_what_is_in_use_counts():
    idle, why = report(300 * MIB)
    assert why.startswith("the memory cgroup /") and 250 * MIB < idle < 300 * MIB
    held, _ = report(300 * MIB, f"held = b'x' * {100 * MIB}")
    assert idle - held == pytest.approx(100 * MIB, abs=8 * MIB)


@LIMITED
def test_page_cache_is_free_memory(tmp_path):
    write = f"import pathlib\np = pathlib.Path({str(tmp_path / 'file')!r})\np.write_bytes(bytes({100 * MIB}))\n"
    idle, _ = report(300 * MIB)
    cached, _ = report(300 * MIB, write + "import os\nos.sync()\np.read_bytes()")
    assert cached == pytest.approx(idle, abs=16 * MIB)


@LIMITED
def test_the_tightest_of_nested_cgroups_binds():
    code = "from remoe_cli.memory import available; print(available().nbytes)"
    for own, above in ((900, 200), (200, 900)):
        done = limited(own * MIB, [sys.executable, "-c", code], above=above * MIB)
        assert 150 * MIB < int(done.stdout) < 200 * MIB, done.stderr


# trees


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n")
    return root


MEMINFO = "MemTotal: 9999 kB\nMemAvailable:    8000 kB\nSwapFree: 0 kB"
V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"


def v2(folder: str, limit: str, used: int = 0, cache: int = 0, high: str = "max") -> dict[str, str]:
    at = f"sys/fs/cgroup/{folder}"
    stat = f"anon 5\nactive_file {cache}\ninactive_file 0\nslab_reclaimable 0"
    return {
        f"{at}/memory.max": limit, f"{at}/memory.high": high, f"{at}/memory.current": str(used), f"{at}/memory.stat": stat,
    }  # fmt: skip


@pytest.mark.parametrize(
    "files, nbytes, limit",
    [
        ({}, 8000 * 1024, "the machine"),
        (v2("a/b", "max"), 8000 * 1024, "the machine"),
        (v2("a/b", "1000", 300, 100), 800, "the memory cgroup /a/b"),
        (v2("a/b", "1000", 300, 100, high="900"), 700, "the memory cgroup /a/b"),
        ({**v2("a/b", "1000", 300), **v2("a", "2000", 1900, 100)}, 200, "the memory cgroup /a"),
        (v2("a/b", "1000", 1300), 0, "the memory cgroup /a/b"),
        (v2("other", "10", 0), 8000 * 1024, "the machine"),
    ],
)
def test_version_2_limits(tmp_path, files, nbytes, limit):
    root = tree(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/a/b", "proc/self/mountinfo": V2, **files})
    assert available(root) == (nbytes, limit)


@pytest.mark.parametrize(
    "path, shown", [("/docker/abc", "/docker/abc"), ("/", "/"), ("/../x", "/"), ("/docker/ab", "/docker/a")]
)
def test_a_container_sees_its_own_cgroup_as_the_mount(tmp_path, path, shown):
    mount = f"35 31 0:32 {shown} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    at = "sys/fs/cgroup/memory"
    root = tree(
        tmp_path,
        {
            "proc/meminfo": MEMINFO, "proc/self/cgroup": f"4:cpu:/else\n3:hugetlb,memory:{path}", "proc/self/mountinfo": mount,
            f"{at}/memory.limit_in_bytes": "5000", f"{at}/memory.usage_in_bytes": "2000",
            f"{at}/memory.stat": "cache 9\ntotal_active_file 300\ntotal_inactive_file 200", f"{at}/memory.use_hierarchy": "1",
        },
    )  # fmt: skip
    assert available(root) == (3500, "the memory cgroup /")


def test_a_parent_without_hierarchy_does_not_bind(tmp_path):
    mount = "35 31 0:32 / /m rw - cgroup cgroup rw,memory"
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": "3:memory:/a/b", "proc/self/mountinfo": mount}
    above = {
        "m/a/memory.limit_in_bytes": "100",
        "m/a/memory.usage_in_bytes": "0",
        "m/a/b/memory.limit_in_bytes": str(2**63 - 4096),
    }
    root = tree(tmp_path, {**files, **above, "m/a/memory.use_hierarchy": "0"})
    assert available(root).limit == "the machine"
    (root / "m/a/memory.use_hierarchy").write_text("1\n")
    assert available(root) == (100, "the memory cgroup /a")


def test_no_torch_is_needed():
    code = "import sys\nfrom remoe_cli.memory import available\navailable()\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


GIVE_BACK = r"""
import ctypes, pathlib, re
from remoe_cli.memory import give_back
def anonymous():
    return int(re.search(r"RssAnon:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1])
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
blocks = [libc.malloc(100_000) for _ in range(2000)]
for block in blocks:
    libc.memset(block, 1, 100_000)
for block in blocks[:-1]:  # the last one keeps the end of the heap where it is
    libc.free(block)
held = anonymous()
give_back()
print(held, anonymous())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep no such holes")
def test_what_is_freed_can_be_given_back():
    ran = subprocess.run([sys.executable, "-c", GIVE_BACK], capture_output=True, text=True, check=True)
    held, left = map(int, ran.stdout.split())  # kB
    assert held > 190_000 and left < held / 3

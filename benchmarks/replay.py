"""How fast traces are replayed: accesses a second, beside libCacheSim, the plain engine and a plain Python LRU.

    python benchmarks/replay.py [--rounds 5] [--quick] [--shared ../shared]

Every ratio is the median over rounds in which the two sides ran one after the other, on one core. libCacheSim
(`pip install libcachesim`) is replayed natively from a file in its oracleGeneral format; it knows one access at a time and
one cache, so that is what both sides run: LRU, FIFO, ARC and Belady, with their hits compared. Compiling is timed apart and
kept out of every other figure.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numba
import numpy as np

from remoe_cli.cache import replay
from remoe_cli.cache.curve import lru_curve
from remoe_cli.cache.policies import POLICIES
from remoe_cli.cache.replay import prepare
from remoe_cli.routing import RoutingTrace, write
from remoe_cli.routing.imports import read_foreign

SIX = ("lru", "lfu", "fifo", "lrfu", "lfru", "belady")
FILES = {
    "esft intent": "esft/intent.npz",
    "esft summary": "esft/summary.npz",
    "qwen3-30b code": "cacheable-by-design/qwen3-30b-a3b/code.npz",
    "qwen3-30b general": "cacheable-by-design/qwen3-30b-a3b/general.npz",
    "a-main-s1": "cacheable-by-design/a-main-s1/trace_code.npz",
    "b-main-s1": "cacheable-by-design/b-main-s1/trace_code.npz",
}
LAYERS = 8  # of those that libCacheSim replays
ORACLE_GENERAL = np.dtype([("time", "<u4"), ("id", "<u8"), ("size", "<u4"), ("next", "<i8")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="without the two timed grids")
    parser.add_argument("--shared", type=Path, default=Path(__file__).parents[2] / "shared")
    asked = parser.parse_args()
    traces = asked.shared / "data" / "traces"
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"numba {numba.__version__}, numpy {np.__version__}, {asked.rounds} rounds")  # fmt: skip
    seconds = [prepare(name) for name in POLICIES]
    fresh = [one for one in seconds if one is not None]
    print(f"compiled: {len(fresh)} of {len(POLICIES)} kernels in {sum(fresh):.1f} s; the others were on disk\n")
    loaded = {name: read_foreign(traces / file) for name, file in FILES.items()}
    rates(loaded, asked.rounds)
    plain_peers(loaded["esft intent"], asked.rounds)
    libcachesim(loaded["qwen3-30b code"], 16, asked.rounds)
    libcachesim(loaded["a-main-s1"], 4, asked.rounds)
    memory(loaded["a-main-s1"])
    if not asked.quick:
        grids(loaded)


def clock(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def rates(loaded: dict[str, RoutingTrace], rounds: int) -> None:
    """Of one core, each policy against LRU at the same cache size in the same round."""
    print("one core, step-atomic; M accesses/s (x LRU's time at that size)")
    names = ("esft intent", "qwen3-30b code", "a-main-s1")
    jobs = {
        "lru, one C": lambda trace, c: replay(trace, "lru", c, threads=1),
        "lru, every C at once": lambda trace, c: lru_curve(trace, threads=1),
        **{
            f"{policy}, {admission}": lambda trace, c, p=policy, a=admission: replay(trace, p, c, admission=a, threads=1)
            for policy, admission in [(one, "forced") for one in SIX[1:]] + [("belady", "bypass"), ("arc", "forced"),
                                      ("s3fifo", "forced"), ("random", "forced")]
        },
    }  # fmt: skip
    for name in names:
        trace = loaded[name]
        size = 2 * trace.top_k
        for work in jobs.values():
            work(trace, size)
        times = []
        for _ in range(rounds):
            times.append([clock(partial(work, trace, size)) for work in jobs.values()])
        print(f"  {name}, {trace.experts.size / 1e6:.2f} M accesses, C = {size}")
        for at, job in enumerate(jobs):
            ratio = statistics.median(row[at] / row[0] for row in times)
            rate = trace.experts.size / statistics.median(row[at] for row in times) / 1e6
            print(f"    {job:<24}{rate:8.1f}   x{ratio:.2f}")
    print()


def plain_peers(trace: RoutingTrace, rounds: int) -> None:
    """The plain engine (ExpertCache, which the decoder runs) and an LRU of a few lines on an OrderedDict."""
    few = RoutingTrace(trace.experts[:, :4], trace.borders, trace.prefill, trace.n_experts)
    times = []
    for _ in range(rounds):
        ours = clock(lambda: replay(few, "lru", 12, threads=1))
        engine = clock(lambda: replay(few, "lru", 12, engine="python", threads=1))
        simple = clock(lambda: dict_lru(few, 12))
        times.append((ours, engine, simple))
    assert replay(few, "lru", 12).hits == dict_lru(few, 12)
    engine, simple = (statistics.median(row[at] / row[0] for row in times) for at in (1, 2))
    rates = [few.experts.size / statistics.median(row[at] for row in times) / 1e6 for at in range(3)]
    print(f"LRU, C = 12, 4 layers of esft intent: compiled {rates[0]:.1f} M/s; plain engine {rates[1]:.2f} M/s "
          f"({engine:.0f}x slower); OrderedDict LRU {rates[2]:.2f} M/s ({simple:.0f}x slower)\n")  # fmt: skip


def dict_lru(trace: RoutingTrace, capacity: int) -> int:
    hits = 0
    for start, stop in zip(trace.borders, trace.borders[1:]):
        for layer in range(trace.n_layers):
            resident: OrderedDict[int, None] = OrderedDict()
            for touched in trace.experts[start:stop, layer, ::-1].tolist():
                hits += sum(expert in resident for expert in touched)
                for expert in touched:
                    resident[expert] = None
                    resident.move_to_end(expert)
                while len(resident) > capacity:
                    resident.popitem(last=False)
    return hits


def libcachesim(trace: RoutingTrace, capacity: int, rounds: int) -> None:
    try:
        import libcachesim as peer
    except ImportError:
        print("libCacheSim is not here: pip install libcachesim\n")
        return
    some = RoutingTrace(trace.experts[:, :LAYERS], trace.borders, trace.prefill, trace.n_experts)
    accesses = some.experts.size
    print(f"libCacheSim {version('libcachesim')}, {some.n_layers} layers, {accesses / 1e6:.2f} M accesses one at a time, "
          f"C = {capacity}: M accesses/s, theirs, ours, ours faster by")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{layer}.oracleGeneral.bin" for layer in range(some.n_layers)]
        for layer, path in enumerate(files):
            ids = some.experts[:, layer].ravel().astype(np.int64)
            rows = np.zeros(len(ids), ORACLE_GENERAL)
            rows["time"], rows["id"], rows["size"], rows["next"] = (
                np.arange(len(ids)) // 1000,
                ids + 1,
                1,
                following(ids),
            )
            rows.tofile(path)
        for ours, theirs in (("lru", "LRU"), ("fifo", "FIFO"), ("arc", "ARC"), ("belady", "Belady")):
            times, hits = [], 0
            for _ in range(rounds):
                readers = [peer.TraceReader(str(path), peer.TraceType.ORACLE_GENERAL_TRACE) for path in files]
                caches = [getattr(peer, theirs)(cache_size=capacity, hashpower=10) for _ in files]
                start = time.perf_counter()
                misses = [cache.process_trace(reader)[0] for cache, reader in zip(caches, readers)]
                middle = time.perf_counter()
                got = replay(some, ours, capacity, step="sequential", reset="never", touch_order="listed", threads=1)
                times.append((middle - start, time.perf_counter() - middle))
                hits = sum(round((1 - miss) * accesses / some.n_layers) for miss in misses)
            ratio = statistics.median(row[0] / row[1] for row in times)
            speeds = [accesses / statistics.median(row[at] for row in times) / 1e6 for at in (0, 1)]
            same = "equal hits" if hits == got.hits else f"hits {hits:,} and {got.hits:,}"
            print(f"    {ours:<8}{speeds[0]:8.1f}{speeds[1]:8.1f}   x{ratio:.2f}   {same}")
    print()


def following(layer: np.ndarray) -> np.ndarray:
    """The place of each access's next one of the same id, from 1; -1 where there is none, as the format has it."""
    found = np.full(len(layer), -1, np.int64)
    order = np.lexsort((np.arange(len(layer)), layer))
    same = layer[order[1:]] == layer[order[:-1]]
    found[order[:-1][same]] = order[1:][same] + 1
    return found


MEMORY = """
import sys
from pathlib import Path
from remoe_cli.cache import replay
from remoe_cli.cache.curve import lru_curve
from remoe_cli.cache.replay import prepare
from remoe_cli.routing import read

def status(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name)) * 1024

trace = read(Path(sys.argv[1]))
bytes_read = int(trace.experts.sum(dtype=int)) and trace.experts.nbytes
small = trace.experts[:64].copy(), trace.borders.copy(), trace.prefill[:64].copy()
prepare("lru"), prepare("belady"), lru_curve(trace, threads=1), replay(trace, "lru", 4, threads=1)
for work in (lambda: replay(trace, "lru", 4), lambda: replay(trace, "belady", 4), lambda: lru_curve(trace)):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    work()
    print((status("VmHWM") - before) / bytes_read)
"""


def memory(trace: RoutingTrace) -> None:
    """Peak memory of a replay over what the process held before, with the trace mapped and read."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.trace"
        write(trace, path)
        done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True)
    if done.returncode:
        print(f"memory: not measured here ({done.stderr.strip().splitlines()[-1]})\n")
        return
    lru, belady, curve = map(float, done.stdout.split())
    print(f"memory beside the mapped trace, in sizes of its ids, {os.cpu_count()} threads: LRU {lru:.2f}, Belady {belady:.2f}, "
          f"every-C curve {curve:.2f}\n")  # fmt: skip


def grids(loaded: dict[str, RoutingTrace]) -> None:
    """The grids that a user would wait for: 8 sizes x 6 policies, on all cores."""
    esft = [trace for name, trace in loaded.items() if name.startswith("esft")]
    for title, traces in (("the two esft traces", esft), ("all six npz traces", [*loaded.values()])):
        cells = accesses = 0
        start = time.perf_counter()
        for trace in traces:
            sizes = np.unique(np.linspace(trace.top_k, trace.n_experts, 8).astype(int))
            for size in sizes:
                for policy in SIX:
                    accesses += replay(trace, policy, int(size)).accesses
                    cells += 1
        seconds = time.perf_counter() - start
        print(f"{title}, 8 sizes x 6 policies = {cells} cells: {seconds:.1f} s on {os.cpu_count()} cores "
              f"({accesses / seconds / 1e6:.0f} M accesses/s)")  # fmt: skip
    print(f"peak memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


if __name__ == "__main__":
    main()

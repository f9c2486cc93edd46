"""The decoder's noise-free bars, on experts of 1.08 MB: bytes that are read, page cache left behind, peak memory."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_models import make

from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, Settings
from remoe_cli.offload.budget import request_bytes

EXPERTS, CAPACITY, LAYERS, TOP_K = 64, 8, 3, 4
EXPERT_BYTES = 3 * 256 * 704 * 2
PROMPT, NEW = [5, 17, 80, 3, 3, 99, 41, 64, 12, 110, 27], 24
WORKING_ROOM = 150e6
LONG = 3000


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    """208 MB of experts: to hold them all would break the bar on memory."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 704, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    sizes["max_position_embeddings"] = LONG
    return Checkpoint.open(make("qwen3_moe", tmp_path_factory.mktemp("large"), torch.bfloat16, **sizes))


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(guess=2), Settings(ram=40_000_000)], ids=["files", "guess", "ram"]
)
def test_bytes_read_are_those_of_the_experts_asked_for(checkpoint, settings):
    with OffloadedDecoder(checkpoint, CAPACITY, settings=settings, threads=1) as decoder:
        if decoder.io != "direct":
            pytest.skip(f"read through the page cache: {decoder.io_reason}")
        assert decoder.expert_bytes == EXPERT_BYTES
        counts = decoder.decode(PROMPT, NEW).counts
    on_demand, ahead = counts.misses - counts.guessed, counts.guesses
    assert counts.decode.reads == on_demand + ahead and on_demand > NEW * LAYERS
    assert (ahead > 0) == (settings.guess > 0) and (counts.decode.ram > 0) == (settings.ram > 0)
    for count in (counts.decode, counts.prefill):
        from_files = count.reads - count.ram
        assert 0.99 * from_files * EXPERT_BYTES <= count.read_bytes <= 1.01 * from_files * EXPERT_BYTES
        assert count.bytes == count.reads * EXPERT_BYTES
        if count.storage_bytes is not None:
            assert count.storage_bytes <= 1.01 * from_files * EXPERT_BYTES


DECODES = """
import ctypes, json, mmap, os, sys
from pathlib import Path

import torch
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, Settings
from transformers.models.qwen3_moe import modeling_qwen3_moe

torch.set_num_threads(1)
folder, prompt = Path(sys.argv[1]), json.loads(sys.argv[2])
capacity, new, long = map(int, sys.argv[3:])
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p


def cached(path):
    size = path.stat().st_size
    file = os.open(path, os.O_RDONLY)
    place = ctypes.c_void_p(
        libc.mmap(None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file, ctypes.c_long(0))
    )
    pages = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
    assert not libc.mincore(place, ctypes.c_size_t(size), pages)
    libc.munmap(place, ctypes.c_size_t(size))
    os.close(file)
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def memory(name):  # getrusage would start from the peak of the process that began this one
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * 1024


files = sorted(folder.glob("*.safetensors"))
for path in files:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
evicted = sum(map(cached, files))
imported = memory("VmRSS")
with OffloadedDecoder(Checkpoint.open(folder), capacity, threads=1) as decoder:
    held = decoder.capacity * decoder.n_layers + decoder.staging
    decoder.decode(prompt, new)
    left, grown = sum(map(cached, files)), memory("VmHWM") - imported
    decoder.decode((prompt * 300)[: long - 2], 2)
    print(json.dumps({
        "io": decoder.io, "evicted": evicted, "left": left, "held": held,
        "grown": grown, "grown_by_long": memory("VmHWM") - imported,
    }))
"""


@pytest.fixture(scope="module")
def seen(checkpoint) -> dict:
    arguments = map(str, (checkpoint.folder, json.dumps(PROMPT), CAPACITY, NEW, LONG))
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    done = subprocess.run([sys.executable, "-c", DECODES, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_no_page_cache_is_left_behind(seen):
    if seen["io"] != "direct" or seen["evicted"]:
        pytest.skip("this file system keeps its pages")
    assert seen["left"] == 0


def test_peak_memory_is_the_dense_weights_and_the_slots(checkpoint, seen):
    names = [name for name in checkpoint.tensors if ".experts." not in name]
    dense = sum(checkpoint.tensors[name].nbytes for name in names)
    assert seen["held"] <= CAPACITY * LAYERS + 2
    assert seen["grown"] <= dense + CAPACITY * LAYERS * EXPERT_BYTES + WORKING_ROOM
    # the bar can be missed: with all experts in memory it would be
    assert EXPERTS * LAYERS * EXPERT_BYTES > CAPACITY * LAYERS * EXPERT_BYTES + WORKING_ROOM


def test_peak_memory_of_a_long_prompt_is_what_the_budget_counts(checkpoint, seen):
    tokens = request_bytes(checkpoint.config, torch.bfloat16, LONG)
    dense = sum(info.nbytes for name, info in checkpoint.tensors.items() if ".experts." not in name)
    assert seen["grown_by_long"] <= dense + CAPACITY * LAYERS * EXPERT_BYTES + WORKING_ROOM + tokens

"""Too little memory is refused before anything is loaded, and what is proposed instead really fits."""

import math
import re
import shlex
import sys

import pytest
import tiny_models
import torch
from memory_limits import LIMITED, limited
from tiny_models import MODEL_TYPES, TOP_K

from remoe_cli import memory
from remoe_cli.errors import CacheError, MemoryShortError
from remoe_cli.families.loader import experts_on_disk, kept_cache, load_resident, load_without_experts
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.memory import available
from remoe_cli.offload import budget, OffloadedDecoder
from remoe_cli.sizes import parse_size

LAYERS = 3
MIB = 1 << 20


def opened(folders, family="mixtral", dtype=torch.float32):
    checkpoint = Checkpoint.open(folders(family, dtype))
    return checkpoint, experts_on_disk(checkpoint)


@pytest.fixture
def asked(folders):
    """require() for slots of a size that makes this machine's memory hold that many of them."""
    checkpoint, layers = opened(folders)

    def ask(fit: float, capacity: int, ram: int = 0, rows: int = 1) -> CacheError | None:
        row_bytes = int((available().nbytes - budget.WORKING_ROOM) / fit)
        try:
            budget.require(
                checkpoint, layers, torch.float32, "cpu", capacity,
                row_bytes=row_bytes, rows=lambda _: rows, ram=int(ram * row_bytes), top_k=TOP_K,
            )  # fmt: skip
        except CacheError as error:
            return error
        return None

    return ask


# a slot or so of slack: other processes take and give memory meanwhile


def test_what_fits_is_not_refused(asked):
    assert asked(8 * LAYERS + 2, 8) is None
    assert asked(8 * LAYERS + 2, 7, ram=LAYERS) is None


def test_the_largest_cache_that_fits_is_proposed(asked):
    for capacity, fit in ((8, 5 * LAYERS + 2), (7, 5 * LAYERS + 2), (6, 2 * LAYERS + 2)):
        error = asked(fit, capacity)
        assert error is not None and f"{capacity} slots a layer needs" in error.message and " left" in error.message
        found = re.fullmatch(r"remoe decode \S+ --cache (\d+)", error.hint)
        assert found and int(found[1]) == (fit - 2) // LAYERS
        assert asked(fit, int(found[1])) is None and asked(fit, int(found[1]) + 1) is not None


def test_a_smaller_ram_tier_is_proposed_before_a_smaller_cache(asked):
    fit = 3 * LAYERS + 3
    error = asked(fit, 3, ram=30)
    assert error is not None and "RAM tier" in error.message
    words = shlex.split(error.hint)
    assert words[3:6] == ["--cache", "3", "--ram"]
    row_bytes = (available().nbytes - budget.WORKING_ROOM) / fit
    assert 1 <= parse_size(words[6]) / row_bytes <= 2  # type: ignore[operator]
    error = asked(3 * LAYERS + 1.5, 3, ram=30)
    assert error is not None and error.hint.endswith("--cache 3"), "no RAM tier fits, so none is proposed"
    error = asked(2 * LAYERS + 2, 3, ram=30)
    assert error is not None and error.hint.endswith("--cache 2")


def test_where_not_even_k_slots_fit_the_least_is_named(asked):
    error = asked(TOP_K * LAYERS, 5)
    assert error is not None and f"the least, {TOP_K} slots, needs" in error.message
    assert error.hint.startswith("remoe decode ") and f"--cache {TOP_K} where" in error.hint


def test_staging_counts(asked):
    assert asked(4 * LAYERS + 4, 4, rows=2) is None
    assert asked(4 * LAYERS + 4, 4, rows=6) is not None


def test_on_a_gpu_slots_are_counted_there_and_the_ram_tier_here(folders, monkeypatch):
    checkpoint, layers = opened(folders)

    def ask(on_gpu: float, in_host: float, ram: float) -> CacheError:
        monkeypatch.setattr(memory, "gpu", lambda device: memory.Room(int(on_gpu), f"the GPU {device}"))
        monkeypatch.setattr(memory, "available", lambda: memory.Room(int(in_host), "the machine"))
        with pytest.raises(CacheError) as caught:
            budget.require(
                checkpoint, layers, torch.bfloat16, "cuda:1", 8,
                row_bytes=10**8, rows=lambda _: 2, ram=int(ram), top_k=TOP_K, host=10**8,
            )  # fmt: skip
        return caught.value

    small = ask(on_gpu=1.5e9, in_host=9e9, ram=1e9)  # room for 13 of the 26 slots
    assert "the GPU cuda:1 has 1.5 GB left" in small.message and "RAM" not in small.message
    assert small.hint.endswith("--cache 3")
    tight = ask(on_gpu=9e9, in_host=1e9, ram=2e9)
    assert "the machine has 1 GB left" in tight.message and "RAM tier 2 GB" in tight.message
    assert tight.hint.endswith("--cache 8 --ram 750MB")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", MODEL_TYPES)
def test_dense_weights_are_counted_as_they_are_held(folders, family, dtype):
    checkpoint, layers = opened(folders, family)
    outside = budget.outside(checkpoint, layers)
    model, _ = load_without_experts(checkpoint, dtype)
    held = sum(parameter.numel() for parameter in model.parameters())
    held += sum(b.numel() for name, b in model.named_buffers() if name in model.state_dict())
    assert sum(math.prod(info.shape) for info in outside) == held


@pytest.mark.parametrize("family", MODEL_TYPES)
def test_the_attention_cache_is_counted_as_it_is_held(folders, family):
    checkpoint, _ = opened(folders, family)
    model = load_resident(checkpoint, torch.float32, "cpu")
    with torch.inference_mode():
        out = model(input_ids=torch.arange(3, 43)[None].repeat(2, 1), use_cache=True)
    (cache,) = kept_cache(out).values()
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    deeper = {**checkpoint.config, "num_hidden_layers": 2 * LAYERS}
    counted = budget.request_bytes(deeper, torch.float32, 80) - budget.request_bytes(
        checkpoint.config, torch.float32, 80
    )
    assert counted >= held if family == "gpt_oss" else counted == held  # its sliding layers keep a window only


def test_long_requests_count(folders):
    checkpoint, layers = opened(folders)
    tokens = int(available().nbytes / budget.request_bytes(checkpoint.config, torch.float32, 1))
    limits = {"row_bytes": 4096, "rows": lambda _: 0, "ram": 0, "top_k": TOP_K}
    budget.require(checkpoint, layers, torch.float32, "cpu", 8, tokens=tokens // 2, **limits)
    with pytest.raises(CacheError, match=rf"{tokens:,} tokens \d"):
        budget.require(checkpoint, layers, torch.float32, "cpu", 8, tokens=tokens, **limits)


def test_as_many_tokens_as_are_named_fit(folders, monkeypatch):
    checkpoint, layers = opened(folders)
    limits = {"row_bytes": 4096, "rows": lambda _: 1, "ram": 9 * 4096, "top_k": TOP_K}
    monkeypatch.setattr(memory, "available", lambda: memory.Room(10**9, "the machine"))
    with pytest.raises(MemoryShortError) as caught:
        budget.require(checkpoint, layers, torch.float32, "cpu", 8, tokens=10**9, **limits)
    fit = caught.value.tokens
    assert f"{fit:,} tokens would fit" in caught.value.message and "--cache 8 and " in caught.value.hint
    budget.require(checkpoint, layers, torch.float32, "cpu", 8, tokens=fit, **{**limits, "ram": 0})
    with pytest.raises(MemoryShortError):
        budget.require(checkpoint, layers, torch.float32, "cpu", 8, tokens=fit + 1, **{**limits, "ram": 0})


def test_nothing_is_loaded_before_it_is_refused(folders, monkeypatch):
    checkpoint, _ = opened(folders)
    monkeypatch.setattr("remoe_cli.offload.decoder.load_without_experts", lambda *_: pytest.fail("it was loaded"))
    monkeypatch.setattr(budget, "WORKING_ROOM", 1 << 50)
    with pytest.raises(CacheError, match="slots a layer needs"):
        OffloadedDecoder(checkpoint, TOP_K)


REFUSED_THEN_DECODES = """
import re, sys
from pathlib import Path
from remoe_cli import memory
from remoe_cli.errors import CacheError, MemoryShortError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder
checkpoint = Checkpoint.open(Path(sys.argv[1]))
try:
    OffloadedDecoder(checkpoint, 32)
except CacheError as error:
    print(error.message)
    fits = int(re.search(r"--cache (\\d+)$", error.hint)[1])
with OffloadedDecoder(checkpoint, fits, threads=1) as decoder:
    print(fits, len(decoder.decode([5, 17, 80], 3).ids))
"""


@LIMITED
def test_under_a_real_limit_what_is_proposed_runs(tmp_path):
    """270 MB of experts, in a cgroup that holds the interpreter and a few of them."""
    sizes = {"hidden_size": 256, "intermediate_size": 2816, "num_local_experts": 32, "num_hidden_layers": 2}
    model = tiny_models.make("mixtral", tmp_path, torch.bfloat16, **sizes)
    done = limited(640 * MIB, [sys.executable, "-c", REFUSED_THEN_DECODES, str(model)])
    assert done.returncode == 0, done.stderr
    why, ran = done.stdout.splitlines()
    assert "32 slots a layer needs" in why and "but the memory cgroup /" in why
    fits, tokens = map(int, ran.split())
    assert TOP_K <= fits < 32 and tokens == 3

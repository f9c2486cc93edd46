"""Experts in their files: the model loads without them, the store finds every byte, and damage is named."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from decoding import dtype_of, NEW, PROMPT
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_models import EXPERTS, FIRST_DENSE, make

from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.families import find_gates
from remoe_cli.families.experts import Piece
from remoe_cli.families.loader import load_resident, load_without_experts
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import ExpertStore, IoCount, OffloadedDecoder, Settings
from remoe_cli.offload.arena import PAGE
from remoe_cli.offload.layout import _runs, Layout
from remoe_cli.offload.slots import SlotPool
from remoe_cli.offload.store import expert_files, one_expert_bytes, storage_bytes
from remoe_cli.offload.tiers import Tiers

# loading


def test_the_models_parameters_are_the_stock_ones(checkpoint):
    dtype = dtype_of(checkpoint)
    model, layers = load_without_experts(checkpoint, dtype)
    stock = load_resident(checkpoint, dtype, "cpu")
    stock_tensors = {**dict(stock.named_parameters()), **dict(stock.named_buffers())}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    expert_names = {name for name in stock_tensors if ".experts." in name}
    assert set(tensors) == set(stock_tensors) - expert_names and expert_names
    for name, tensor in tensors.items():
        assert tensor.dtype == stock_tensors[name].dtype and torch.equal(tensor, stock_tensors[name]), name
    assert not model.training
    assert [layer.layer for layer in layers] == ([1, 2] if checkpoint.model_type in FIRST_DENSE else [0, 1, 2])
    if checkpoint.model_type == "deepseek_v2":
        assert model.model.layers[1].mlp.gate.weight.dtype == torch.float32


def test_embeddings_are_tied(tmp_path):
    model, _ = load_without_experts(Checkpoint.open(make("mixtral", tmp_path, tie_word_embeddings=True)), torch.float32)
    assert model.lm_head.weight is model.model.embed_tokens.weight


# bytes


def everything(layers, dtype, *, direct=True, **settings):
    """(layer number, expert, its tensors by part, pieces joined), each read by a reader thread into one slot; and the count."""
    layout = Layout(layers, dtype, direct=direct)
    store = ExpertStore(expert_files(layers), direct=direct)
    pool, count = SlotPool(layout.slot_bytes, torch.device("cpu")), IoCount()
    pool.resize(3)
    options = {
        "numbers": [layer.layer for layer in layers],
        "expert_bytes": [one_expert_bytes(layers)] * len(layers),
        "readers": 1,
        "ram": 0,
    }
    tiers = Tiers(store, layout, pool, **options | settings)
    found = []
    for number, layer in enumerate(layers):
        for expert in reversed(range(layer.n_experts)):
            slot = pool.acquire()
            tiers.wait(tiers.begin(number, expert, slot, count))
            tensors = layout.tensors(pool.rows[slot], number, expert)
            dims = {part.name: part.pieces[0][0].dim for part in layer.parts}
            found.append((number, expert, {name: torch.cat(pieces, dims[name]) for name, pieces in tensors.items()}))
            assert all(piece.data_ptr() % 8 == 0 for pieces in tensors.values() for piece in pieces)
            pool.release(slot)
    tiers.close()
    store.close()
    return found, count, store


@pytest.mark.parametrize("settings", [{}, {"direct": False}, {"ram": 10**6}, {"ram": 20_000}], ids=str)
def test_the_store_reads_what_the_loader_merges(checkpoint, settings):
    dtype = dtype_of(checkpoint)
    _, layers = load_without_experts(checkpoint, dtype)
    stock = {gate.layer: gate.experts for gate in find_gates(load_resident(checkpoint, dtype, "cpu"))}
    for compute in {dtype, torch.float32}:
        found, count, store = everything(layers, compute, **settings)
        for number, expert, tensors in found:
            for part in layers[number].parts:
                row = getattr(stock[layers[number].layer], part.name)[expert]
                assert tensors[part.name].dtype == compute and torch.equal(tensors[part.name], row.to(compute))
        assert count.reads == len(layers) * EXPERTS
        assert count.bytes == sum(info.nbytes for name, info in checkpoint.tensors.items() if ".experts." in name)
        if store.io == "direct":
            assert count.bytes <= count.read_bytes <= count.bytes + 2 * PAGE * count.calls
        else:
            assert count.read_bytes == count.bytes


def test_an_expert_that_the_ram_tier_holds_is_not_read_again(folders):
    _, layers = load_without_experts(Checkpoint.open(folders("qwen3_moe")), torch.float32)
    first, once, _ = everything([*layers, *layers], torch.float32)
    _, twice, _ = everything([*layers, *layers], torch.float32, ram=10**7)
    assert (once.ram, twice.ram) == (0, 0)  # told apart by layer, though the files are the same
    layout = Layout(layers, torch.float32, direct=True)
    for rows, served in (
        (EXPERTS, EXPERTS),
        (EXPERTS - 1, 0),
    ):  # least recently used out: a cycle one too long never hits
        store, pool, count = (
            ExpertStore(expert_files(layers)),
            SlotPool(layout.slot_bytes, torch.device("cpu")),
            IoCount(),
        )
        pool.resize(1)
        tiers = Tiers(store, layout, pool, numbers=[0], expert_bytes=[1, 1, 1], readers=1, ram=rows * layout.slot_bytes)
        for _ in range(2):
            for expert in range(EXPERTS):
                slot = pool.acquire()
                tiers.wait(tiers.begin(0, expert, slot, count))
                expected = next(tensors for number, e, tensors in first if (number, e) == (0, expert))
                got = layout.tensors(pool.rows[slot], 0, expert)
                assert all(torch.equal(torch.cat(got[name], 0), expected[name]) for name in expected)
                pool.release(slot)
        assert (count.reads, count.ram) == (2 * EXPERTS, served)
        tiers.close()
        store.close()


def test_parts_side_by_side_take_one_call_and_parts_in_two_shards_two(folders):
    _, layers = load_without_experts(Checkpoint.open(folders("mixtral")), torch.float32)
    shards = [{piece.file for piece in layer.pieces(expert)} for layer in layers for expert in range(EXPERTS)]
    split = sum(len(files) > 1 for files in shards)
    assert split >= 1, "no expert lies in two shards: the case is not tested"
    _, count, _ = everything(layers, torch.float32)
    assert count.calls == count.reads + split


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 3), st.booleans()), max_size=8), st.randoms())
def test_runs_cover_every_piece_once_and_have_no_gap(specs, random):
    ends, pieces = {"a": 0, "b": 0}, []
    for name, nbytes, gap in specs:
        start = ends[name] + gap
        pieces.append(Piece(Path(name), start, nbytes, "U8", (nbytes,), 0, 0))
        ends[name] = start + nbytes
    random.shuffle(pieces)
    runs = _runs(pieces)
    assert sorted(i for order in runs for i in order) == list(range(len(pieces)))
    for order in runs:
        path, offset = pieces[order[0]][:2]
        for i in order:
            assert pieces[i][:2] == (path, offset)
            offset += pieces[i].nbytes
        assert (path, offset) not in {piece[:2] for piece in pieces}


def test_tensors_at_odd_offsets_are_copied_to_even_ones(folders, tmp_path):
    """safetensors allows headers of any length: then no element lies on a multiple of its size."""
    checkpoint = Checkpoint.open(folders("mixtral", torch.bfloat16))
    expected = OffloadedDecoder(checkpoint, 3).decode(PROMPT, NEW, keep_logits=True)
    for file in checkpoint.folder.iterdir():
        content = file.read_bytes()
        if file.suffix == ".safetensors":
            length = int.from_bytes(content[:8], "little")
            content = (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :]
        (tmp_path / file.name).write_bytes(content)
    with OffloadedDecoder(Checkpoint.open(tmp_path), 3) as decoder:
        shifted = decoder.decode(PROMPT, NEW, keep_logits=True)
    assert shifted.ids == expected.ids and torch.equal(shifted.logits, expected.logits)


@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss"])
def test_an_experts_bytes_reach_the_output_and_only_where_it_runs(folders, tmp_path, family):
    folder = tmp_path / "damaged"
    folder.mkdir()
    for file in folders(family).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    checkpoint = Checkpoint.open(folder)
    with OffloadedDecoder(checkpoint, 3) as decoder:
        before = decoder.decode(PROMPT[:2], 4, keep_logits=True)
        used = int(before.trace.experts[-1, -1, 0])
        unused = min(set(range(EXPERTS)) - set(before.trace.experts[:, -1].ravel().tolist()))
        for expert, same in ((unused, True), (used, False)):
            for piece in decoder.layers[-1].pieces(expert):
                with open(piece.file, "r+b") as stream:
                    stream.seek(piece.offset)
                    stream.write(bytes(piece.nbytes))
            after = decoder.decode(PROMPT[:2], 4, forced=before.ids, keep_logits=True)
            assert torch.equal(after.logits, before.logits) == same


def test_experts_are_neither_read_nor_needed_to_load(folders, tmp_path):
    for file in folders("qwen3_moe").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    checkpoint = Checkpoint.open(tmp_path)
    intact = OffloadedDecoder(checkpoint, 3).decode(PROMPT, 3).ids
    for name, info in checkpoint.tensors.items():
        if ".experts." in name:
            with open(info.file, "r+b") as stream:
                stream.seek(info.offset)
                stream.write(b"\xff" * info.nbytes)  # not a number, in every float dtype
    with OffloadedDecoder(checkpoint, 3) as decoder:
        assert all(parameter.isfinite().all() for parameter in decoder._model.parameters())
        assert not any(".experts." in name for name, _ in decoder._model.named_parameters())
        assert decoder.decode(PROMPT, 3).ids != intact


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc")
def test_peak_memory_of_loading_leaves_the_experts_out(tmp_path):
    """66 MB of experts beside few dense weights: loading must not grow the process by half of that."""
    config = {"intermediate_size": 1024, "hidden_size": 64, "num_local_experts": 56, "num_attention_heads": 4}
    make("mixtral", tmp_path, torch.bfloat16, **config)
    code = """
import sys
import torch
from transformers import MixtralForCausalLM
from remoe_cli.families.loader import load_resident, load_without_experts
from remoe_cli.hub.checkpoint import Checkpoint
checkpoint = Checkpoint.open(sys.argv[1])
def peak():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
start = peak()
model, layers = load_without_experts(checkpoint, torch.bfloat16)
lean = peak()
load_resident(checkpoint, torch.bfloat16, "cpu")
print(lean - start, peak() - start)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    lean, full = (int(kib) * 1024 for kib in done.stdout.split())
    experts = sum(i.nbytes for n, i in Checkpoint.open(tmp_path).tensors.items() if ".experts." in n)
    assert experts > 60e6 and lean < experts / 2 < full


# damage and refusals


def without(folder: Path, target: Path, pattern: str) -> Checkpoint:
    """A copy of the checkpoint that lacks the tensors whose name ends in pattern."""
    target.mkdir()
    for file in folder.iterdir():
        if file.suffix == ".safetensors":
            kept = {name: tensor for name, tensor in load_file(file).items() if not name.endswith(pattern)}
            save_file(kept, target / file.name, metadata={"format": "pt"})
        else:
            (target / file.name).write_bytes(file.read_bytes())
    return Checkpoint.open(target)


@pytest.mark.parametrize(
    "family, missing, word",
    [
        ("mixtral", "layers.2.block_sparse_moe.experts.5.w3.weight", "7 of the 8"),
        ("deepseek_v2", "layers.1.mlp.experts.0.down_proj.weight", "7 of the 8"),
        ("gpt_oss", "layers.0.mlp.experts.down_proj_bias", "0 of the 1"),
        ("qwen3_moe", "layers.1.self_attn.o_proj.weight", "o_proj"),
        ("qwen3_moe", "layers.1.mlp.gate.weight", "gate"),
    ],
)
def test_missing_tensors_are_named(folders, tmp_path, family, missing, word):
    checkpoint = without(folders(family), tmp_path / "cut", missing)
    with pytest.raises(CheckpointError, match=word):
        OffloadedDecoder(checkpoint, 4)


def test_a_config_that_does_not_fit_the_files_is_refused(folders, tmp_path):
    for field in ("intermediate_size", "vocab_size"):
        folder = tmp_path / field
        folder.mkdir()
        for file in folders("mixtral").iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        config[field] += 8
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(CheckpointError):
            OffloadedDecoder(Checkpoint.open(folder), 4)


def test_a_file_that_shrinks_under_the_decoder_is_a_checkpoint_error(folders, tmp_path):
    for file in folders("mixtral").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with OffloadedDecoder(Checkpoint.open(tmp_path), 3) as decoder:
        whole = decoder.decode(PROMPT, NEW)
        last = max(decoder.layers[-1].pieces(int(whole.trace.experts[-1, -1, 0])), key=lambda piece: piece.offset)
        content = last.file.read_bytes()
        os.truncate(last.file, last.offset + 10)
        with pytest.raises(CheckpointError, match="ends at byte"):
            decoder.decode(PROMPT, NEW)
        last.file.write_bytes(content)  # the same inode: the decoder must recover from a failed request
        assert decoder.decode(PROMPT, NEW).counts.misses == whole.counts.misses


def test_a_layout_that_does_more_than_stack_and_concatenate_is_refused(folders):
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )
    from transformers.core_model_loading import MergeModulelist, Transpose, WeightConverter

    stock = get_checkpoint_conversion_mapping("mixtral")
    down = WeightConverter(".experts.*.w2.weight", ".experts.down_proj", [MergeModulelist(dim=0), Transpose(1, 2)])
    changed = [rule for rule in stock if ".experts.down_proj" not in rule.target_patterns] + [down]
    register_checkpoint_conversion_mapping("mixtral", changed, overwrite=True)
    try:
        with pytest.raises(FamilyError, match="Transpose"):
            load_without_experts(Checkpoint.open(folders("mixtral")), torch.float32)
    finally:
        register_checkpoint_conversion_mapping("mixtral", stock, overwrite=True)


@pytest.mark.skipif(not hasattr(os, "posix_fadvise") or storage_bytes() is None, reason="no /proc/self/io")
def test_storage_bytes_see_what_the_page_cache_hides(folders, tmp_path):
    for file in folders("mixtral").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with OffloadedDecoder(Checkpoint.open(tmp_path), EXPERTS, settings=Settings(io="buffered")) as decoder:
        decoder.decode(PROMPT, 2)
        warm = decoder.decode(PROMPT, 2).counts
        assert (warm.prefill.storage_bytes, warm.decode.storage_bytes, warm.io) == (0, 0, "buffered")
        for file in tmp_path.glob("*.safetensors"):
            with open(file, "rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        cold = decoder.decode(PROMPT, 2).counts
    assert cold.prefill.bytes == warm.prefill.bytes
    if cold.prefill.storage_bytes == 0:
        pytest.skip("this file system keeps the pages (tmpfs) or does not count")
    assert cold.prefill.storage_bytes > 0.5 * cold.prefill.bytes


@pytest.mark.skipif(storage_bytes() is None, reason="no /proc/self/io")
def test_direct_reads_come_from_the_storage_every_time(folders, tmp_path):
    for file in folders("mixtral").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    with OffloadedDecoder(Checkpoint.open(tmp_path), EXPERTS) as decoder:
        if decoder.io != "direct":
            pytest.skip(decoder.io_reason)
        for _ in range(2):
            counts = decoder.decode(PROMPT, 3).counts
            for part in (counts.prefill, counts.decode):
                assert part.bytes < part.read_bytes <= part.storage_bytes  # a file's last page counts whole there
                assert part.storage_bytes <= part.read_bytes + PAGE * part.calls


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no /dev/shm")
def test_files_in_memory_are_read_buffered_and_that_is_said(folders):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for file in folders("mixtral").iterdir():
            (Path(folder) / file.name).write_bytes(file.read_bytes())
        with OffloadedDecoder(Checkpoint.open(folder), 3) as decoder:
            assert (decoder.io, decoder.io_reason) == ("buffered", "tmpfs is memory, not storage")
            counts = decoder.decode(PROMPT, 3).counts
            assert counts.io == "buffered" and counts.decode.read_bytes == counts.decode.bytes

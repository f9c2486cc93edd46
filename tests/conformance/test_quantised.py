"""Checkpoints whose experts are stored in fp8 (DeepSeek-V3) or mxfp4 (gpt-oss), made small: gates train, and experts stay packed on disk."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from conformance.built import decoded_logits, IDS, PROMPT
from conformance.rows import TOP_K
from remoe_cli import load
from remoe_cli.delta import Delta, put
from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.families import family_of, find_gates
from remoe_cli.families.loader import gate_disk_names, in_memory, load_resident
from remoe_cli.families.quantised import dequantised, shape_of, weights
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.inspect_model import inspect
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.pack import pack

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.router", "lm_head"]}
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def quantise_fp8(folder: Path) -> None:
    """Every projection, 128 by 128 places a scale, as DeepSeek-V3 is published."""

    def packed(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith("_proj.weight") and "kv_a_proj" not in name:
            return {name: weight.bfloat16()}
        grid = torch.Size(-(-size // 128) for size in weight.shape)
        scales = torch.empty(grid)
        stored = torch.empty(weight.shape)
        for i in range(grid[0]):
            for j in range(grid[1]):
                block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
                scales[i, j] = weight[block].abs().max() / 448
                stored[block] = weight[block] / scales[i, j]
        return {name: stored.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}

    rewrite(folder, packed, FP8)


def quantise_mxfp4(folder: Path) -> None:
    """Every expert projection, 32 inputs a scale, as gpt-oss is published."""
    generator = torch.Generator().manual_seed(0)

    def packed(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: weight.bfloat16()}
        experts, inputs, outputs = weight.shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(122, 126, blocks.shape[:-1], generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    rewrite(folder, packed, MXFP4)


def rewrite(folder: Path, packed, config: dict) -> None:
    weight_map = {}
    for file in sorted(folder.glob("*.safetensors")):
        kept = {}
        for name, weight in load_file(file).items():
            kept |= packed(name, weight)
        save_file({name: tensor.contiguous() for name, tensor in kept.items()}, file, {"format": "pt"})
        weight_map |= dict.fromkeys(kept, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config, "dtype": "bfloat16"}))


@pytest.fixture(scope="module", params=["deepseek_v3", "gpt_oss"])
def quantised(request, tmp_path_factory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("quantised") / request.param
    if request.param == "deepseek_v3":  # 160 is no multiple of a block: its last ones are cut
        tiny_models.make(request.param, folder, moe_intermediate_size=160)
        quantise_fp8(folder)
    else:
        tiny_models.make(request.param, folder, intermediate_size=64)
        quantise_mxfp4(folder)
    return Checkpoint.open(folder)


def test_numbers_by_hand():
    stored = torch.tensor([[1.0, -2.0, 448.0]] * 130).to(torch.float8_e4m3fn)
    found = dequantised(stored, torch.tensor([[0.5], [2.0]]), torch.float32)
    assert found[127].tolist() == [0.5, -1.0, 224.0] and found[128].tolist() == [2.0, -4.0, 896.0]
    blocks = torch.arange(16, dtype=torch.uint8).add(16 * 15).view(1, 1, 1, 16)  # low halves 0 to 15, high ones -6
    found = dequantised(blocks, torch.full((1, 1, 1), 128, dtype=torch.uint8), torch.bfloat16)
    assert found.shape == (1, 32, 1)
    assert found[0, 0::2, 0].tolist() == [2 * x for x in (*E2M1, *(-x for x in E2M1))]
    assert found[0, 1::2, 0].tolist() == [-12.0] * 16


def test_weights_are_those_of_transformers(quantised):
    """transformers 5.24 can't read fp8 blocks that are cut, and needs accelerate."""
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    if quantised.model_type == "deepseek_v3":
        folder = quantised.folder.parent / "whole"
        tiny_models.make("deepseek_v3", folder, moe_intermediate_size=128)
        quantise_fp8(folder)
        quantised = Checkpoint.open(folder)
    ours = load_resident(quantised, torch.bfloat16, "cpu").state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(quantised.folder, dtype=torch.bfloat16).state_dict()
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]), name


def test_gates_are_found_and_nothing_else_trains(quantised):
    model = load_resident(quantised, torch.bfloat16, "cpu")
    gates, names = find_gates(model), gate_disk_names(model, quantised)
    model.requires_grad_(False)
    for gate in gates:
        gate.weight.requires_grad_(True)
    loss = model(IDS, labels=IDS).loss
    loss.backward()
    assert all(gate.weight.grad.abs().sum() > 0 for gate in gates)
    assert all(quantised.tensors[names[gate.names[0]]].dtype == "BF16" for gate in gates)


@pytest.mark.parametrize("store", ["checkpoint", "pack"])
def test_offloaded_equals_resident(quantised, tmp_path, store):
    model = load_resident(quantised, torch.bfloat16, "cpu")
    model.set_experts_implementation("eager")
    folder = None
    if store == "pack":
        pack(str(quantised.folder), folder := tmp_path / "packed")
    with OffloadedDecoder(quantised, TOP_K + 1, pack=folder) as decoder:
        done = decoder.decode(PROMPT, 5, keep_logits=True)
        read = sum(piece.nbytes for piece in decoder.layers[0].pieces(0))
    stored = sum(
        places.nbytes // decoder.n_experts + places.scales.nbytes // decoder.n_experts
        if quantised.model_type == "gpt_oss"
        else places.nbytes + places.scales.nbytes
        for name, places in weights(quantised).items()
        if places.scales and f".{decoder.layers[0].layer}.mlp.experts." in name and ("experts.0." in name or "experts.gate" in name or "experts.down" in name)
    )  # fmt: skip
    biases = 2 * (2 * 64 + 32) if quantised.model_type == "gpt_oss" else 0
    assert decoder.expert_bytes == read == stored + biases  # what is read is what is stored
    torch.testing.assert_close(done.logits, decoded_logits(model, PROMPT, done.ids), rtol=0.02, atol=0.05)


def test_inspect_says_its_sizes(quantised):
    found = inspect(str(quantised.folder))
    assert found["supported"] and found["reason"] is found["decode_reason"] is None
    assert found["expert_bytes"] and found["outside_bytes"] and found["dtype"] == "bfloat16"
    assert all(gate["dtype"] == "bfloat16" for gate in found["gates"].values())


def test_shapes_in_memory(quantised):
    model = load_resident(quantised, torch.bfloat16, "cpu")
    experts = find_gates(model)[0].experts
    for name, info in weights(quantised).items():
        if name.endswith(".experts.down_proj"):
            assert shape_of(info) == tuple(experts.down_proj.shape)


@pytest.mark.parametrize("fault", ["lost", "misfit"])
def test_scales_that_are_lost_or_do_not_fit(quantised, tmp_path, fault):
    folder = Path(shutil.copytree(quantised.folder, tmp_path / "model"))

    def spoilt(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        if name.endswith(("_scale_inv", "_scales")):
            return {} if fault == "lost" else {name: torch.cat([tensor] * 3, 1)}
        return {name: tensor}

    rewrite(folder, spoilt, quantised.config["quantization_config"])
    expected = (FamilyError, "does not know") if fault == "lost" else (CheckpointError, "do not fit")
    with pytest.raises(expected[0], match=expected[1]):
        load_resident(Checkpoint.open(folder), torch.bfloat16, "cpu")


def test_delta_goes_on_in_both_loaders(quantised, tmp_path):
    """transformers' own loader, which needs accelerate for quantised weights, and the decoder."""
    pytest.importorskip("accelerate")
    if quantised.model_type == "deepseek_v3":
        pytest.skip("transformers 5.24 can't read fp8 blocks that are cut")
    model = load_resident(quantised, torch.bfloat16, "cpu")
    names = gate_disk_names(model, quantised)
    tuned = {names[name]: p.detach() + 0.5 for gate in find_gates(model) for name, p in gate.parameters.items()}
    Delta.of(quantised, tuned, "remoe", {}).save(tmp_path)
    put(model, in_memory(model, quantised, tuned))
    with torch.no_grad():
        expected = model(IDS).logits
        assert torch.equal(load(str(quantised.folder), str(tmp_path))(IDS).logits, expected)
    with OffloadedDecoder(quantised, TOP_K + 1) as decoder:
        decoder.apply_gates(in_memory(model, quantised, Delta.load(tmp_path).tensors))
        done = decoder.decode(IDS[0].tolist(), 1, keep_logits=True)
    torch.testing.assert_close(done.logits[0], expected[0, -1], rtol=0.02, atol=0.05)


def test_other_methods_are_refused(quantised):
    config = {**quantised.config, "quantization_config": {"quant_method": "awq"}}
    with pytest.raises(FamilyError, match=r"awq.*fp8, mxfp4"):
        family_of(dataclasses.replace(quantised, config=config).config)

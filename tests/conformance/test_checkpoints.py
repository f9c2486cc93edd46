"""Checkpoints as they are published: text parts of multimodal models, layers for multi-token prediction, what disagrees with
its config.json, and what is refused before any weight is read."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from conformance.rows import EXPERTS, HIDDEN, LAYERS, settings_of
from remoe_cli.errors import CheckpointError, FamilyError, RemoeError
from remoe_cli.families import FAMILIES, family_of, find_gates
from remoe_cli.families.loader import experts_on_disk, gate_disk_names, load_resident, meta_model
from remoe_cli.families.table import WRAPPERS
from remoe_cli.hub.checkpoint import Checkpoint, INDEX
from remoe_cli.offload import OffloadedDecoder

PROMPT = [5, 17, 80, 3]
VISION = {
    "llama4": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 128, "image_size": 28,
        "patch_size": 14, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32,
    },
    "gemma4": {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "intermediate_size": 32,
    },
    "qwen3_5_moe": {"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 32},
}  # fmt: skip


def multimodal(model_type: str, folder: Path) -> Checkpoint:
    from transformers import AutoConfig, AutoModelForImageTextToText

    settings = {"text_config": settings_of(WRAPPERS[model_type]), "vision_config": VISION[model_type]}
    if model_type == "gemma4":
        settings["audio_config"] = None
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **settings)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return Checkpoint.open(folder)


@pytest.mark.parametrize("model_type", VISION)
def test_the_text_part_of_a_multimodal_model(model_type, tmp_path):
    checkpoint = multimodal(model_type, tmp_path)
    assert checkpoint.model_type == model_type
    assert family_of(checkpoint.config).model_type == WRAPPERS[model_type]
    model = load_resident(checkpoint, torch.float32, "cpu")
    names = gate_disk_names(model, checkpoint)
    assert len(names) == len(find_gates(model)) == LAYERS
    assert {name.partition("layers.")[0].partition("model.")[2] for name in names.values()} == {"language_model."} or (
        model_type == "llama4" and all(name.startswith("language_model.model.layers.") for name in names.values())
    )
    if model_type == "llama4":
        return  # its experts run all at once: test_gaps.py
    with OffloadedDecoder(checkpoint, 3) as decoder, torch.inference_mode():
        done = decoder.decode(PROMPT, 3)
        for length in range(3):
            logits = model(torch.tensor([PROMPT + done.ids[:length]])).logits
            assert int(logits[0, -1].argmax()) == done.ids[length]


@pytest.fixture
def deepseek(folders, tmp_path) -> Path:
    """A copy of a tiny DeepSeek-V3."""
    shutil.copytree(folders("deepseek_v3"), tmp_path / "model")
    return tmp_path / "model"


def test_layers_for_multi_token_prediction_are_left_alone(deepseek):
    """Published DeepSeek-V3 and GLM-4.5 checkpoints hold one layer more than the model has, with a gate and experts of its
    own."""
    before = Checkpoint.open(deepseek)
    layer = [name for name in before.tensors if name.startswith("model.layers.2.")]
    further = {name.replace(".2.", f".{LAYERS}.", 1): before.read(name) * 2 for name in layer}
    for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight"):
        further[f"model.layers.{LAYERS}.{name}"] = torch.ones(HIDDEN)
    further[f"model.layers.{LAYERS}.eh_proj.weight"] = torch.ones(HIDDEN, 2 * HIDDEN)
    save_file(further, deepseek / "model-mtp.safetensors", metadata={"format": "pt"})
    index = json.loads((deepseek / INDEX).read_text())
    index["weight_map"].update(dict.fromkeys(further, "model-mtp.safetensors"))
    (deepseek / INDEX).write_text(json.dumps(index))
    after = Checkpoint.open(deepseek)
    assert len(after.tensors) == len(before.tensors) + len(further)
    model = load_resident(after, torch.float32, "cpu")
    assert [gate.layer for gate in find_gates(model)] == [layer.layer for layer in experts_on_disk(after)] == [1, 2]
    assert not {*gate_disk_names(model, after).values()} & {*further}
    with OffloadedDecoder(after, 3) as decoder, torch.inference_mode():
        (first,) = decoder.decode(PROMPT, 1).ids
        assert first == int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())


def test_a_selection_bias_stays_fp32(deepseek):
    model = load_resident(Checkpoint.open(deepseek), torch.bfloat16, "cpu")
    assert model.get_submodule("model.layers.1.self_attn.o_proj").weight.dtype == torch.bfloat16
    for gate in find_gates(model):
        assert gate.selection_bias.dtype == torch.float32 and gate.selection_bias.abs().sum() > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": LAYERS + 1}, "lacks|holds 0 of"),
        ({"n_routed_experts": 2 * EXPERTS}, "n_routed_experts|cannot be loaded|does not fit|lacks|holds"),
        ({"moe_intermediate_size": 32}, "cannot be loaded|does not fit"),
        ({"hidden_size": 64}, "cannot be loaded|does not fit"),
    ],
    ids=str,
)
def test_a_config_that_disagrees_with_the_weights_is_refused(deepseek, changes, words):
    config = json.loads((deepseek / "config.json").read_text())
    (deepseek / "config.json").write_text(json.dumps({**config, **changes}))
    checkpoint = Checkpoint.open(deepseek)
    for attempt in (lambda: load_resident(checkpoint, torch.float32, "cpu"), lambda: OffloadedDecoder(checkpoint, 3)):
        with pytest.raises(CheckpointError, match=words) as caught:
            attempt()
        assert len(str(caught.value).splitlines()) == 1


def test_a_gate_of_another_shape_is_refused(deepseek):
    checkpoint = Checkpoint.open(deepseek)
    name = "model.layers.1.mlp.gate.weight"
    shard = checkpoint.tensors[name].file
    tensors = load_file(shard)
    save_file({**tensors, name: torch.zeros(EXPERTS // 2, HIDDEN)}, shard, metadata={"format": "pt"})
    with pytest.raises(RemoeError, match=r"cannot be loaded|does not fit"):
        load_resident(Checkpoint.open(deepseek), torch.float32, "cpu")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.uint8], ids=str)
def test_a_gate_that_someone_quantised_is_refused(deepseek, dtype):
    """Although config.json says nothing of it."""
    name = "model.layers.1.mlp.gate.weight"
    shard = Checkpoint.open(deepseek).tensors[name].file
    tensors = load_file(shard)
    save_file({**tensors, name: tensors[name].to(dtype)}, shard, metadata={"format": "pt"})
    checkpoint = Checkpoint.open(deepseek)
    assert family_of(checkpoint.config).model_type == "deepseek_v3"
    model = meta_model(checkpoint, torch.float32)
    with pytest.raises(FamilyError, match=f"the gate {name} is stored as .*must be BF16, F16 or F32") as caught:
        gate_disk_names(model, checkpoint)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("model_type", ["doge", "zaya", "inkling_text", "mistral4", "minimax_m3_vl"])
def test_a_type_that_transformers_knows_and_remoe_does_not(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    assert model_type in CONFIG_MAPPING
    with pytest.raises(FamilyError, match=f"family {model_type!r}, which remoe does not know yet") as caught:
        family_of({"model_type": model_type, "num_experts": 8, "num_experts_per_tok": 2}, "org/model")
    assert len(str(caught.value).splitlines()) == 1 and all(name in str(caught.value) for name in FAMILIES)

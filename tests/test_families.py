"""Gates are found by name and by shape, under the names they have on disk; what is unsupported is refused by name."""

import json

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file

from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.families import FAMILIES, family_of, find_gates, probabilities, RouterTap, top_k_of
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.families.table import WRAPPERS
from remoe_cli.hub.checkpoint import Checkpoint


@pytest.fixture(params=tiny_models.MODEL_TYPES)
def checkpoint(request, tmp_path):
    return Checkpoint.open(tiny_models.make(request.param, tmp_path / "model"))


def test_gates_have_their_on_disk_names_and_values(checkpoint):
    model = load_resident(checkpoint, torch.float32, "cpu")
    names = gate_disk_names(model, checkpoint)
    parameters = dict(model.named_parameters())
    layers = tiny_models.LAYERS - (checkpoint.model_type in tiny_models.FIRST_DENSE)
    assert len(names) == layers * len(FAMILIES[checkpoint.model_type].tensors)
    for memory, disk in names.items():
        torch.testing.assert_close(parameters[memory].data, checkpoint.read(disk), rtol=0, atol=0)
        assert checkpoint.tensors[disk].shape[0] == tiny_models.EXPERTS


def test_tap_sees_what_the_router_used(checkpoint):
    model = load_resident(checkpoint, torch.float32, "cpu")
    gates = find_gates(model)
    with RouterTap(gates) as tap, torch.no_grad():
        model(torch.arange(10).view(2, 5), use_cache=False)
        routed = tap.take()
    for gate, layer in zip(gates, routed, strict=True):
        assert layer.logits_NE.shape == (10, gate.n_experts) and layer.choice_NK.shape == (10, gate.top_k)
        again = torch.nn.functional.linear(layer.hidden_ND, gate.router.weight, getattr(gate.router, "bias", None))
        torch.testing.assert_close(layer.logits_NE, again)
        top = probabilities(layer.logits_NE).topk(gate.top_k).indices
        assert torch.equal(top.sort(-1).values, layer.choice_NK.sort(-1).values)


def test_tap_records_the_first_pass_after_start_only(checkpoint):
    model = load_resident(checkpoint, torch.float32, "cpu")
    with RouterTap(find_gates(model)) as tap, torch.no_grad():
        model(torch.tensor([[1, 2, 3]]))
        model(torch.tensor([[4, 5]]))
        assert tap.take()[0].choice_NK.shape[0] == 3
        model(torch.tensor([[4, 5]]))
        with pytest.raises(FamilyError, match="recorded nothing"):
            tap.take()
        tap.start()
        model(torch.tensor([[4, 5]]))
        assert tap.take()[0].choice_NK.shape[0] == 2


def test_probabilities_sum_to_one_in_fp32():
    p = probabilities(torch.randn(4, 8, dtype=torch.bfloat16) * 10)
    assert p.dtype == torch.float32
    torch.testing.assert_close(p.sum(-1), torch.ones(4))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama", "hidden_size": 8}, "dense"),
        ({"model_type": "doge", "num_experts": 16384}, "doge"),
        ({"model_type": "gpt_oss", "num_local_experts": 32, "quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 256}, "num_experts_per_tok in config.json is None"),
        ({"model_type": "my_moe", "num_experts": 8, "auto_map": {"AutoModelForCausalLM": "m.M"}}, "code of its own"),
    ],
)
def test_unsupported_models_are_refused_by_name(config, words):
    with pytest.raises(FamilyError, match=words) as caught:
        family_of(config, "org/model")
    assert "org/model" in str(caught.value)


def test_a_moe_type_without_a_moe_layer_is_refused(tmp_path):
    folder = tiny_models.make("qwen3_moe", tmp_path / "model", mlp_only_layers=[0, 1, 2])
    model = load_resident(Checkpoint.open(folder), torch.float32, "cpu")
    with pytest.raises(FamilyError, match="no layer of this model has a router"):
        find_gates(model)


def test_names_that_only_look_like_gates_are_not(tmp_path):
    """A k_proj whose shape happens to be [E, D] is no gate."""
    folder = tiny_models.make("qwen3_moe", tmp_path / "model", num_key_value_heads=1, head_dim=8, num_attention_heads=4)
    checkpoint = Checkpoint.open(folder)
    shape = checkpoint.tensors["model.layers.0.self_attn.k_proj.weight"].shape
    assert shape == checkpoint.tensors["model.layers.0.mlp.gate.weight"].shape
    names = gate_disk_names(load_resident(checkpoint, torch.float32, "cpu"), checkpoint)
    assert all(".mlp.gate." in name for name in names.values())


def test_real_configs(shared):
    """The real config.json of each family is accepted, fp8 and mxfp4 ones too, and the others are refused."""
    for folder in sorted(shared("data/configs").iterdir()):
        path = folder / "config.json"
        if not path.is_file():
            continue
        config = json.loads(path.read_text())
        supported = {**FAMILIES, **WRAPPERS}.keys() >= {config["model_type"]}
        supported &= (config.get("quantization_config") or {}).get("quant_method") in (None, "fp8", "mxfp4")
        supported &= config.get("expert_dtype") != "fp4"
        if supported:
            assert config["model_type"] in (*(found := family_of(config, folder.name)).wrappers, found.model_type)
            assert top_k_of(config) >= 1
        else:
            with pytest.raises(FamilyError):
                family_of(config, folder.name)


def test_gate_names_agree_with_the_published_table(shared):
    """The table also lists what has "gate" in its name and routes nothing: qwen2_moe's shared_expert_gate [1, D]."""
    table = json.loads(shared("data/configs/gate_keys_transformers_5.24.0.json").read_text())
    others = ("shared_expert_gate", "correction_bias", "tid2eid", "compressor")
    both = {name: family for name, family in FAMILIES.items() if name in table and name != "deepseek_v4"}
    assert len(both) == len(table) - 1  # deepseek_v4's had hash layers only, which have no gate
    for model_type, family in both.items():
        in_memory, on_disk = (
            {name for name in table[model_type][kind] if not any(word in name for word in others)}
            for kind in ("mem", "disk")
        )
        layers = {int(name.split(".layers.")[1].split(".")[0]) for name in in_memory}
        assert {f"model.{family.disk_name(layer, tensor)}" for layer in layers for tensor in family.tensors} == on_disk
        assert {f"model.layers.{n}.{family.router}.{tensor}" for n in layers for tensor in family.tensors} == in_memory


def test_missing_tensor_is_named(tmp_path):
    folder = tiny_models.make("mixtral", tmp_path / "model")
    shard = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(shard)
    gone = next(iter(tensors))
    save_file({k: v for k, v in tensors.items() if k != gone}, shard, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="lacks"):
        load_resident(Checkpoint.open(folder), torch.float32, "cpu")

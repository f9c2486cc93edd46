"""Scopes beyond gates and heads: adapters on attention and the whole model, and that a delta carries them exactly."""

import pytest
import tiny_models
import torch
from torch import nn
from training import endless, recipe_of

import remoe_cli
from remoe_cli.apply import apply
from remoe_cli.delta import Delta, gates_for, heads_for, heads_on_disk, put
from remoe_cli.errors import DeltaError, FamilyError
from remoe_cli.families import find_gates
from remoe_cli.families.loader import disk_names, gate_disk_names, in_memory, load_resident, on_disk
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.recipe import Objective
from remoe_cli.train.scope import Scope
from remoe_cli.train.trainer import train

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
COVERAGE = Objective(name="coverage-temporal", cache=3)


@pytest.fixture(params=tiny_models.MODEL_TYPES)
def checkpoint(request, folders) -> Checkpoint:
    return Checkpoint.open(folders(request.param))


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


def attention(model) -> set[str]:
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if ".self_attn." in name and isinstance(module, nn.Linear)
    }


def tuned(checkpoint, scope):
    """The trained model, its delta and what training left behind, as `remoe finetune` makes them."""
    model = load_resident(checkpoint, torch.float32, "cpu")
    gates, names = find_gates(model), gate_disk_names(model, checkpoint)
    done = train(model, gates, endless(20, 50, 3), recipe_of(COVERAGE, scope=scope, lora_rank=2, lr=1e-2))
    tensors = {names[name]: tensor for name, tensor in done.gates.items()}
    tensors |= on_disk(model, checkpoint, done.others)
    return model, Delta.of(checkpoint, tensors, "test", {}, heads_on_disk(done.heads, names, gates)), done


def test_adapters_start_as_no_change_and_end_as_plain_weights(checkpoint):
    model = load_resident(checkpoint, torch.float32, "cpu")
    before, names, weights = logits(model), attention(model), dict(model.state_dict())
    assert len(names) >= 4 * model.config.num_hidden_layers
    scope = Scope(model, find_gates(model), recipe_of(COVERAGE, scope="gates+lora", lora_rank=3))
    assert torch.equal(logits(model), before)
    ups = [name for name in scope.parameters if name.endswith(".up")]
    assert {name.replace(".up", ".weight") for name in ups} == names
    expected = {}
    with torch.no_grad():
        for up in ups:
            scope.parameters[up].normal_(generator=torch.Generator().manual_seed(1))
            down, name = scope.parameters[up.replace(".up", ".down")], up.replace(".up", ".weight")
            assert down.shape[0] == 3 and down.abs().sum() > 0
            expected[name] = weights[name] + scope.parameters[up] @ down
    adapted = logits(model)
    others = scope.trained_others({})
    assert set(others) == names and torch.equal(logits(model), adapted)
    for name, weight in expected.items():
        torch.testing.assert_close(others[name], weight)
    assert set(model.state_dict()) == set(weights)


@pytest.mark.parametrize("scope", ["gates+lora", "full"])
def test_a_delta_carries_all_that_training_changed(checkpoint, tmp_path, scope):
    base = load_resident(checkpoint, torch.float32, "cpu").state_dict()
    model, delta, done = tuned(checkpoint, scope)
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, base[name])}
    gates = {name for gate in find_gates(model) for name in gate.names}
    if scope == "full":
        assert set(delta.tensors) == set(checkpoint.tensors) and len(changed) > 0.9 * len(base)
    else:
        assert changed == gates | attention(model) and set(done.others) == attention(model)
    delta.save(tmp_path / "delta")
    again = Delta.load(tmp_path / "delta")
    assert not again.is_applied(checkpoint) and set(again.heads) == set(delta.heads) and delta.heads
    out = apply(str(tmp_path / "delta"), str(checkpoint.folder), tmp_path / "out")
    patched = load_resident(Checkpoint.open(out), torch.float32, "cpu")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, patched.state_dict()[name]), name
    assert torch.equal(logits(patched), logits(model)) and again.is_applied(Checkpoint.open(out))
    names = gate_disk_names(patched, checkpoint)
    assert heads_for(again, names, find_gates(patched)).kinds == ("temporal",)
    with pytest.raises(DeltaError, match=r"changes more.*remoe apply"):
        gates_for(names, again)
    loaded = remoe_cli.load(str(checkpoint.folder), str(tmp_path / "delta"), dtype=torch.float32)
    assert torch.equal(logits(loaded), logits(model))
    fresh = load_resident(checkpoint, torch.float32, "cpu")
    found = in_memory(fresh, checkpoint, again.tensors)
    assert changed <= set(found)
    put(fresh, found)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, fresh.state_dict()[name]), name
    if scope == "gates+lora":
        assert set(gates_for(disk_names(patched, checkpoint), again)) == changed


def test_a_part_of_merged_experts_is_refused(folders):
    checkpoint = Checkpoint.open(folders("qwen3_moe"))
    model = load_resident(checkpoint, torch.float32, "cpu")
    whole = {name: checkpoint.read(name) for name in checkpoint.tensors}
    assert set(in_memory(model, checkpoint, whole)) == set(model.state_dict())
    for part in (".experts.1.up_proj.", ".up_proj."):
        less = {name: tensor for name, tensor in whole.items() if part not in name}
        with pytest.raises(FamilyError, match=r"a part of .*experts\.gate_up_proj is missing"):
            in_memory(model, checkpoint, less)


def test_a_tensor_that_the_checkpoint_does_not_store_is_refused(folders):
    checkpoint = Checkpoint.open(folders("mixtral"))
    model = load_resident(checkpoint, torch.float32, "cpu")
    with pytest.raises(FamilyError, match=r"stores no model\.norm\.weight of"):
        on_disk(model, checkpoint, {"model.norm.weight": torch.zeros(3)})
    assert on_disk(model, checkpoint, {}) == {}

"""Selection biases refitted: each expert gets back the load that it had, as the router itself counts it."""

import copy

import pytest
import torch
from commands import make_model, make_texts, QUICK
from training import documents_of, load

from remoe_cli.delta import gates_for, put
from remoe_cli.errors import FamilyError
from remoe_cli.families import find_gates, RouterTap
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.finetune import Asked, finetune
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.train.packing import batches
from remoe_cli.train.refit import balance, refit, require_biases

TEXTS = documents_of(*[60] * 12)


def loads(model, gates) -> torch.Tensor:
    """[L, E], counted by hand."""
    found = torch.zeros(len(gates), gates[0].n_experts)
    with torch.no_grad(), RouterTap(gates) as tap:
        for text in TEXTS:
            tap.start()
            model(torch.tensor([text]))
            for row, layer in zip(found, tap.take(), strict=True):
                for expert in layer.choice_NK.flatten().tolist():
                    row[expert] += 1 / (60 * len(TEXTS))
    return found


@pytest.mark.parametrize("model_type", ["minimax_m2", "ernie4_5_moe", "kolibri1", "deepseek_v3", "lfm2_moe"])
def test_loads_are_the_bases_again(model_type):
    """deepseek_v3 limits groups, lfm2_moe keeps its bias on the block, kolibri1 adds it to logits."""
    model = load(model_type).eval()
    gates = find_gates(model)[:1]  # later layers see other hidden states, once an earlier one's choices change
    gate = gates[0]
    base = {name: parameter.detach().clone() for name, parameter in gate.parameters.items()}
    others = {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in (*base, gate.bias)}
    wanted = loads(model, gates)
    tuned = {name: tensor + 0.3 * torch.randn(tensor.shape) for name, tensor in base.items()}
    found = refit(model, gates, base, tuned, batches(TEXTS, 60, 4))
    after = loads(model, gates)
    worst = float((after - wanted).abs().max())
    assert found.before > 0.03 and worst == pytest.approx(found.after, abs=1e-4)
    assert worst < (0.02 if model_type == "deepseek_v3" else 0.005)
    assert [*found.biases] == [gate.bias]
    assert torch.equal(model.state_dict()[gate.bias], found.biases[gate.bias])
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in others.items())
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in tuned.items())


def test_a_bias_that_fits_stays_as_it_is():
    model = load("minimax_m2").eval()
    gates = find_gates(model)
    before = {gate.bias: gate.selection_bias.clone() for gate in gates}
    base = {name: parameter.detach().clone() for gate in gates for name, parameter in gate.parameters.items()}
    found = refit(model, gates, base, base, batches(TEXTS, 60, 4))
    assert found.before == found.after == 0.0
    assert all(torch.equal(found.biases[name].view(-1), bias) for name, bias in before.items())


def test_one_expert_by_hand():
    """Top-1: expert 0 scores 1/11, 2/11, ... 10/11, expert 1 always 1/2. To win the three best tokens and not the fourth (7/11),
    expert 0 has to lie between 8/11 - 1/2 and 7/11 - 1/2 behind."""
    gate = copy.deepcopy(find_gates(load("minimax_m2"))[0])
    gate.router.top_k = 1
    with torch.no_grad():
        gate.router.weight.zero_()
        gate.router.weight[0, 0] = 1.0
        gate.router.weight[2:, 1] = -100.0
        gate.selection_bias.zero_()
    hidden = torch.zeros(10, gate.router.weight.shape[1])
    hidden[:, 0] = torch.logit(torch.arange(1, 11) / 11)
    hidden[:, 1] = 1.0  # experts 2 to 7 score 0
    target = torch.zeros(8)
    target[0], target[1] = 0.3, 0.7  # expert 1 scores 1/2
    before, after = balance(gate, hidden, hidden @ gate.router.weight.T, target)
    assert before == pytest.approx(0.2) and after == pytest.approx(0.0, abs=1e-6)
    lead = float(gate.selection_bias[0] - gate.selection_bias[1])
    assert 1 / 2 - 8 / 11 < lead < 1 / 2 - 7 / 11


def test_families_without_a_bias_are_refused():
    with pytest.raises(FamilyError, match="olmoe selects its experts without a bias"):
        require_biases(find_gates(load("olmoe")))


def test_a_run_that_refits_ships_its_biases(tmp_path):
    """finetune, then what eval and decode do with the delta."""
    model, texts = make_model(tmp_path / "model", "minimax_m2"), make_texts(tmp_path / "texts.jsonl", rows=120)
    settings = (*QUICK[1::2], "train.refit_bias=true", "train.lr=0.05")
    done = finetune(str(model), Asked("remoe", str(texts), 3, settings), out=tmp_path / "run")
    biases = {name for name in done.delta.tensors if name.endswith("e_score_correction_bias")}
    checkpoint = Checkpoint.open(model)
    assert len(biases) == 3 and all(checkpoint.tensors[name].shape == (8,) for name in biases)
    assert any(not torch.equal(done.delta.tensors[name], checkpoint.read(name)) for name in biases)
    assert any("selection biases refitted" in line for line in done.run.facts["notes"])
    with OffloadedDecoder(checkpoint, 3) as decoder, torch.no_grad():
        decoder.apply_gates(gates_for(decoder.disk_names, done.delta))
        ids = decoder.decode([5, 17, 80, 3], 4).ids
        resident = load_resident(checkpoint, torch.float32, "cpu")
        put(resident, gates_for(gate_disk_names(resident, checkpoint), done.delta))
        for length, token in enumerate(ids):
            assert int(resident(torch.tensor([[5, 17, 80, 3, *ids[:length]]])).logits[0, -1].argmax()) == token
        for gate in find_gates(resident):
            disk = gate_disk_names(resident, checkpoint)[gate.bias]
            assert torch.equal(gate.selection_bias, done.delta.tensors[disk])

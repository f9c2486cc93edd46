"""Every family, held to the same promises: see rows.py for the rows, docs/families.md for what is not applicable and why."""

import copy

import pytest
import torch
from training import CE_ONLY, documents_of, recipe_of

from conformance.built import decoded_logits, IDS, PROMPT
from conformance.rows import EXPERTS, HIDDEN, LAYERS, PRESENT, ROWS, TOP_K
from remoe_cli.apply import apply
from remoe_cli.delta import put
from remoe_cli.families import FAMILIES, find_gates, RouterTap
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.recipe import Objective
from remoe_cli.stream.stream import Stream
from remoe_cli.train.packing import batches
from remoe_cli.train.prepare import use_quick_experts
from remoe_cli.train.trainer import _Loop, train

NEW = 6
LOCALITY = Objective(trust=0.0, scale=5.0)  # Trust compares with gates on hidden states that move with the gates


def rows(suite: str):
    """The rows of the suite that this family passes."""
    names = [name for name, row in PRESENT.items() if suite not in row.gaps and (suite != "gguf" or row.gguf)]
    return pytest.mark.parametrize("built", names, indirect=True, ids=str)


def test_every_family_has_a_row():
    assert {*ROWS} == {*FAMILIES}


@rows("gates")
def test_gates_are_found(built):
    layers = [n for n in range(built.row.layers) if n not in built.row.dense]
    assert [gate.layer for gate in built.gates] == layers
    for gate in built.gates:
        assert gate.weight.shape == (built.row.experts, HIDDEN) and gate.top_k == TOP_K
        assert (gate.bias != "") == built.row.bias
        assert gate.selection_bias is None or gate.selection_bias.shape == (built.row.experts,)
    tensors = FAMILIES[built.model_type].tensors
    names = [name for gate in built.gates for name in gate.names]
    assert len(names) == len(layers) * len(tensors)
    biases = [name for gate in built.gates for name in gate.biases]
    assert {*names, *biases} == {*built.disk_names}


@rows("names")
def test_gates_have_their_names_and_values_on_disk(built):
    parameters = built.model.state_dict()
    for memory, disk in built.disk_names.items():
        assert torch.equal(parameters[memory], built.checkpoint.read(disk))


@rows("choice")
def test_recorded_choice_is_what_the_experts_were_called_with(built):
    seen: dict[int, tuple] = {}
    handles = [
        gate.experts.register_forward_pre_hook(lambda _m, args, layer=gate.layer: seen.update({layer: args}))
        for gate in built.gates
    ]
    with RouterTap(built.gates) as tap, torch.no_grad():
        built.model(IDS)
        routed = tap.take()
    for handle in handles:
        handle.remove()
    for gate, layer in zip(built.gates, routed, strict=True):
        assert layer.logits_NE.shape == (IDS.numel(), gate.n_experts)
        assert layer.choice_NK.shape == layer.weight_NK.shape == (IDS.numel(), TOP_K)
        assert all(len({*chosen}) == TOP_K for chosen in layer.choice_NK.tolist())
        _assert_called_with(built.model_type, seen[gate.layer], layer)
        again = gate.logits(layer.hidden_ND, *gate.parameters.values())
        same = layer.score.log_probabilities(layer.logits_NE)
        torch.testing.assert_close(layer.score.log_probabilities(again), same, rtol=1e-4, atol=1e-4)
        assert torch.allclose(layer.probabilities_NE, same.exp(), atol=1e-6)


def _assert_called_with(model_type: str, args: tuple, layer) -> None:
    if model_type == "llama4_text":  # a copy of the tokens an expert, weighed, 0 where it was not chosen
        ran_NE = args[0].abs().sum(-1).view(EXPERTS, -1).T > 0
        chosen_NE = torch.zeros_like(ran_NE).scatter(1, layer.choice_NK, True)
        assert torch.equal(ran_NE, chosen_NE)
    elif model_type == "jetmoe":  # how many tokens each expert has, the tokens sorted by expert
        assert args[1] == layer.choice_NK.flatten().bincount(minlength=EXPERTS).tolist()
        order = layer.choice_NK.flatten().argsort(stable=True)
        tokens = layer.hidden_ND.repeat_interleave(TOP_K, 0)[order]
        assert torch.equal(tokens.sort(0).values, args[0].sort(0).values)
    else:
        assert torch.equal(args[1], layer.choice_NK) and torch.equal(args[2], layer.weight_NK)


@rows("training")
def test_nothing_but_gates_trains(built):
    model = copy.deepcopy(built.model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    (batch,) = batches(documents_of(24), 24, 1)
    train(model, find_gates(model), [batch], recipe_of(steps=1, accumulation=1, lr=1e-2))
    names = {name for gate in built.gates for name in gate.names}
    assert {name for name, parameter in model.named_parameters() if parameter.requires_grad} == names
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == names


@rows("gradient")
@pytest.mark.parametrize("objective", [CE_ONLY, LOCALITY], ids=["ce", "locality"])
def test_gradient_equals_finite_differences(built, objective):
    slope, difference = slopes(built.model, objective)
    assert slope > 0 and difference == pytest.approx(slope, rel=0.01)


def slopes(stock, objective: Objective) -> tuple[float, float]:
    """Along the gradient, in all gates at once: its own length, and the central difference of the loss. Of a text whose tokens
    keep their experts within the step."""
    model = copy.deepcopy(stock).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    gates = find_gates(model)
    base = {name: parameter.detach().clone() for gate in gates for name, parameter in gate.parameters.items()}
    for seed in range(8):
        put(model, base)
        if (found := _slopes(model, gates, objective, seed)) is not None:
            return found
    raise AssertionError("experts change within the step, whatever the text")


def _slopes(model, gates: list, objective: Objective, seed: int) -> tuple[float, float] | None:
    (batch,) = batches(documents_of(16, seed=seed), 16, 1)
    loop = _Loop(model, gates, recipe_of(objective, steps=1, accumulation=1, clip=1e9))
    loop.gradients([batch], 1)
    grads = {name: master.grad.clone() for name, master in loop.masters.tensors.items()}
    length = sum(float(grad.double().square().sum()) for grad in grads.values()) ** 0.5
    parameters = {name: parameter for gate in gates for name, parameter in gate.parameters.items()}
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}

    def at(step: float) -> tuple[float, list]:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start[name] + step * grads[name] / max(length, 1e-30))
        with RouterTap(gates) as tap:
            found = loop.gradients([batch], 1)["loss"]
            return found, [layer.choice_NK.sort(-1).values for layer in tap.take()]

    step = 1e-3
    (above, one), (below, other) = at(step), at(-step)
    return (length, (above - below) / (2 * step)) if all(map(torch.equal, one, other)) else None


@rows("delta")
@pytest.mark.parametrize("form", ["copy", "overlay"])
def test_delta_applied_and_loaded_again_gives_the_tuned_logits(built, tmp_path, form):
    out = apply(str(built.delta), str(built.checkpoint.folder), tmp_path / form, form)
    with torch.no_grad():
        assert torch.equal(load_resident(Checkpoint.open(out), torch.float32, "cpu")(IDS).logits, built.tuned_logits)
        assert not torch.equal(built.model(IDS).logits, built.tuned_logits)


@rows("peft")
@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # said of every module that is no norm layer
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # ernie's bias, which stays the base's
def test_delta_in_peft_gives_the_tuned_logits(built, tmp_path):
    """Of gates, and with the selection biases where those lie in the same module."""
    peft = pytest.importorskip("peft")
    modules = {name.rpartition(".")[0] for gate in built.gates for name in gate.names}
    inside = {name for gate in built.gates for name in gate.biases if name.rpartition(".")[0] in modules}
    for biases in [set()] + [inside] * bool(inside):
        names = {name for gate in built.gates for name in gate.names} | biases
        delta = built.delta_of(names, tmp_path / f"delta-{len(names)}")
        adapter = apply(str(delta), str(built.checkpoint.folder), tmp_path / f"peft-{len(names)}", "peft")
        model = load_resident(built.checkpoint, torch.float32, "cpu")
        for parameter in model.parameters():  # in memory aligned as that of PEFT's copies: else the last bits differ
            parameter.data = parameter.data.clone()
        model.requires_grad_(
            False
        )  # as PEFT does it: torch takes another convolution (jamba) for what needs no gradient
        stock = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in names}
        put(model, {name: built.tuned[name] for name in names})
        with torch.no_grad():
            expected = model(IDS).logits
            put(model, stock)
            tuned = peft.PeftModel.from_pretrained(model, adapter)
            found = tuned(IDS).logits
            assert torch.equal(found, expected)
            with tuned.disable_adapter():
                assert not torch.equal(tuned(IDS).logits, expected)


@rows("offload")
def test_offloaded_equals_resident(built):
    model = copy.deepcopy(built.model)
    model.set_experts_implementation("eager")
    assert len(built.checkpoint.files) > 2
    with OffloadedDecoder(built.checkpoint, TOP_K + 1) as decoder:
        done = decoder.decode(PROMPT, NEW, keep_logits=True)
        whole = OffloadedDecoder(built.checkpoint, EXPERTS)
        with whole:
            logits = whole.decode(PROMPT, NEW, keep_logits=True).logits
            assert torch.equal(logits, done.logits) or (
                not built.row.exact and torch.allclose(logits, done.logits, atol=1e-5)
            )
    assert done.counts.misses > 0 and done.trace.n_layers == len(built.gates)
    expected = decoded_logits(model, PROMPT, done.ids)
    torch.testing.assert_close(done.logits, expected, rtol=1e-4, atol=1e-4)
    assert [int(row.argmax()) for row in expected] == done.ids


@rows("streamed")
def test_streamed_gradients_equal_resident(built):
    """Of two micro-batches, with all terms of ReMoE and the base as teacher; rows of one document, which all families take."""
    recipe = recipe_of(Objective(target="base"), steps=4, accumulation=2, clip=1e9)
    micro = list(batches(documents_of(24, 24), 24, 1))
    model = copy.deepcopy(built.model)
    loop = _Loop(model, find_gates(model), recipe)
    use_quick_experts(model, loop.gates)
    expected, told = loop.gradients(micro, 1), loop.masters
    with Stream(built.checkpoint, torch.float32) as stream:
        streamed = _Loop(stream.model, stream.gates, recipe, stream)
        found = streamed.gradients(micro, 1)
        assert stream.traffic.layers >= built.row.layers
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for name, master in told.tensors.items():
        largest = float(master.grad.abs().max())
        torch.testing.assert_close(streamed.masters.tensors[name].grad, master.grad, rtol=0, atol=1e-5 * largest)


@rows("gguf")
def test_gguf_names(built):
    gguf = pytest.importorskip("gguf")
    architecture = getattr(gguf.MODEL_ARCH, built.row.gguf)
    names = gguf.get_tensor_name_map(architecture, LAYERS + 1)
    for gate in built.gates:
        for memory, tensor in zip(gate.names, FAMILIES[built.model_type].tensors, strict=True):
            found = names.get_name(built.disk_names[memory], try_suffixes=(".weight", ".bias"))
            assert found == f"blk.{gate.layer}.ffn_gate_inp.{tensor.rpartition('.')[2]}"

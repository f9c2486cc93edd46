"""Heads: where they start, what they say, how each scope trains them, and that a delta brings them back."""

import json
from dataclasses import replace

import pytest
import tiny_models
import torch
from commands import QUICK
from training import assert_same, documents_of, endless, load, recipe_of, step_gradients

from remoe_cli.apply import apply
from remoe_cli.delta import Delta, heads_for, heads_on_disk
from remoe_cli.errors import DeltaError, RecipeError
from remoe_cli.families import find_gates, Heads, KINDS, RouterTap
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.families.scores import SOFTMAX
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.objectives import OBJECTIVES
from remoe_cli.objectives.remoe import Routing, Segments
from remoe_cli.recipe import Objective, override, Recipe
from remoe_cli.train import state as states
from remoe_cli.train.packing import batches, collate
from remoe_cli.train.trainer import train

COVERAGE = Objective(name="coverage-spatio-temporal", coverage=1.0, cache=3, reuse_warmup=0.0)


# --- start and value --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_start_as_copies_of_the_gates(model_type, dtype):
    gates = find_gates(load(model_type, dtype))
    heads = Heads.of_gates(gates, KINDS)
    weights = [gate.router.weight for gate in gates]
    assert heads.kinds == KINDS and len(heads.temporal) == len(heads.spatio) == len(gates)
    for layer, gate in enumerate(gates):
        assert heads.temporal[layer].dtype == torch.float32 and not heads.temporal[layer].requires_grad
        assert torch.equal(heads.temporal[layer], gate.router.weight.float())
        assert torch.equal(heads.spatio[layer], weights[(layer + 1) % len(gates)].float())
    heads.temporal[0].zero_()
    assert gates[0].router.weight.abs().sum() > 0
    assert Heads.of_gates(gates, ["spatio"]).kinds == ("spatio",) and Heads.of_gates(gates, []).kinds == ()


def test_a_head_says_what_its_weights_say():
    heads = Heads(temporal=[torch.tensor([[1.0, 0.0], [0.0, 2.0]])])
    found = heads.probabilities("temporal", 0, torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    assert found[0].tolist() == [0.5, 0.5] and found[1].tolist() == pytest.approx([0.26894143, 0.7310586])


# --- scopes -----------------------------------------------------------------------------------------------------------


def changed(model, before) -> set[str]:
    return {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}


def trained_with(scope, model_type="gpt_oss", dtype=torch.float32, objective=COVERAGE, **settings):
    model = load(model_type, dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    recipe = recipe_of(objective, scope=scope, **{"lr": 1e-2, **settings})
    return model, before, train(model, find_gates(model), endless(20, 50, 3, 1), recipe)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_scope_moves_what_it_names(dtype):
    start = Heads.of_gates(find_gates(load("gpt_oss", dtype)), KINDS)
    for scope in ("gates", "heads", "gates+heads"):
        model, before, done = trained_with(scope, dtype=dtype)
        gates = {name for gate in find_gates(model) for name in gate.names}
        assert set(done.gates) == gates and not done.others
        assert changed(model, before) == (set() if scope == "heads" else gates)
        for name, tensor in done.gates.items():  # in the model as trained, rounded; untouched where heads alone train
            assert tensor.dtype == torch.float32 and torch.equal(tensor.to(dtype), model.state_dict()[name])
        if scope == "gates":
            assert done.heads is None
            continue
        for kind in KINDS:
            for old, new in zip(getattr(start, kind), getattr(done.heads, kind), strict=True):
                assert new.dtype == torch.float32 and not torch.equal(old, new) and not new.requires_grad


@pytest.mark.parametrize("name", ["coverage-temporal", "spatio-only", "decayed-coverage"])
def test_only_the_heads_that_the_objective_reads_are_there(name):
    _, _, done = trained_with("gates+heads", objective=replace(COVERAGE, name=name))
    assert done.heads.kinds == {"spatio-only": ("spatio",)}.get(name, ("temporal",))
    assert trained_with("gates+lora", objective=Objective())[2].heads is None


def test_the_pass_of_heads_alone_measures_what_the_others_measure():
    model, micro = load("deepseek_v2"), list(batches(documents_of(20, 9, 30), 32, 1))
    alone, grads = step_gradients(model, micro, recipe_of(COVERAGE, scope="heads"))
    both, both_grads = step_gradients(model, micro, recipe_of(COVERAGE, scope="gates+heads"))
    for name in ("ce", "trust", "coverage", "loss", "eor"):
        assert alone[name] == pytest.approx(both[name], rel=1e-6), name
    assert set(grads) == {name for name in both_grads if name.endswith(KINDS)}
    norm = both["grad_norm"] / alone["grad_norm"]  # clipped together, else the same gradient
    assert norm > 1 and alone["grad_norm"] > 1e-3


def test_coverage_in_the_trainer_is_the_objective_on_a_pass_by_hand():
    model = load("mixtral").eval()
    gates, (batch,) = find_gates(model), batches(documents_of(20), 20, 1)
    stats, _ = step_gradients(model, [batch], recipe_of(COVERAGE, scope="gates+heads"))
    with torch.no_grad(), RouterTap(gates) as tap:
        model(batch.ids_BT)
        routed = tap.take()
    logp = torch.stack([SOFTMAX.log_probabilities(layer.logits_NE) for layer in routed])
    weights = [gate.router.weight.detach() for gate in gates]
    temporal = torch.stack([(layer.hidden_ND @ w.T).softmax(-1) for layer, w in zip(routed, weights, strict=True)])
    after = [*weights[1:], weights[0]]
    spatio = torch.stack([(layer.hidden_ND @ w.T).softmax(-1) for layer, w in zip(routed, after, strict=True)])
    routing = Routing(logp, logp, torch.stack([layer.choice_NK for layer in routed]), temporal, spatio)
    total = OBJECTIVES[COVERAGE.name].terms(COVERAGE)["coverage"](routing, Segments.of(batch.document_BT))
    assert stats["coverage"] == pytest.approx(float(total) / 19, rel=1e-5)


def test_heads_gradients_do_not_depend_on_micro_batches_or_packing():
    texts = documents_of(20, 7, 1, 30, 2)
    forms = {
        "packed": [collate([texts], 60)],
        "single": list(batches(texts, 30, 1, packed=False)),
        "left": [collate([[text] for text in texts], 37, left=True)],
    }
    model, recipe = load("qwen3_moe"), recipe_of(COVERAGE, scope="gates+heads")
    stats, grads = step_gradients(model, forms.pop("packed"), recipe)
    assert any(name.endswith("spatio") for name in grads)
    for form, micro in forms.items():
        other, other_grads = step_gradients(model, micro, recipe)
        assert other == pytest.approx(stats, rel=1e-5, abs=1e-6), form
        assert_same(grads, other_grads, atol=1e-5, rtol=1e-5)


def test_heads_learn_to_cover_with_everything_else_frozen():
    fixed = next(endless(64, tokens=64))
    recipe = recipe_of(replace(COVERAGE, tau=0.1), scope="heads", steps=30, accumulation=1, lr=3e-2)
    model = load("deepseek_v2")
    done = train(model, find_gates(model), iter([fixed] * 30), recipe)
    assert done.steps[-1].terms["coverage"] < 0.8 * done.steps[0].terms["coverage"]
    assert done.steps[-1].terms["ce"] == pytest.approx(done.steps[0].terms["ce"], rel=1e-6)


@pytest.mark.parametrize("scope", ["heads", "gates+heads", "gates+lora", "full"])
def test_from_every_saved_step_all_that_trains_ends_bitwise_equal(tmp_path, scope):
    def run(state=None, save=None):
        model = load("mixtral")
        recipe = recipe_of(COVERAGE, scope=scope, steps=4, schedule="cosine", save_seconds=0, lr=1e-2, lora_rank=2)
        start = {"start": state.position} if state else {}
        rows = batches(documents_of(3, 50, 20, 41), 32, 1, repeat=True, **start)
        return model, train(model, find_gates(model), rows, recipe, state=state, save=save)

    whole_model, whole = run(save=lambda state: state.save(tmp_path / str(state.step)))
    for step in (1, 2, 3):
        state, _ = states.newest(tmp_path / str(step))
        model, rest = run(state)
        assert_same(rest.gates, whole.gates, rtol=0, atol=0)
        assert_same(model.state_dict(), whole_model.state_dict(), rtol=0, atol=0)
        for kind in KINDS:
            for one, other in zip(getattr(rest.heads, kind), getattr(whole.heads, kind), strict=True):
                assert torch.equal(one, other)


def test_a_scope_without_anything_to_train_is_refused():
    with pytest.raises(RecipeError, match="no heads"):
        override(Recipe(), ["train.scope=heads"])
    with pytest.raises(RecipeError, match="no heads"):
        override(Recipe(), ["train.scope=gates+heads"])
    with pytest.raises(RecipeError, match="spatio-only"):
        override(Recipe(), ["objective.name=spatio-only"])


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_steer_multiplies_the_locality_terms_and_no_anchor():
    model, micro = load("mixtral"), endless(20, 50)
    asked = []

    def steer(step):
        asked.append(step)
        return float(step - 1)

    objective = Objective(reuse_warmup=0.0, consistency_warmup=0.0)
    done = train(model, find_gates(model), micro, recipe_of(objective, steps=3), steer=steer)
    assert asked == [1, 2, 3] and [one.steer for one in done.steps] == [0.0, 1.0, 2.0]
    for one in done.steps:
        term, o = one.terms, objective
        local = o.reuse * term["reuse"] + o.smooth * term["smooth"] + o.lag * term["lag"] + o.window * term["window"]
        assert one.loss == pytest.approx(term["ce"] + o.trust * term["trust"] + one.steer * local, rel=1e-9)
    assert done.steps[0].row()["steer"] == 0.0


def test_heads_alone_survive_a_step_that_asks_nothing_of_them():
    model = load("mixtral")
    recipe = recipe_of(COVERAGE, scope="heads", steps=2, weight_decay=0.0)
    done = train(model, find_gates(model), endless(20), recipe, steer=lambda step: 0.0)
    assert [one.grad_norm for one in done.steps] == [0.0, 0.0]


def test_the_cosine_falls_from_the_end_of_the_warm_up():
    _, _, done = trained_with("gates", steps=10, schedule="cosine", lr_warmup=0.2, lr=1e-3)
    rates = [one.lr / 1e-3 for one in done.steps]
    assert rates[:2] == pytest.approx([0.5, 1.0])
    assert rates[2:] == sorted(rates[2:], reverse=True) and rates[2] < 1 and 0 < rates[-1] < 0.05
    assert rates[5] == pytest.approx(0.586824, abs=1e-6)  # (1 + cos(pi 4/9)) / 2


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["mixtral", "gpt_oss"])
def tuned(request, tmp_path):
    """A checkpoint, its gates, their names on disk, and a delta with heads."""
    checkpoint = Checkpoint.open(tiny_models.make(request.param, tmp_path / "base", torch.bfloat16))
    model = load_resident(checkpoint, torch.float32, "cpu")
    gates, names = find_gates(model), gate_disk_names(model, checkpoint)
    heads = Heads.of_gates(gates, KINDS)
    for weight in heads.spatio:
        weight += torch.rand(weight.shape, generator=torch.Generator().manual_seed(1))
    base = {name: checkpoint.read(name) for name in names.values()}
    delta = Delta.of(checkpoint, base, "heads-only", {}, heads_on_disk(heads, names, gates))
    return checkpoint, gates, names, heads, delta


def test_a_delta_brings_its_heads_back(tuned, tmp_path):
    checkpoint, gates, names, heads, delta = tuned
    delta.save(tmp_path / "delta")
    again = Delta.load(tmp_path / "delta")
    found = heads_for(again, names, gates)
    for kind in KINDS:
        for one, other in zip(getattr(found, kind), getattr(heads, kind), strict=True):
            assert torch.equal(one, other)
    stem = {"mixtral": "block_sparse_moe.gate", "gpt_oss": "mlp.router"}[checkpoint.model_type]
    assert {f"model.layers.0.{stem}.temporal", f"model.layers.2.{stem}.spatio"} < set(again.heads)
    assert delta.changed == 0 and not again.is_applied(checkpoint)
    again.save(tmp_path / "twice")
    for file in ("gates.safetensors", "heads.safetensors", "remoe.json"):
        assert (tmp_path / "delta" / file).read_bytes() == (tmp_path / "twice" / file).read_bytes()
    out = apply(str(tmp_path / "delta"), str(checkpoint.folder), tmp_path / "out")
    assert {name: checkpoint.sha256(name) for name in checkpoint.tensors} == {
        name: Checkpoint.open(out).sha256(name) for name in checkpoint.tensors
    }


def test_a_delta_without_heads_says_nothing_of_them(tuned, tmp_path):
    _, gates, names, _, delta = tuned
    delta.save(tmp_path / "delta")
    replace(delta, heads={}).save(tmp_path / "delta")
    assert not (tmp_path / "delta/heads.safetensors").exists()
    assert "heads" not in json.loads((tmp_path / "delta/remoe.json").read_text())
    assert heads_for(Delta.load(tmp_path / "delta"), names, gates) is None


@pytest.mark.parametrize("scope", ["heads", "gates+heads", "gates+lora", "full"])
def test_the_command_leaves_a_delta_of_its_scope(remoe, model, texts, scope):
    asked = ["--set", "objective.name=coverage-temporal", "--set", f"train.scope={scope}"]
    ran = remoe("finetune", model, "--data", texts, "--steps", 2, *QUICK, *asked, "--out", "run")
    assert ran.code == 0, ran.err
    delta, checkpoint = Delta.load("run/delta"), Checkpoint.open(model)
    loaded = load_resident(checkpoint, torch.float32, "cpu")
    heads = heads_for(delta, gate_disk_names(loaded, checkpoint), find_gates(loaded))
    assert heads is not None and heads.kinds == ("temporal",)
    assert (delta.changed == 0) == (scope == "heads")
    further = len(delta.tensors) - len(find_gates(loaded))
    assert (further > 0) == (scope in ("gates+lora", "full"))


def test_damaged_or_incomplete_heads_are_refused(tuned, tmp_path):
    _, gates, names, _, delta = tuned
    delta.save(tmp_path / "delta")
    file, facts = tmp_path / "delta/heads.safetensors", tmp_path / "delta/remoe.json"
    whole, described = file.read_bytes(), json.loads(facts.read_text())
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(DeltaError, match=r"the head .* is not the one"):
        Delta.load(tmp_path / "delta")
    file.write_bytes(whole)
    one = next(iter(described["heads"]))
    facts.write_text(json.dumps({**described, "heads": {k: v for k, v in described["heads"].items() if k != one}}))
    with pytest.raises(DeltaError, match="different heads"):
        Delta.load(tmp_path / "delta")
    for heads, words in (({}, "describes no heads"), ({one: {}}, "no sha256"), ([], "describes no heads")):
        facts.write_text(json.dumps({**described, "heads": heads}))
        with pytest.raises(DeltaError, match=words):
            Delta.load(tmp_path / "delta")
    facts.write_text(json.dumps(described))
    file.unlink()
    with pytest.raises(DeltaError):
        Delta.load(tmp_path / "delta")
    for heads in ({k: v for k, v in delta.heads.items() if k != one}, {**delta.heads, one: delta.heads[one][:-1]}):
        with pytest.raises(DeltaError, match=one):
            heads_for(replace(delta, heads=heads), names, gates)

"""The training loop: what it teaches, what it must not touch, and how it ends."""

import copy
import math
from itertools import islice, repeat

import pytest
import tiny_models
import torch
from training import assert_same, CE_ONLY, documents_of, endless, load, recipe_of, step_gradients, TERMS

from remoe_cli.families import find_gates
from remoe_cli.objectives.remoe import cross_entropy, Segments
from remoe_cli.recipe import Objective
from remoe_cli.train.masters import Masters
from remoe_cli.train.packing import Batch, batches, collate, Document, model_inputs
from remoe_cli.train.trainer import _Loop, train

# --- what changes and what does not -----------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_gates_change_and_only_gates_require_a_gradient(model_type, dtype):
    model = load(model_type, dtype)
    gates = find_gates(model)
    names = {name for gate in gates for name in gate.names}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = train(model, gates, endless(20, 50, 3, 1), recipe_of(lr=3e-2))
    assert len(trained.steps) == 3 and not trained.interrupted
    assert set(trained.gates) == names
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) == (name not in names), name
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (name in names)
        if name in names:  # the model holds the masters, rounded
            assert trained.gates[name].dtype == torch.float32
            assert torch.equal(parameter, trained.gates[name].to(parameter.dtype))
    assert not any(module.training for module in model.modules())


def test_the_balance_loss_is_off_and_said_so():
    model = load("mixtral", router_aux_loss_coef=0.5, output_router_logits=True)
    trained = train(model, find_gates(model), endless(20), recipe_of(steps=1))
    assert model.router_aux_loss_coef == model.config.router_aux_loss_coef == 0.0
    assert not model.config.output_router_logits
    assert any("balance loss is off" in note and "0.5" in note for note in trained.notes)


def test_top_one_with_renormalised_weights_is_warned_of():
    model = load("qwen3_moe", num_experts_per_tok=1)
    trained = train(model, find_gates(model), endless(20), recipe_of(CE_ONLY, steps=1))
    assert trained.steps[0].grad_norm == pytest.approx(0.0, abs=1e-6)
    assert any("top_k is 1" in note for note in trained.notes)
    model = load("deepseek_v2", num_experts_per_tok=1)  # weights are not renormalised
    trained = train(model, find_gates(model), endless(20), recipe_of(CE_ONLY, steps=1))
    assert trained.steps[0].grad_norm > 1e-3
    assert not any("top_k" in note for note in trained.notes)


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_micro_batch_size_changes_nothing(model_type):
    rows = list(islice(endless(20, 50, 3, 1, 40), 4))  # rows differ in documents, pairs and windows
    together = Batch(torch.cat([r.ids_BT for r in rows]), torch.cat([r.document_BT for r in rows]))
    recipe = recipe_of(steps=1)
    model = load(model_type)
    apart, apart_grad = step_gradients(model, rows, recipe)
    whole, whole_grad = step_gradients(model, [together], recipe)
    assert whole == pytest.approx(apart, rel=1e-6, abs=1e-6)
    assert_same(apart_grad, whole_grad, atol=1e-6, rtol=1e-4)
    one, four = load(model_type), load(model_type)
    first = train(one, find_gates(one), rows, recipe_of(steps=1, accumulation=4, lr=1e-5))
    second = train(four, find_gates(four), [together], recipe_of(steps=1, accumulation=1, lr=1e-5))
    assert_same(first.gates, second.gates, atol=1e-6, rtol=0)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_packing_and_padding_change_nothing(model_type, masked):
    lengths = (20, 7, 1, 30, 2)  # one token alone, and less than the largest lag
    texts = [Document(ids, [id % 3 == 0 for id in ids] if masked else None) for ids in documents_of(*lengths)]
    forms = {
        "packed": [collate([texts], 60)],
        "single": list(batches(texts, 30, 1, packed=False)),
        "right": [collate([[text] for text in texts], 37)],
        "left": [collate([[text] for text in texts], 37, left=True)],
        "left, packed": [collate([texts[:2], texts[2:]], 40, left=True)],
    }
    model, recipe = load(model_type), recipe_of(Objective(scale=5.0), steps=1)
    stats, grads = step_gradients(model, forms.pop("packed"), recipe)
    assert all(math.isfinite(value) for value in stats.values()) and stats["eor"] > 0.0 < stats["lag"]
    for form, micro in forms.items():
        other_stats, other_grads = step_gradients(model, micro, recipe)
        assert other_stats == pytest.approx(stats, rel=1e-5, abs=1e-6), form
        assert_same(grads, other_grads, atol=1e-5, rtol=1e-5)


def test_a_micro_batch_without_a_learned_token_only_adds_to_the_other_terms():
    ids = documents_of(20, 12, 30)
    masks = [[False] * 20, [True] * 12, [id % 2 == 0 for id in ids[2]]]
    texts = [Document(*text) for text in zip(ids, masks, strict=True)]
    together, apart = [collate([[text] for text in texts], 30)], [collate([[text]], 30) for text in texts]
    model, recipe = load("mixtral"), recipe_of()
    stats, grads = step_gradients(model, together, recipe)
    other_stats, other_grads = step_gradients(model, apart, recipe)
    assert other_stats == pytest.approx(stats, rel=1e-6, abs=1e-6)
    assert_same(grads, other_grads, atol=1e-6, rtol=1e-4)
    unmasked, _ = step_gradients(model, [collate([[one] for one in ids], 30)], recipe)
    assert {name for name in TERMS if stats[name] != pytest.approx(unmasked[name], rel=1e-9)} == {"ce"}
    learned, _ = step_gradients(model, apart[1:], recipe)
    assert learned["ce"] == pytest.approx(stats["ce"], rel=1e-6) and learned["eor"] != stats["eor"]
    alone, _ = step_gradients(model, apart[:1], recipe)
    assert alone["ce"] == 0.0 < alone["reuse"]


def test_terms_are_unweighted_means_and_the_loss_their_weighted_sum():
    model, objective = load("mixtral"), Objective(scale=3.0)
    stats, _ = step_gradients(model, list(islice(endless(20, 50), 2)), recipe_of(objective, steps=10), step=1)
    a_r, a_l = 3 * 1 / 2, 3 * 1 / 4  # warm-ups of 2 and 4 steps
    expected = stats["ce"] + 0.45 * stats["trust"] + a_r * 0.2 * stats["reuse"]
    expected += a_l * (0.05 * stats["smooth"] + 0.05 * stats["lag"] + 0.01 * stats["window"])
    assert stats["loss"] == pytest.approx(expected, rel=1e-9)
    assert stats["trust"] == pytest.approx(0.0, abs=1e-6) and stats["reuse"] > torch.tensor(2.0).log()


def test_cross_entropy_is_the_models_own():
    model = load("qwen3_moe").eval()
    ids = torch.tensor(documents_of(40))
    stats, _ = step_gradients(model, [Batch(ids, torch.zeros_like(ids))], recipe_of())
    assert stats["ce"] == pytest.approx(model(ids, labels=ids).loss.item(), rel=1e-5)
    assert stats["tokens"] == 40


def test_trust_compares_with_the_base_gates_on_the_current_hidden_states():
    """Slow twin: run the model by hand, layer by layer, with a hook on each router."""
    model = load("gpt_oss")
    base = copy.deepcopy(model).eval()
    gates = find_gates(model)
    loop = _Loop(model.eval(), gates, recipe_of())
    with torch.no_grad():
        for gate in gates:
            for parameter in gate.parameters.values():
                parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    seen, handles = {}, []
    for gate in gates:
        hook = lambda _, inputs, out, layer=gate.layer: seen.update({layer: (inputs[0], out[0])})  # noqa: E731
        handles.append(gate.router.register_forward_hook(hook))
    (batch,) = batches(documents_of(30), 30, 1)
    with torch.no_grad():
        model(batch.ids_BT)
        twin = 0.0
        for gate, twin_gate in zip(gates, find_gates(base), strict=True):
            hidden, logits = seen[gate.layer]
            p, q = logits.softmax(-1), twin_gate.router(hidden)[0].softmax(-1)
            twin += float((p * (p / q).log()).sum(-1).mean()) / len(gates)
    for handle in handles:
        handle.remove()
    stats = loop.gradients([batch], 1)
    assert twin > 0.1 and stats["terms"]["trust"] == pytest.approx(twin, rel=1e-4)


def test_gradient_equals_finite_differences_through_the_whole_model():
    """The last gate of gpt_oss, weight and bias: its own hidden states do not move, so Pref stays constant."""
    model = load("gpt_oss", torch.float64)
    model.set_experts_implementation("eager")
    micro, recipe = list(islice(endless(20, 9, 41), 2)), recipe_of(Objective(scale=5.0), steps=1, clip=1e9)
    _, grads = step_gradients(model, micro, recipe)
    gate = find_gates(model)[-1]
    generator = torch.Generator().manual_seed(3)
    direction = {name: torch.randn(grads[name].shape, generator=generator, dtype=torch.float64) for name in gate.names}
    slope = sum(float((grads[name] * direction[name]).sum()) for name in gate.names)
    start = {name: parameter.detach().clone() for name, parameter in gate.parameters.items()}
    loop, losses = _Loop(model, find_gates(model), recipe), []  # its base gates: before the moves
    for epsilon in (1e-3, -1e-3):
        with torch.no_grad():
            for name, parameter in gate.parameters.items():
                parameter.copy_(start[name] + epsilon * direction[name])
        losses.append(loop.gradients(micro, 1)["loss"])
    assert slope == pytest.approx((losses[0] - losses[1]) / 2e-3, rel=1e-3)


# --- it learns --------------------------------------------------------------------------------------------------------


def test_cross_entropy_alone_falls_on_a_fixed_batch():
    model = load("deepseek_v2")
    fixed = next(endless(64, tokens=64))
    trained = train(model, find_gates(model), repeat(fixed), recipe_of(CE_ONLY, steps=25, accumulation=1, lr=1e-2))
    assert trained.steps[-1].terms["ce"] < trained.steps[0].terms["ce"] - 0.05
    assert trained.steps[-1].loss == trained.steps[-1].terms["ce"]
    assert trained.steps[-1].terms["trust"] > 0 and trained.steps[-1].terms["reuse"] > 0  # reported, though of scale 0


@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_remoe_raises_overlap_and_trust_holds_it_back(model_type):
    found = {}
    for trust in (0.0, 100.0):
        model = load(model_type)
        stream = repeat(next(endless(64, tokens=64)))
        recipe = recipe_of(Objective(trust=trust, scale=5.0), steps=25, accumulation=1, lr=2e-2)
        found[trust] = train(model, find_gates(model), stream, recipe).steps
    free, held = found[0.0], found[100.0]
    assert (
        free[-1].eor > free[0].eor + 0.15
        and free[-1].terms["reuse"] < free[0].terms["reuse"]
        and free[-1].terms["smooth"] < free[0].terms["smooth"]
    )
    assert held[-1].terms["trust"] < free[-1].terms["trust"] / 5 and held[-1].eor < free[-1].eor


def test_learning_rate_warms_up_from_the_first_step():
    model = load("mixtral")
    trained = train(model, find_gates(model), endless(20, 50), recipe_of(steps=5, lr=1e-3, lr_warmup=0.8))
    assert [s.lr for s in trained.steps] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])
    assert [s.step for s in trained.steps] == [1, 2, 3, 4, 5]
    assert all(s.tokens == 64 and s.tokens_per_s > 0 for s in trained.steps)
    assert sorted(s.elapsed for s in trained.steps) == [s.elapsed for s in trained.steps]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"lr_decay": 0.8}, [1e-3, 1e-3, 7.5e-4, 5e-4, 2.5e-4]),
        ({"lr_warmup": 0.4, "lr_decay": 0.4}, [5e-4, 1e-3, 1e-3, 1e-3, 5e-4]),
        ({"lr_warmup": 1.0, "lr_decay": 1.0}, [2e-4, 4e-4, 6e-4, 4e-4, 2e-4]),
    ],
)
def test_learning_rate_falls_in_a_line_at_the_end(settings, expected):
    model = load("mixtral")
    trained = train(model, find_gates(model), endless(20, 50), recipe_of(steps=5, lr=1e-3, **settings))
    assert [s.lr for s in trained.steps] == pytest.approx(expected)


def test_the_same_run_twice_gives_the_same_gates():
    runs = []
    for _ in range(2):
        model = load("qwen3_moe")
        runs.append(train(model, find_gates(model), endless(20, 50), recipe_of()).gates)
    assert_same(runs[0], runs[1], atol=0, rtol=0)


def test_masters_keep_updates_that_bf16_gates_lose():
    """An update of lr = 2e-4 is below half a bf16 step wherever |w| >= .125 (step 2^-10 = 9.8e-4)."""
    lr, steps = 2e-4, 40
    fixed = next(endless(64, tokens=64))
    model = load("mixtral", torch.bfloat16)
    gates = find_gates(model)
    start = {n: p.detach().clone() for gate in gates for n, p in gate.parameters.items()}
    trained = train(model, gates, repeat(fixed), recipe_of(CE_ONLY, steps=steps, accumulation=1, lr=lr, clip=1e9))

    plain = load("mixtral", torch.bfloat16).eval().requires_grad_(False)
    parameters = {n: p.requires_grad_(True) for gate in find_gates(plain) for n, p in gate.parameters.items()}
    optimiser = torch.optim.AdamW(list(parameters.values()), lr=lr, weight_decay=0.0)
    segments = Segments.of(fixed.document_BT)
    for _ in range(steps):
        optimiser.zero_grad()
        logits = plain(**model_inputs(plain, fixed, segments)).logits
        (cross_entropy(logits, fixed.ids_BT, segments) / 63).backward()
        optimiser.step()
    large = {n: w.abs() >= 0.125 for n, w in start.items()}
    lost = sum(int((parameters[n] != start[n])[large[n]].sum()) for n in start)
    kept = sum(int((model.get_parameter(n) != start[n])[large[n]].sum()) for n in start)
    total = sum(int(mask.sum()) for mask in large.values())
    assert lost == 0 and kept > 0.3 * total
    assert all((trained.gates[n] - start[n].float()).abs().max() > lr for n in start)


def test_masters_add_up_gradients_in_fp32():
    parameter = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    masters = Masters({"w": parameter})
    masters.clear()
    for value in (256.0, 1.0, 1.0, 1.0):  # in bf16, 256 + 1 = 256
        parameter.grad = torch.tensor([value], dtype=torch.bfloat16)
        masters.accumulate()
        assert parameter.grad is None
    assert masters.tensors["w"].grad.tolist() == [259.0]


# --- checkpointing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_checkpointing_changes_memory_only(model_type):
    results, calls = {}, {}
    for on in (False, True):
        model, count = load(model_type), []
        gates = find_gates(model)
        gates[0].router.register_forward_hook(lambda *_, count=count: count.append(1))
        trained = train(model, gates, endless(20, 50), recipe_of(steps=2, checkpointing=on))
        results[on], calls[on] = trained, len(count)
        assert not any(module.training for module in model.modules())
        assert not model.is_gradient_checkpointing
    assert calls == {False: 4, True: 8}  # two steps of two micro-batches; layers run again in the backward pass
    for off, on in zip(results[False].steps, results[True].steps, strict=True):
        for name in (*TERMS, "loss", "grad_norm"):
            assert on.row()[name] == pytest.approx(off.row()[name], rel=1e-6, abs=1e-7), name
    assert_same(results[False].gates, results[True].gates, atol=1e-6, rtol=0)


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_a_gpu_measures_the_same_step_and_trains_in_bf16(model_type):
    rows = list(islice(endless(20, 50, 3, 1), 6))
    on_cpu, on_gpu = load(model_type), load(model_type).to("cuda")
    slow = train(on_cpu, find_gates(on_cpu), rows, recipe_of(steps=1, lr=1e-5))
    fast = train(on_gpu, find_gates(on_gpu), rows, recipe_of(steps=1, lr=1e-5))
    for name in TERMS:
        assert getattr(fast.steps[0], name) == pytest.approx(getattr(slow.steps[0], name), rel=2e-2, abs=1e-3), name
    model = load(model_type, torch.bfloat16).to("cuda")
    trained = train(model, find_gates(model), rows, recipe_of(checkpointing=True))
    assert len(trained.steps) == 3 and all(tensor.device.type == "cpu" for tensor in trained.gates.values())

"""What training takes, by arithmetic: sizes equal those of loaded models, activations bound what autograd keeps."""

import json
import tempfile
from pathlib import Path

import pytest
import tiny_models
import torch
import training
from hypothesis import given
from hypothesis import strategies as st

from remoe_cli.errors import MemoryShortError
from remoe_cli.families import find_gates
from remoe_cli.families.frozen import use_frozen_experts
from remoe_cli.families.loader import load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.headers import Headers
from remoe_cli.recipe import Objective, override, Recipe, Train
from remoe_cli.train import needs
from remoe_cli.train.needs import choose, fits, resident, sharded, streamed
from remoe_cli.train.shape import Shape, shape_of

# three layers of 100 bytes (120 in the files), gates in the last two, 10 bytes outside, all else small
PLAIN = Shape(
    model="org/moe", dtype=torch.bfloat16, layers=(100, 100, 100), stored=(120, 120, 120), outside=10, stored_outside=12, experts=200,
    parameters=160, gates=8, adapted=4, lowest=1, moe_layers=2, n_experts=4, top_k=2, hidden=2, vocabulary=5, active=70, kept=(30, 40, 40),
    scores=0, compiled=0, entangled="",
)  # fmt: skip
RECIPE = Recipe(train=Train(sequence=16, micro_batch=1, accumulation=4))
BIG = PLAIN._replace(
    layers=(10**9,) * 3, stored=(10**9,) * 3, outside=10**8, vocabulary=100_000, hidden=1000, kept=(10**5,) * 3
)


@pytest.mark.parametrize("family", tiny_models.MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_are_those_of_the_loaded_model_and_its_files(folders, family, dtype):
    checkpoint = Checkpoint.open(folders(family, dtype))
    shape = shape_of(checkpoint, dtype)
    model = load_resident(checkpoint, dtype, "cpu")
    gates = {name: p for gate in find_gates(model) for name, p in gate.parameters.items()}
    apart = {name: t for name, t in (*model.named_parameters(), *model.named_buffers()) if name not in gates}
    for i, size in enumerate(shape.layers):
        held = sum(t.nbytes for name, t in apart.items() if f".layers.{i}." in name)
        assert held <= size + 4 * tiny_models.EXPERTS, "but for biases that the family keeps in fp32"
        assert held >= size
    assert shape.weights <= sum(t.nbytes for t in apart.values()) <= shape.weights + 4 * tiny_models.EXPERTS * 3
    assert shape.gates == sum(p.numel() for p in gates.values())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    on_disk = sum(info.nbytes for info in checkpoint.tensors.values()) - shape.gates * dtype.itemsize
    assert sum(shape.stored) + shape.stored_outside == on_disk
    assert shape.lowest == find_gates(model)[0].layer and shape.moe_layers == len(find_gates(model))
    experts = sum(p.nbytes for gate in find_gates(model) for p in gate.experts.parameters())
    assert shape.experts == experts


@pytest.mark.parametrize("family", tiny_models.MODEL_TYPES)
def test_config_alone_tells_the_same(folders, family):
    checkpoint = Checkpoint.open(folders(family, torch.bfloat16))
    bare = Headers(checkpoint.folder, checkpoint.id, None, checkpoint.config, {}, "no weight file is here")
    told, known = shape_of(bare, torch.bfloat16), shape_of(checkpoint, torch.bfloat16)
    assert told._replace(stored=(), stored_outside=0) == known._replace(stored=(), stored_outside=0)
    assert abs(sum(told.stored) - sum(known.stored)) <= 200, "but for tables that no file holds"


@pytest.mark.parametrize(
    ("name", "parameters", "active", "stored"),
    [
        ("DeepSeek-V3", 671_026_404_352, 36.5e9, 688.5e9),  # 671 billion, 37 of them active with the embedding; fp8 files
        ("Qwen3-30B-A3B", 30_532_122_624, 3.04e9, 61.0e9),  # 30.5 billion
        ("Mixtral-8x22B-v0.1", 140_620_634_112, 38.95e9, 281.2e9),
    ],
)  # fmt: skip
def test_published_sizes(shared, name, parameters, active, stored):
    folder = shared(f"data/configs/{name}")
    config = json.loads((folder / "config.json").read_text())
    shape = shape_of(Headers(folder, name, None, config), torch.bfloat16)
    assert shape.parameters == parameters
    assert shape.active == pytest.approx(active, rel=0.005)
    assert sum(shape.stored) + shape.stored_outside == pytest.approx(stored, rel=0.005)


def test_what_fp8_files_hold_is_told_by_them(shared):
    config = json.loads((shared("data/configs/DeepSeek-V3") / "config.json").read_text())
    shape = shape_of(Headers(shared("data/configs/DeepSeek-V3"), "v3", None, config), torch.bfloat16)
    expert = 3 * 7168 * 2048 * 256  # of one layer
    assert shape.layers[-1] - shape.stored[-1] == pytest.approx(expert * (1 - 4 / 128**2), rel=1e-6)


WIDE = {
    "deepseek_v2": {"hidden_size": 256, "moe_intermediate_size": 176, "n_routed_experts": 16, "num_experts_per_tok": 6, "qk_nope_head_dim": 64},
    "qwen3_moe": {"hidden_size": 256, "moe_intermediate_size": 96, "num_experts": 16, "num_experts_per_tok": 8, "head_dim": 64},
    "mixtral": {"hidden_size": 256, "intermediate_size": 896, "head_dim": 64},
    "gpt_oss": {"hidden_size": 192, "intermediate_size": 192, "num_local_experts": 16, "num_experts_per_tok": 4, "head_dim": 48},
    "olmoe": {"hidden_size": 256, "intermediate_size": 128, "num_experts": 16, "num_experts_per_tok": 8},
    "qwen2_moe": {"hidden_size": 256, "moe_intermediate_size": 176, "shared_expert_intermediate_size": 704},
}  # fmt: skip


@pytest.mark.parametrize("family", tiny_models.MODEL_TYPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_bound_what_autograd_keeps(family, dtype):
    model = training.load(family, dtype, **WIDE[family])
    tokens = 128
    kept = _kept(model, tokens)
    shape = _shape(model, family, dtype)
    counted = tokens * sum(size + shape.scores * tokens for size in shape.kept[shape.lowest :])
    assert kept * 0.95 <= counted <= kept * 2.1, counted / kept


def _kept(model, tokens: int) -> int:
    """Bytes of all that a pass keeps for its backward pass, weights apart."""
    model.eval().requires_grad_(False)
    assert use_frozen_experts(model, find_gates(model))
    for gate in find_gates(model):
        for parameter in gate.parameters.values():
            parameter.requires_grad_(True)
    weights = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    held: dict[int, torch.Tensor] = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            held[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.base_model(torch.randint(3, 100, (1, tokens)))  # noqa: F841  holds what is kept
    return sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def _shape(model, family: str, dtype: torch.dtype) -> Shape:
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return shape_of(Headers(Path(folder), family, None, {"model_type": family}), dtype)


def test_a_streamed_step_by_hand():
    found = streamed(PLAIN, RECIPE)
    assert found.on_device["layers that pass"] == 200 and found.on_device["weights outside the layers"] == 10
    step, border = 16 * 4, 2 * 2
    assert found.in_host["hidden states of a step"] == step * border * 2, (
        "the inputs of the layers from the lowest gate up"
    )
    assert found.on_device["hidden states between layers"] == step * border
    assert found.on_device["router outputs of a step"] == step * 2 * (4 * 16 + 2 * 16)
    assert found.in_host["attention masks of a step"] == 4 * 16 * 16
    assert found.read == 120 + 2 * 240, "forward once, and back down to the lowest gate"
    assert found.copied == 100 + 2 * 200 and found.ram == 0
    assert found.flops == 2 * 70 * 3 * 64, "forward, recomputed, backward"
    assert found.pool == found.device + sum(found.in_host.values())
    assert found.host == sum(found.in_host.values()) and resident(PLAIN, RECIPE).host == 310 + 200


def test_layers_that_stay_are_not_read_again():
    assert streamed(PLAIN, RECIPE, ram=199).ram == 100 and streamed(PLAIN, RECIPE, ram=99).ram == 0
    kept = streamed(PLAIN, RECIPE, ram=200)
    assert kept.ram == 200 and kept.read == 240 and kept.copied == streamed(PLAIN, RECIPE).copied
    assert streamed(PLAIN, RECIPE, ram=10**6).read == 0
    assert kept.pool - streamed(PLAIN, RECIPE).pool == 200


def test_resident_and_sharded_by_hand():
    whole = resident(PLAIN, RECIPE)
    assert whole.on_device["weights"] == 310 and whole.read == 0
    assert whole.on_device["activations"] == 16 * (40 + 40 + 40), "from the lowest gate up, and one layer's backward"
    assert whole.on_device["gates and optimiser"] == 8 * 56 + 4 * 8
    assert whole.flops == 2 * 70 * 2 * 64
    rank = sharded(PLAIN, RECIPE, 2)
    assert rank.on_device["weights"] == 155 and rank.on_device["layers gathered"] == 210
    assert rank.copied == 2 * 2 * 155 and rank.flops == whole.flops / 2


def test_recipes_that_need_more_or_less():
    def less(*overrides: str):
        return resident(PLAIN, override(RECIPE, overrides))

    whole = resident(PLAIN, RECIPE)
    assert less("train.checkpointing=true").on_device["activations"] == 16 * (3 * 2 * 2 + 2 * 40)
    assert less("train.checkpointing=true").flops == whole.flops * 3 / 2
    assert less("objective.target=base").flops == whole.flops * 3 / 2
    assert less("objective.target=base").device > whole.device
    assert less("train.scope=full").on_device["gates and optimiser"] == 160 * 56 + 32
    assert less("train.scope=gates+lora", "train.lora_rank=3").on_device["gates and optimiser"] == (8 + 12) * 56 + 32
    heads = ("objective.name=coverage-temporal", "train.scope=heads")
    assert less(*heads).flops == whole.flops / 2 and less(*heads).on_device["activations"] == 16 * 40
    alone = streamed(PLAIN, override(RECIPE, heads))
    assert alone.read == 360 and not alone.in_host["hidden states of a step"], "heads alone need no backward pass"


@pytest.mark.parametrize("scope", ["full", "gates+lora"])
def test_what_trains_layers_cannot_be_streamed(scope):
    recipe = override(RECIPE, [f"train.scope={scope}"])
    for count in (
        lambda: streamed(PLAIN, recipe),
        lambda: sharded(PLAIN, recipe, 2),
        lambda: choose(BIG, recipe, 10**9),
    ):
        with pytest.raises(MemoryShortError, match="can be streamed or sharded"):
            count()
    assert choose(PLAIN, recipe, 10**9).mode == needs.RESIDENT


def test_layers_that_need_one_another_stay_together():
    bound = BIG._replace(entangled="its layers share keys")
    assert choose(bound, RECIPE, 10**11).mode == needs.RESIDENT
    with pytest.raises(
        MemoryShortError, match="its layers share keys, so its layers cannot pass through memory one by one"
    ):
        choose(bound, RECIPE, 3 * 10**9)


def test_the_largest_mode_that_fits_is_chosen():
    whole, bare = resident(BIG, RECIPE), streamed(BIG, RECIPE)
    assert choose(BIG, RECIPE, whole.pool).mode == needs.RESIDENT
    assert choose(BIG, RECIPE, whole.pool - 1).mode == needs.STREAMED
    assert choose(BIG, RECIPE, bare.pool).ram == 0
    assert choose(BIG, RECIPE, bare.device, whole.host).mode == needs.STREAMED
    roomy = choose(BIG, RECIPE, bare.device, bare.host + 3 * 10**9)
    assert roomy.ram == 2 * 10**9, "nine tenths of what is free"
    assert choose(BIG, RECIPE, bare.device, bare.host + 3 * 10**9, ram=10**9).ram == 10**9
    with pytest.raises(MemoryShortError, match=r"org/moe streamed layer by layer needs .* but 1 GB are free"):
        choose(BIG, RECIPE, 10**9)


@given(
    st.integers(0, 6 * 10**9),
    st.none() | st.integers(0, 6 * 10**9),
    st.integers(1, 4),
    st.sampled_from([64, 512, 1024]),
)
def test_a_choice_fits_and_a_refusal_says_what_would(device, host, rows, sequence):
    recipe = Recipe(train=Train(sequence=sequence, micro_batch=rows, accumulation=2))
    free = (device,) if host is None else (device, host)
    try:
        assert fits(choose(BIG, recipe, *free), *free)
    except MemoryShortError as error:
        assert not fits(streamed(BIG, recipe), *free) and not fits(resident(BIG, recipe), *free)
        if "the least" not in error.message:
            changes = error.hint.split(" --set ")[1:]
            assert fits(streamed(BIG, override(recipe, changes)), *free), "what the hint says"
        else:
            least = override(recipe, ["train.micro_batch=1", f"train.sequence={min(sequence, 128)}"])
            assert not fits(streamed(BIG, least), *free)


@given(st.integers(1, 64), st.integers(2, 4096), st.booleans())
def test_more_tokens_never_need_less(rows, sequence, base):
    objective = Objective(target="base" if base else "text")
    small = Recipe(objective=objective, train=Train(sequence=sequence, micro_batch=rows))
    large = Recipe(objective=objective, train=Train(sequence=sequence + 1, micro_batch=rows))
    for count in (lambda r: resident(PLAIN, r), lambda r: streamed(PLAIN, r), lambda r: sharded(PLAIN, r, 4)):
        assert count(small).pool < count(large).pool and count(small).flops < count(large).flops

"""Traps that users of neighbouring tools reported (../shared/design/field-traps.md): those on gates, families and
training that no other file tests, and a table of where each is tested."""

import ast
import json
import shutil
from itertools import islice
from pathlib import Path

import pytest
import tiny_models
import tiny_tokenizers
import torch
from safetensors.torch import load_file, save_file
from tiny_models import EXPERTS, HIDDEN, MODEL_TYPES, TOP_K
from training import endless, load, recipe_of

from remoe_cli.delta import Delta
from remoe_cli.errors import FamilyError, RemoeError
from remoe_cli.families import find_gates, probabilities, RouterTap
from remoe_cli.families.loader import gate_disk_names, load_resident, load_without_experts
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.train.tokens import load_tokenizer
from remoe_cli.train.trainer import train

TESTS = Path(__file__).parent
# words of field-traps.md -> the tests that hold remoe to them
TRAPS = {
    "Finding and training gates": {
        "A gate is found by shape [E, D] beside the experts": [
            "test_traps.py::test_what_is_not_e_by_d_beside_the_experts_is_refused",
            "test_traps.py::test_a_router_that_the_name_table_does_not_know_is_refused",
            "test_families.py::test_gate_names_agree_with_the_published_table",
        ],
        "Never match the bare word": [
            "test_traps.py::test_a_gate_of_the_shared_expert_is_not_taken",
            "test_families.py::test_names_that_only_look_like_gates_are_not",
        ],
        "First dense layers": ["test_traps.py::test_dense_layers_have_no_gate"],
        "Dense model: say so, stop": [
            "test_families.py::test_unsupported_models_are_refused_by_name",
            "test_families.py::test_a_moe_type_without_a_moe_layer_is_refused",
            "test_cli.py::test_dense_model",
        ],
        "Some families compute router logits and drop them": [
            "test_traps.py::test_a_router_that_is_not_called_is_an_error",
            "test_families.py::test_tap_records_the_first_pass_after_start_only",
        ],
        "Native class first": ["test_traps.py::test_code_in_a_checkpoint_is_never_run"],
        "Run frozen layers in eval mode": ["test_traps.py::test_jitter_and_dropout_are_off_while_training"],
        "Balance-loss coefficient 0, stated": ["test_trainer.py::test_the_balance_loss_is_off_and_said_so"],
        "`e_score_correction_bias` stays fp32": [
            "conformance/test_checkpoints.py::test_a_selection_bias_stays_fp32",
            "conformance/test_rows.py::test_nothing_but_gates_trains",
        ],
        "Group-limited routing": ["test_traps.py::test_group_limited_routing_is_the_models_own"],
        "top_k = 1 with renormalised weights": ["test_trainer.py::test_top_one_with_renormalised_weights_is_warned_of"],
        "Padding and packed documents": [
            "test_packing.py::test_left_padding_and_rows_of_one_document_change_no_logit",
            "test_trainer.py::test_packing_and_padding_change_nothing",
            "test_objectives.py::test_a_packed_row_equals_its_documents_alone_and_padding_counts_nothing",
        ],
        "One-token rows": [
            "test_objectives.py::test_rows_shorter_than_a_lag_or_a_window_are_finite",
            "test_training_ends.py::test_documents_of_one_token_are_survived",
        ],
        "Gradient checkpointing re-runs hooks": [
            "test_checkpointing.py::test_near_ties_choose_alike_with_checkpointing_and_without",
            "test_checkpointing.py::test_a_second_pass_that_flips_does_not_reach_the_trace",
            "test_checkpointing.py::test_each_token_is_recorded_once",
        ],
        "bf16 gates lose small updates": [
            "test_trainer.py::test_masters_keep_updates_that_bf16_gates_lose",
            "test_delta.py::test_changes_below_the_stored_precision_are_counted_as_none",
        ],
        "After training every non-gate tensor has its old sha256": [
            "test_trainer.py::test_only_gates_change_and_only_gates_require_a_gradient",
            "test_delta.py::test_round_trip_and_patched_checkpoint",
            "test_cli.py::test_the_whole_way",
        ],
        "NaN in a batch": [
            "test_training_ends.py::test_nan_stops_and_keeps_the_last_gates_that_gave_a_finite_loss",
            "test_cli.py::test_a_loss_that_is_not_finite_keeps_the_last_good_gates",
        ],
        "kill -9 and resume": ["test_faults_train.py::test_kill_9_and_resume_end_with_the_same_gates"],
    },
    "Tokenizer and data": {
        "Round trip of": [
            "test_data_encode.py::test_what_a_tokenizer_may_and_may_not_lose",
            "test_data_encode.py::test_where_a_tokenizer_class_loses_text_its_json_is_taken_as_it_is",
        ],
        "Chat template that already adds BOS": [
            "test_data_encode.py::test_a_template_that_writes_bos_or_eos_gets_no_second",
            "test_data_encode.py::test_any_conversation_survives_between_one_bos_and_one_eos",
        ],
        "No template: the user chooses": ["test_data_encode.py::test_chat_without_a_template_names_the_alternatives"],
        "Data set: empty file": [
            "test_data_files.py::test_a_bad_file_is_refused_by_name",
            "test_data_files.py::test_a_row_far_longer_than_any_sequence_is_read_whole",
        ],
    },
    "Delta": {
        "Ships in its own repo or folder": ["test_delta.py::test_a_taken_output_folder_is_left_alone"],
        "Written with the *on-disk* names": [
            "test_families.py::test_gates_have_their_on_disk_names_and_values",
            "test_delta.py::test_round_trip_and_patched_checkpoint",
        ],
        "Holds sha256 of each base gate": [
            "test_delta.py::test_wrong_bases_are_refused_with_the_reason",
            "test_fingerprint.py::test_a_gate_is_known_by_its_values_in_any_dtype_that_holds_them",
            "test_delta.py::test_one_changed_gate_is_refused",
        ],
        "a gate that is itself quantised": ["test_traps.py::test_a_quantised_gate_is_refused"],
        "Applied twice: no-op": ["test_delta.py::test_applied_twice_is_a_no_op"],
        "Tied embeddings": ["test_traps.py::test_tied_embeddings_stay_out_of_the_delta"],
        "Stray or missing shards, truncated shard": ["test_checkpoint.py::test_missing_truncated_and_stray_shards"],
    },
    "Hub": {
        "401 without token, 401 with token": [
            "test_hub.py::test_every_failure_has_its_own_words_and_next_command",
            "test_faults_hub.py::test_a_download_that_fails_is_told_and_succeeds_the_second_time",
            "test_faults_hub.py::test_no_two_cases_are_told_in_the_same_words",
        ],
        "Verify size or hash of every shard": ["test_hub.py::test_a_damaged_cached_file_is_named"],
        "Push without write right": [
            "test_hub_upload.py::test_each_refusal_of_a_push_has_its_own_words",
            "test_push.py::test_push_to_a_branch_and_as_a_pull_request_makes_no_second",
        ],
        "The card names the pinned base commit": ["test_push.py::test_push_pull_and_apply"],
        "Same delta twice: no new commit": [
            "test_hub_upload.py::test_push_makes_one_commit_and_a_second_of_the_same_makes_none"
        ],
        "Ctrl-C anywhere": [
            "test_faults_train.py::test_ctrl_c_at_any_instant_ends_cleanly_and_resume_ends_with_the_same_gates",
            "test_faults_eval.py::test_ctrl_c",
            "test_faults_interrupt_hub.py::test_ctrl_c_in_a_download",
            "test_faults_interrupt_hub.py::test_ctrl_c_in_a_push",
            "test_decode.py::test_ctrl_c_while_decoding",
        ],
    },
}
LATER = ("vLLM refuses PEFT", "GGUF: ")  # forms of a delta that remoe does not write yet


# Finding gates


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize(
    "shape", [(EXPERTS + 1, HIDDEN), (EXPERTS, HIDDEN + 1), (HIDDEN, EXPERTS), (EXPERTS,)], ids=str
)
def test_what_is_not_e_by_d_beside_the_experts_is_refused(model_type, shape):
    model = load(model_type)
    find_gates(model)[0].router.weight = torch.nn.Parameter(torch.zeros(shape))
    with pytest.raises(FamilyError, match=f"{model_type}: .* disagree on 1 modules"):
        find_gates(model)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_router_that_the_name_table_does_not_know_is_refused(model_type):
    model = load(model_type)
    router = find_gates(model)[0].router
    model.model.layers[2].self_attn.gate = type(router)(model.config)
    with pytest.raises(FamilyError, match=rf"{model_type}: .* disagree on 1 modules \(model.layers.2.self_attn.gate\)"):
        find_gates(model)


def test_a_gate_of_the_shared_expert_is_not_taken():
    """qwen2_moe's shared_expert_gate is [1, D]: found by no rule, and frozen."""
    model = load("qwen2_moe")
    gates = find_gates(model)
    shared = {name: p.clone() for name, p in model.named_parameters() if "shared_expert_gate" in name}
    assert {tuple(p.shape) for p in shared.values()} == {(1, HIDDEN)} and len(shared) == len(gates) == 2
    train(model, gates, endless(20, 50), recipe_of(lr=3e-2))
    for name, before in shared.items():
        after = model.get_parameter(name)
        assert torch.equal(after, before) and not after.requires_grad


@pytest.mark.parametrize(
    ("model_type", "settings", "layers"),
    [
        ("deepseek_v2", {"first_k_dense_replace": 2}, [2]),
        ("deepseek_v2", {"first_k_dense_replace": 0}, [0, 1, 2]),
        ("qwen2_moe", {"mlp_only_layers": [1]}, [0, 2]),
        ("qwen2_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2}, [1]),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, [1]),
        ("qwen3_moe", {"decoder_sparse_step": 3}, [2]),
        ("olmoe", {}, [0, 1, 2]),
    ],
)
def test_dense_layers_have_no_gate(tmp_path, model_type, settings, layers):
    checkpoint = Checkpoint.open(tiny_models.make(model_type, tmp_path / "model", **settings))
    model = load_resident(checkpoint, torch.float32, "cpu")
    assert [gate.layer for gate in find_gates(model)] == layers
    with OffloadedDecoder(checkpoint, TOP_K) as decoder:
        assert [layer.layer for layer in decoder.layers] == layers
        assert decoder.decode([5, 17, 80], 4).trace.n_layers == len(layers)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_quantised_gate_is_refused(tmp_path, dtype):
    """Though config.json does not say so."""
    folder = tiny_models.make("olmoe", tmp_path / "model")
    checkpoint = Checkpoint.open(folder)
    model = load_resident(checkpoint, torch.float32, "cpu")
    name = "model.layers.1.mlp.gate.weight"
    shard = checkpoint.tensors[name].file
    tensors = load_file(shard)
    save_file({**tensors, name: tensors[name].to(dtype)}, shard, metadata={"format": "pt"})
    with pytest.raises(FamilyError, match=f"the gate {name} is stored as"):
        gate_disk_names(model, Checkpoint.open(folder))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tied_embeddings_stay_out_of_the_delta(tmp_path, model_type):
    folder = tiny_models.make(model_type, tmp_path / "model", tie_word_embeddings=True)
    checkpoint = Checkpoint.open(folder)
    model = load_resident(checkpoint, torch.float32, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    gates = find_gates(model)
    trained = train(model, gates, endless(20), recipe_of(steps=1))
    names = gate_disk_names(model, checkpoint)
    delta = Delta.of(checkpoint, {names[name]: tensor for name, tensor in trained.gates.items()}, "remoe", {})
    assert set(delta.tensors) == set(names.values())
    assert all(
        ".mlp.gate." in name or ".router." in name or ".block_sparse_moe.gate." in name for name in delta.tensors
    )


# What is recorded is what the model did


def test_a_router_that_is_not_called_is_an_error(monkeypatch):
    """As where a block computes the logits itself from its router's weight."""
    model = load("olmoe")
    gates = find_gates(model)
    router = gates[1].router
    monkeypatch.setattr(type(router), "__call__", type(router).forward)  # the result is right, hooks are passed by
    with pytest.raises(RemoeError, match=r"routers of layers \[0, 1, 2\] recorded nothing"):
        train(model, gates, endless(20), recipe_of(steps=1))


@pytest.mark.parametrize(("n_group", "topk_group", "top_k"), [(4, 1, 2), (4, 2, 3), (2, 1, 2)])
def test_group_limited_routing_is_the_models_own(tmp_path, n_group, topk_group, top_k):
    settings = {"topk_method": "group_limited_greedy", "n_group": n_group, "topk_group": topk_group}
    settings["num_experts_per_tok"] = top_k
    checkpoint = Checkpoint.open(tiny_models.make("deepseek_v2", tmp_path / "model", **settings))
    model = load_resident(checkpoint, torch.float32, "cpu")
    ids = torch.randint(3, 120, (1, 40), generator=torch.Generator().manual_seed(0))
    with RouterTap(find_gates(model)) as tap, torch.no_grad():
        model(ids)
        routed = tap.take()
    plain = 0
    for layer in routed:
        for p, choice in zip(probabilities(layer.logits_NE), layer.choice_NK.tolist(), strict=True):
            groups = p.view(n_group, -1).max(-1).values.topk(topk_group).indices.tolist()
            allowed = [e for e in range(EXPERTS) if e // (EXPERTS // n_group) in groups]
            assert sorted(choice) == sorted(sorted(allowed, key=lambda e: -p[e])[:top_k])
            plain += sorted(choice) == sorted(p.topk(top_k).indices.tolist())
    assert plain < len(routed) * 40, "the groups never mattered"
    with OffloadedDecoder(checkpoint, top_k) as decoder:
        trace = decoder.decode(ids[0].tolist(), 1).trace
    for index, layer in enumerate(routed):
        assert (torch.tensor(trace.experts[:, index]).sort(-1).values == layer.choice_NK.sort(-1).values).all()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_jitter_and_dropout_are_off_while_training(checkpointing):
    """A router that jitters, or attention that drops, would record choices that decoding never makes."""
    plain, noisy = load("mixtral"), load("mixtral", router_jitter_noise=0.5, attention_dropout=0.5)
    noisy.train()
    runs = [
        train(model, find_gates(model), endless(20, 50), recipe_of(checkpointing=checkpointing))
        for model in (plain, noisy)
    ]
    assert [step._replace(tokens_per_s=0, elapsed=0) for step in runs[0].steps] == [
        step._replace(tokens_per_s=0, elapsed=0) for step in runs[1].steps
    ]
    noisy.train()
    (batch,) = islice(endless(20), 1)
    logits = [noisy(input_ids=batch.ids_BT).logits for _ in range(2)]
    assert not torch.equal(*logits), "this model has no noise to switch off"


# Code that comes with a model

EVIL = """
from pathlib import Path
Path({marker!r}).write_text("ran")
class Evil:
    def __init__(self, *a, **k): pass
    @classmethod
    def from_pretrained(cls, *a, **k): return cls()
"""


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_code_in_a_checkpoint_is_never_run(model_type, tmp_path, folders, monkeypatch):
    """A repository's auto_map names files with code; models, tokenizers and configs come from transformers' own classes."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "model"
    shutil.copytree(folders(model_type), folder)
    tokenizer = tiny_tokenizers.wrapped()
    tokenizer.save_pretrained(folder)
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(EVIL.format(marker=str(marker)))
    for file, names in (
        ("config.json", {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoModel": "evil.Evil"}),
        ("tokenizer_config.json", {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}),
    ):
        settings = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps({**settings, "auto_map": names}))
    checkpoint = Checkpoint.open(folder)
    models = [load_resident(checkpoint, torch.float32, "cpu"), load_without_experts(checkpoint, torch.float32)[0]]
    assert {type(model).__module__ for model in models} == {f"transformers.models.{model_type}.modeling_{model_type}"}
    assert load_tokenizer(checkpoint)("the fox").input_ids == tokenizer("the fox").input_ids
    assert not marker.exists()


# The table


def exists(node: str) -> bool:
    file, _, name = node.partition("::")
    path = TESTS / file
    return path.is_file() and name in {
        n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)
    }


def test_every_trap_has_a_test():
    nodes = [node for group in TRAPS.values() for tests in group.values() for node in tests]
    assert nodes and not [node for node in nodes if not exists(node)]


def test_every_published_trap_is_in_the_table(shared):
    text = shared("design/field-traps.md").read_text()
    for group, traps in TRAPS.items():
        section = text.partition(f"## {group}\n")[2].partition("\n## ")[0]
        for bullet in (" ".join(part.split()) for part in section.split("\n- ")):
            named = [words for words in (*traps, *LATER) if words in bullet]
            assert named or not bullet, f"{group}: no test for {bullet}"
        assert all(words in " ".join(section.split()) for words in traps), group

"""The forms of an applied delta: each loads as the base with the tuned gates, whatever rules a loader follows."""

import hashlib
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given
from hypothesis import strategies as st
from loader_rules import INDEX, index_rules, READERS, SINGLE, transformers_rules
from safetensors.torch import load_file, save_file
from test_delta import hashes, make_delta

from remoe_cli.delta import copy as copy_form
from remoe_cli.delta import Delta, FORMS, overlay, patched_copy, peft_adapter
from remoe_cli.delta.overlay import link_names, MODEL_GATES, natural
from remoe_cli.delta.peft import pattern
from remoe_cli.delta.stored import stored_bytes
from remoe_cli.errors import DeltaError, RunError
from remoe_cli.families import FAMILIES
from remoe_cli.hub.checkpoint import Checkpoint


@pytest.fixture
def mixtral(folders):
    return Checkpoint.open(folders("mixtral"))


def in_float32(checkpoint: Checkpoint) -> Delta:
    """A delta that keeps float32 gates of a bfloat16 base, with values that bfloat16 has not."""
    made = make_delta(checkpoint)
    gates = {name: tensor.float() * 1.001 for name, tensor in made.tensors.items()}
    return Delta.of(checkpoint, gates, "remoe", {}, dtype=torch.float32)


def renamed_shards(checkpoint: Checkpoint, folder: Path, name) -> Checkpoint:
    """A copy whose shard number i (from 1) is called name(i)."""
    shutil.copytree(checkpoint.folder, folder)
    index = json.loads((folder / INDEX).read_text())
    names = {file.name: name(i) for i, file in enumerate(checkpoint.files, 1)}
    for old, new in names.items():
        (folder / old).rename(folder / new)
    index["weight_map"] = {tensor: names[file] for tensor, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))
    return Checkpoint.open(folder)


def single_file(checkpoint: Checkpoint, folder: Path) -> Checkpoint:
    folder.mkdir()
    tensors = {name: tensor for file in checkpoint.files for name, tensor in load_file(file).items()}
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    shutil.copyfile(checkpoint.folder / "config.json", folder / "config.json")
    return Checkpoint.open(folder)


def assert_tuned(out: Path, checkpoint: Checkpoint, gates: dict[str, torch.Tensor]) -> None:
    """Every kind of loader finds these gates, and everything else as the base has it."""
    expected = transformers_rules(checkpoint.folder) | {name: stored_bytes(gate) for name, gate in gates.items()}
    for reader in READERS:
        assert reader(out) == expected, reader.__name__


@pytest.mark.parametrize("form", [patched_copy, overlay])
def test_every_loader_finds_the_tuned_gates_and_the_base_stays(checkpoint, tmp_path, form):
    before, delta = hashes(checkpoint.folder), make_delta(checkpoint)
    out = form(delta, checkpoint, tmp_path / "out")
    assert_tuned(out, checkpoint, delta.tensors)
    for path in checkpoint.folder.iterdir():
        if path.suffix != ".safetensors" and path.name != INDEX:
            assert (out / path.name).read_bytes() == path.read_bytes()
    shutil.rmtree(out)
    assert hashes(checkpoint.folder) == before


def test_an_overlay_holds_links_and_gates_only(mixtral, tmp_path):
    delta = make_delta(mixtral)
    out = overlay(delta, mixtral, tmp_path / "out")
    for file in mixtral.files:
        assert (out / file.name).is_symlink() and (out / file.name).resolve() == file.resolve()
    assert set(load_file(out / MODEL_GATES)) == set(delta.tensors)
    index, base = (json.loads((folder / INDEX).read_text()) for folder in (out, mixtral.folder))
    assert index["metadata"] == base["metadata"] and index["weight_map"].keys() == base["weight_map"].keys()
    own = sum(path.stat().st_size for path in out.iterdir() if not path.is_symlink())
    assert own < sum(file.stat().st_size for file in mixtral.files) / 4
    assert json.loads((out / "remoe_applied.json").read_text())["form"] == "overlay"


@pytest.mark.parametrize("model_type", ["mixtral", "gpt_oss"])
def test_an_overlay_of_a_single_file(folders, tmp_path, model_type):
    """transformers takes model.safetensors alone, index or not: the link to it needs another name."""
    base = single_file(Checkpoint.open(folders(model_type)), tmp_path / "base")
    delta = make_delta(base)
    out = overlay(delta, base, tmp_path / "out")
    assert_tuned(out, base, delta.tensors)
    assert {path.name for path in out.glob("*.safetensors")} == {"model-00001-of-00001.safetensors", MODEL_GATES}


@pytest.mark.parametrize(
    ("name", "kept"),
    [(lambda i: f"model-{i:05d}-of-00004.safetensors", True), (lambda i: f"model-{7 + i}.safetensors", True),
     (lambda i: f"Zmodel-{i}.safetensors", True), (lambda i: f"weights-{i}.safetensors", False),
     (lambda i: f"model.safetensors-{i}-of-4.safetensors", False), (lambda i: f"ä{i}.safetensors", False),
     (lambda i: MODEL_GATES if i == 4 else f"a{i}.safetensors", False),
     (lambda i: SINGLE if i == 1 else f"model-{i}.safetensors", False)],
    ids=["usual", "unpadded", "upper case", "sorts after", "sorts after by its point", "not ASCII", "its own name", "the single name"],
)  # fmt: skip
def test_an_overlay_of_oddly_named_shards(mixtral, tmp_path, name, kept):
    base = renamed_shards(mixtral, tmp_path / "base", name)
    if name(1) != SINGLE:  # as which transformers would not find the base itself
        delta = make_delta(base)
    else:
        delta = make_delta(mixtral)
        assert len(transformers_rules(base.folder)) < len(base.tensors)
    out = overlay(delta, base, tmp_path / "out")
    assert_tuned(out, mixtral, delta.tensors)
    assert all((out / file.name).is_symlink() for file in base.files) == kept


@given(
    st.sets(
        st.text("am01-._~Zä", min_size=1, max_size=9).map(lambda name: f"{name}.safetensors"), min_size=1, max_size=5
    )
)
def test_the_gates_sort_last_of_all_names(files):
    names = link_names(sorted(files))
    assert names.keys() == files and len(set(names.values())) == len(files)
    for name in names.values():
        assert name < MODEL_GATES and natural(name) < natural(MODEL_GATES) and name != SINGLE


def test_a_hub_cache_is_linked_past_its_own_links(mixtral, tmp_path):
    """A snapshot is links to blobs; what removes the snapshot must not break the overlay."""
    snapshot, blobs = tmp_path / "models--o--m/snapshots/abc", tmp_path / "models--o--m/blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in mixtral.folder.iterdir():
        blob = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blobs / blob)
        (snapshot / path.name).symlink_to(f"../../blobs/{blob}")
    base = Checkpoint.open(snapshot, "o/m", "a" * 40)
    delta = make_delta(base)
    out = overlay(delta, base, tmp_path / "out")
    assert all(os.readlink(out / file.name).startswith(str(blobs.resolve())) for file in base.files)
    shutil.rmtree(snapshot)
    assert_tuned(out, mixtral, delta.tensors)


@pytest.mark.parametrize(("hard", "words"), [(True, "as hard links"), (False, "as copies")])
def test_an_overlay_where_no_symbolic_link_can_be(mixtral, tmp_path, monkeypatch, capsys, hard, words):
    def refuse(*_, **__):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "symlink_to", refuse)
    if not hard:
        monkeypatch.setattr(os, "link", refuse)
    delta = make_delta(mixtral)
    out = overlay(delta, mixtral, tmp_path / "out")
    assert_tuned(out, mixtral, delta.tensors)
    assert not any(path.is_symlink() for path in out.iterdir())
    assert f"weight files are there 4 of 4 {words}" in capsys.readouterr().err
    same = [(out / file.name).stat().st_ino == file.stat().st_ino for file in mixtral.files]
    assert all(same) if hard else not any(same)


@pytest.mark.parametrize("form", [patched_copy, overlay])
def test_applied_twice_over_its_own_result(mixtral, tmp_path, form):
    delta = make_delta(mixtral)
    once = Checkpoint.open(overlay(delta, mixtral, tmp_path / "once"))
    assert delta.is_applied(once)
    assert_tuned(form(delta, once, tmp_path / "twice"), mixtral, delta.tensors)


@pytest.mark.parametrize("cast", [False, True])
def test_float32_gates_are_kept_where_a_form_can_hold_them(folders, tmp_path, cast):
    base = Checkpoint.open(folders("qwen3_moe", torch.bfloat16))
    delta = in_float32(base)
    rounded = {name: delta.stored(name) for name in delta.tensors}
    assert any(not torch.equal(rounded[name].float(), delta.tensors[name]) for name in rounded)
    assert_tuned(patched_copy(delta, base, tmp_path / "copy", cast), base, rounded)
    kept = rounded if cast else delta.tensors
    assert_tuned(overlay(delta, base, tmp_path / "overlay", cast), base, kept)
    adapter = load_file(peft_adapter(delta, base, tmp_path / "peft", cast) / "adapter_model.safetensors")
    assert sorted(map(stored_bytes, adapter.values())) == sorted(map(stored_bytes, kept.values()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_base_that_holds_its_gates_in_another_dtype(folders, tmp_path, dtype):
    """The same values in float32, or rounded to float16: the forms follow what is stored there."""
    made_on = Checkpoint.open(folders("mixtral", torch.bfloat16))
    delta = make_delta(made_on)
    shutil.copytree(made_on.folder, tmp_path / "base")
    for file in made_on.files:
        tensors = {name: tensor.to(dtype) for name, tensor in load_file(file).items()}
        save_file(tensors, tmp_path / "base" / file.name, metadata={"format": "pt"})
    base = Checkpoint.open(tmp_path / "base")
    gates = {name: tensor.to(dtype) for name, tensor in delta.tensors.items()}
    assert_tuned(patched_copy(delta, base, tmp_path / "copy"), base, gates)
    assert_tuned(overlay(delta, base, tmp_path / "overlay"), base, gates)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_wrong_bases_and_taken_folders_leave_nothing(mixtral, folders, tmp_path, form):
    delta = make_delta(mixtral)
    with pytest.raises(DeltaError, match="belongs to"):
        form(delta, Checkpoint.open(folders("qwen3_moe")), tmp_path / "out")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/mine").touch()
    with pytest.raises(RunError, match="not an empty folder"):
        form(delta, mixtral, tmp_path / "taken")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "taken"]


def test_what_does_not_read_back_is_not_kept(mixtral, tmp_path, monkeypatch):
    """As if the disk had taken other bytes than it was given."""
    monkeypatch.setattr(copy_form, "stored_bytes", lambda tensor: bytes(tensor.nbytes))
    with pytest.raises(RunError, match="reads back differently"):
        patched_copy(make_delta(mixtral), mixtral, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_an_overlay_that_loaders_read_differently_is_not_kept(mixtral, tmp_path, monkeypatch):
    monkeypatch.setitem(overlay.__globals__, "MODEL_GATES", "gates.safetensors")  # sorts before the shards
    monkeypatch.setitem(overlay.__globals__, "link_names", lambda files: {name: name for name in files})
    with pytest.raises(RunError, match="loaders would not agree"):
        overlay(make_delta(mixtral), mixtral, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_copy_takes_no_stray_weights_along(mixtral, tmp_path):
    shutil.copytree(mixtral.folder, tmp_path / "base")
    for name in ("stray.safetensors", "pytorch_model.bin", "old.gguf", ".hidden"):
        (tmp_path / "base" / name).write_bytes(b"x")
    base = Checkpoint.open(tmp_path / "base")
    for name, form in FORMS.items():
        out = form(make_delta(base), base, tmp_path / name)
        assert not {"stray.safetensors", "pytorch_model.bin", "old.gguf", ".hidden"} & {p.name for p in out.iterdir()}


def test_links_in_a_base_are_read_through_and_never_written_through(mixtral, tmp_path):
    outside = shutil.copytree(mixtral.folder, tmp_path / "outside")
    base = tmp_path / "base"
    base.mkdir()
    for path in outside.iterdir():
        (base / path.name).symlink_to(path)
    before, delta = hashes(outside), make_delta(mixtral)
    out = patched_copy(delta, Checkpoint.open(base), tmp_path / "out")
    assert hashes(outside) == before and not any(path.is_symlink() for path in out.iterdir())
    assert_tuned(out, mixtral, delta.tensors)


# The PEFT form, without PEFT


def test_an_adapter_holds_the_modules_that_own_a_gate(checkpoint, tmp_path):
    delta = make_delta(checkpoint)
    out = peft_adapter(delta, checkpoint, tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    adapter = load_file(out / "adapter_model.safetensors")
    family = FAMILIES[checkpoint.model_type]
    layers = range(checkpoint.model_type in tiny_models.FIRST_DENSE, tiny_models.LAYERS)
    expected = {
        f"base_model.model.model.layers.{layer}.{family.router}.ln_tuning_layers.{tensor}":
        delta.tensors[f"model.{family.disk_name(layer, tensor)}"]
        for layer in layers for tensor in family.tensors
    }  # fmt: skip
    assert adapter.keys() == expected.keys() and all(torch.equal(adapter[key], expected[key]) for key in expected)
    for layer in range(tiny_models.LAYERS):
        found = re.fullmatch(config["target_modules"], f"model.layers.{layer}.{family.router}")
        assert bool(found) == (layer in layers)
    assert (config["peft_type"], config["base_model_name_or_path"]) == ("LN_TUNING", str(checkpoint.folder))


def test_what_else_a_gate_module_holds_is_as_in_the_base(folders, tmp_path):
    """gpt-oss's gate has a bias; a delta without it still gives an adapter that loads whole."""
    base = Checkpoint.open(folders("gpt_oss"))
    delta = make_delta(base)
    delta = replace(delta, tensors={name: t for name, t in delta.tensors.items() if name.endswith("weight")})
    adapter = load_file(peft_adapter(delta, base, tmp_path / "out") / "adapter_model.safetensors")
    key, disk = "base_model.model.model.layers.1.mlp.router.ln_tuning_layers", "model.layers.1.mlp.router"
    assert torch.equal(adapter[f"{key}.bias"], base.read(f"{disk}.bias"))
    assert torch.equal(adapter[f"{key}.weight"], delta.tensors[f"{disk}.weight"])


def test_an_adapter_of_a_hub_base_names_its_commit(mixtral, tmp_path):
    pinned = replace(mixtral, id="org/m", commit="c" * 40)
    out = peft_adapter(make_delta(mixtral), pinned, tmp_path / "out")
    config = json.loads((out / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("org/m", "c" * 40)


def test_a_delta_of_more_than_gates_is_no_adapter_but_every_other_form(mixtral, tmp_path):
    name = "model.layers.0.self_attn.q_proj.weight"
    delta = make_delta(mixtral)
    delta = Delta.of(mixtral, {**delta.tensors, name: mixtral.read(name) + 1}, "gates+lora", {})
    with pytest.raises(DeltaError, match=f"more than gates, such as {name}"):
        peft_adapter(delta, mixtral, tmp_path / "out")
    assert_tuned(overlay(delta, mixtral, tmp_path / "overlay"), mixtral, delta.tensors)
    assert_tuned(patched_copy(delta, mixtral, tmp_path / "copy"), mixtral, delta.tensors)


MODULES = st.builds(
    "{}.layers.{}.{}".format, st.sampled_from(["model", "m.x"]), st.integers(0, 120), st.sampled_from(["mlp.gate", "f"])
)


@given(st.sets(MODULES, min_size=1, max_size=9), MODULES)
def test_the_pattern_matches_these_modules_and_no_others(modules, other):
    found = pattern(modules)
    assert all(re.fullmatch(found, module) for module in modules)
    assert bool(re.fullmatch(found, other)) == (other in modules)
    assert not any(re.fullmatch(found, module.replace(".mlp", "xmlp") + "_proj") for module in modules)


def test_a_buffer_that_corrects_scores_is_in_the_adapter(folders, tmp_path):
    """As DeepSeek-V3 has it: PEFT copies the module whole, so loading is exact only with the buffer there."""
    base = Checkpoint.open(folders("deepseek_v3"))
    delta = make_delta(base)
    delta = replace(delta, tensors={name: t for name, t in delta.tensors.items() if name.endswith("weight")})
    adapter = load_file(peft_adapter(delta, base, tmp_path / "out") / "adapter_model.safetensors")
    key = "base_model.model.model.layers.1.mlp.gate.ln_tuning_layers"
    assert set(adapter) == {
        f"{key.replace('.1.', f'.{i}.')}.{t}" for i in (1, 2) for t in ("weight", "e_score_correction_bias")
    }
    assert torch.equal(
        adapter[f"{key}.e_score_correction_bias"], base.read("model.layers.1.mlp.gate.e_score_correction_bias")
    )


def test_reading_by_the_index_alone_is_what_accelerate_does(mixtral):
    assert index_rules(mixtral.folder) == transformers_rules(mixtral.folder)

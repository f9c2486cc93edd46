"""What transformers and accelerate make of each form: the logits of the gates put in by hand, bit for bit."""

import hashlib
import shutil
from pathlib import Path

import pytest
import torch
from interop_model import logits, perplexity
from transformers import AutoModelForCausalLM

from remoe_cli.delta import overlay, patched_copy
from remoe_cli.delta.overlay import MODEL_GATES

FORMS = {"copy": patched_copy, "overlay": overlay}


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(params=FORMS)
def applied(request, demo, demo_delta, tmp_path) -> Path:
    return FORMS[request.param](demo_delta, demo, tmp_path / "out")


def same(found: torch.Tensor, expected: torch.Tensor, ids_BT: torch.Tensor) -> None:
    assert f"{perplexity(found, ids_BT):.4f}" == f"{perplexity(expected, ids_BT):.4f}"
    assert torch.equal(found, expected)


def test_transformers_loads_the_tuned_gates(applied, in_memory, ids_BT):
    model, info = AutoModelForCausalLM.from_pretrained(applied, dtype=torch.float32, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    same(logits(model.eval(), ids_BT), in_memory["tuned"], ids_BT)


def test_accelerate_reads_offloaded_layers_from_the_disk(applied, in_memory, ids_BT, tmp_path):
    """Whole layers on disk, gates too: those come from where the index says, each time they are used."""
    pytest.importorskip("accelerate")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{layer}": "cpu" if layer in (0, 2) else "disk" for layer in range(6)}
    model = AutoModelForCausalLM.from_pretrained(
        applied, dtype=torch.float32, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert model.model.layers[1].mlp.gate.weight.device.type == "meta", "nothing was offloaded"
    same(logits(model.eval(), ids_BT), in_memory["tuned"], ids_BT)


def test_without_the_overlay_the_base_is_as_it_was(demo, demo_delta, in_memory, ids_BT, tmp_path):
    before = digests(demo.folder)
    out = overlay(demo_delta, demo, tmp_path / "out")
    AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    shutil.rmtree(out)
    assert digests(demo.folder) == before
    model = AutoModelForCausalLM.from_pretrained(demo.folder, dtype=torch.float32)
    same(logits(model.eval(), ids_BT), in_memory["base"], ids_BT)


def test_a_gates_file_that_sorts_first_would_be_a_silent_no_op(demo, demo_delta, in_memory, ids_BT, tmp_path):
    """Why the overlay names its files as it does; should transformers follow the index one day, this test says so."""
    out = overlay(demo_delta, demo, tmp_path / "out")
    (out / MODEL_GATES).rename(out / "gates.safetensors")
    index = out / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(MODEL_GATES, "gates.safetensors"))
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert torch.equal(logits(model.eval(), ids_BT), in_memory["base"])

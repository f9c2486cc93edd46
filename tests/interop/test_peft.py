"""The adapter in PEFT itself: exact, taken off without a trace, merged, and loaded by transformers."""

import pytest
import tiny_models
import torch
from interop_model import logits, moved, perplexity
from transformers import AutoModelForCausalLM

from remoe_cli.delta import patched_copy, peft_adapter
from remoe_cli.hub.checkpoint import Checkpoint

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type")  # said of every module that is no norm layer
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]])


@pytest.fixture
def base_model(demo):
    return AutoModelForCausalLM.from_pretrained(demo.folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def adapter(demo, demo_delta, tmp_path_factory):
    return peft_adapter(demo_delta, demo, tmp_path_factory.mktemp("peft") / "adapter")


def test_peft_runs_the_tuned_gates_and_takes_them_off_again(base_model, adapter, in_memory, ids_BT):
    model = peft.PeftModel.from_pretrained(base_model, adapter).eval()
    found = logits(model, ids_BT)
    assert f"{perplexity(found, ids_BT):.4f}" == f"{perplexity(in_memory['tuned'], ids_BT):.4f}"
    assert torch.equal(found, in_memory["tuned"])
    with model.disable_adapter():
        assert torch.equal(logits(model, ids_BT), in_memory["base"])
    assert torch.equal(logits(model.unload(), ids_BT), in_memory["base"])


def test_merged_it_is_a_plain_model_again(base_model, adapter, in_memory, ids_BT):
    kind = type(base_model.model.layers[1].mlp.gate)
    model = peft.PeftModel.from_pretrained(base_model, adapter).merge_and_unload().eval()
    assert type(model.model.layers[1].mlp.gate) is kind
    assert torch.equal(logits(model, ids_BT), in_memory["tuned"])


def test_transformers_loads_it_as_an_adapter(base_model, adapter, in_memory, ids_BT):
    base_model.load_adapter(str(adapter))
    assert torch.equal(logits(base_model.eval(), ids_BT), in_memory["tuned"])


def test_the_adapter_finds_its_base_itself(adapter, in_memory, ids_BT):
    model = peft.AutoPeftModelForCausalLM.from_pretrained(adapter, dtype=torch.float32).eval()
    assert torch.equal(logits(model, ids_BT), in_memory["tuned"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", tiny_models.MODEL_TYPES)
def test_every_family(folders, tmp_path, model_type, dtype):
    base = Checkpoint.open(folders(model_type, dtype))
    delta = moved(base, share=1.0)
    model = AutoModelForCausalLM.from_pretrained(base.folder, dtype="auto").eval()
    before = logits(model, IDS)
    copied = AutoModelForCausalLM.from_pretrained(patched_copy(delta, base, tmp_path / "copy"), dtype="auto").eval()
    tuned = peft.PeftModel.from_pretrained(model, peft_adapter(delta, base, tmp_path / "peft")).eval()
    assert torch.equal(logits(tuned, IDS), logits(copied, IDS))
    assert not torch.equal(logits(tuned, IDS), before)

"""What is not applicable, shown to fail: when one of these passes, its row in rows.py (and docs/families.md) loses a gap."""

import copy
import runpy
from pathlib import Path

import pytest
import torch

from conformance.built import IDS
from conformance.rows import PRESENT, ROWS, TOP_K
from remoe_cli.apply import apply
from remoe_cli.delta.peft import pattern
from remoe_cli.errors import DeltaError, FamilyError
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.stream.passes import begin, Resident
from remoe_cli.stream.stream import Stream


def gaps(suite: str):
    names = [name for name, row in PRESENT.items() if suite in row.gaps]
    return pytest.mark.parametrize("built", names, indirect=True, ids=str)


def test_every_gap_is_shown():
    assert {suite for row in ROWS.values() for suite in row.gaps} == {"offload", "peft", "streamed"}


@gaps("offload")
def test_experts_that_cannot_be_left_on_disk_are_refused_by_name(built):
    with pytest.raises(FamilyError) as caught:
        OffloadedDecoder(built.checkpoint, TOP_K + 1)
    assert built.model_type in str(caught.value) and len(str(caught.value).splitlines()) == 1


@gaps("streamed")
def test_layers_that_cannot_pass_one_by_one_are_refused_by_name(built):
    with pytest.raises(FamilyError) as caught:
        Stream(built.checkpoint, torch.float32)
    assert built.model_type in str(caught.value) and len(str(caught.value).splitlines()) == 1
    if built.model_type == "longcat_flash":
        return
    layers = Resident(built.model, built.gates)  # and they can't: what comes first is no longer a pair
    with pytest.raises(ValueError, match="unpack"):
        begin(layers, {"input_ids": IDS, "use_cache": False}, "cpu")


@gaps("peft")
@pytest.mark.filterwarnings("ignore")
def test_an_adapter_that_would_change_nothing_is_refused(built, tmp_path):
    """And it would: PEFT runs the base where the router reads a weight past the module in its place."""
    names = {name for gate in built.gates for name in gate.names}
    delta = built.delta_of(names, tmp_path / "delta")
    with pytest.raises(DeltaError, match=f"{built.model_type}: .* would change nothing"):
        apply(str(delta), str(built.checkpoint.folder), tmp_path / "peft", "peft")
    peft = pytest.importorskip("peft")
    modules = {name.rpartition(".")[0] for name in names}
    model = peft.get_peft_model(copy.deepcopy(built.model), peft.LNTuningConfig(target_modules=pattern(modules)))
    with torch.no_grad():
        before = model(IDS).logits
        for name, parameter in model.named_parameters():
            if ".ln_tuning_layers." in name:
                parameter.add_(1.0)
        assert torch.equal(model(IDS).logits, before)


@pytest.mark.parametrize("built", ["ernie4_5_moe", "minimax_m2"], indirect=True)
def test_a_selection_bias_outside_the_gates_module_goes_into_no_adapter(built, tmp_path):
    with pytest.raises(DeltaError, match=r"such as .*e_score_correction_bias, and a PEFT adapter") as caught:
        apply(str(built.delta), str(built.checkpoint.folder), tmp_path / "peft", "peft")
    assert len(str(caught.value).splitlines()) == 1 and not (tmp_path / "peft").exists()


def test_the_table_of_the_documentation_is_up_to_date():
    docs = Path(__file__).resolve().parents[2] / "docs"
    page = runpy.run_path(str(docs / "make_families.py"))["page"]()
    assert (docs / "families.md").read_text() == page, "python docs/make_families.py writes it anew"

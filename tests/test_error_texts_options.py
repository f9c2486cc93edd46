"""Errors of options and files that no other test provokes."""

import pytest
import torch
from commands import refused

from remoe_cli.errors import CheckpointError, FamilyError, UsageError
from remoe_cli.families import known
from remoe_cli.families.loader import experts_on_disk
from remoe_cli.hub.checkpoint import Checkpoint, read_object
from remoe_cli.offload import OffloadedDecoder, pack, Settings


@pytest.mark.parametrize(
    "options, words",
    [
        (("--ram", "8GB", "--in-place", "--pack", "x", "--heavy", 0.5), "--in-place computes experts in one precision"),
        (("--policy", "lru+st_moe:6", "--prompts", "demo", "--batch", 2), "lists experts token by token"),
        (("--policy", "lru+promoe:6"), "needs a --predictor, which remoe predictor train makes"),
        (("--policy", "lru", "--predictor", "p.npz"), "reads no --predictor"),
    ],
)
def test_options_of_decode_that_do_not_go_together(remoe, options, words):
    refused(remoe("decode", "demo", "--cache", 8, *options), words)


@pytest.mark.parametrize(
    "options, words", [(("--ahead", "-1"), "at least 0, not -1"), (("--rows", 0), "--rows is at least 1")]
)
def test_options_of_a_sweep(remoe, options, words):
    refused(remoe("sweep", "demo", "--weights", "1", "--cache", 8, *options), words)


def test_settings_and_families():
    with pytest.raises(UsageError, match="from 0 to 1, not 2"):
        Settings(heavy=2)
    with pytest.raises(FamilyError, match=r"does not know the family .nothing"):
        known("nothing")


def test_folders_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        Checkpoint.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mixtral"}')
    with pytest.raises(CheckpointError, match="remoe reads safetensors only"):
        Checkpoint.open(tmp_path).files  # noqa: B018  reading it is what fails
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_object(tmp_path)
    with pack._Files() as files, pytest.raises(CheckpointError, match="cannot be read"):
        files.read(tmp_path / "nothing", 0, memoryview(bytearray(1)))


def test_heavy_experts_that_slots_cannot_hold(folders, tmp_path):
    checkpoint = Checkpoint.open(folders("mixtral"))
    pack.write(experts_on_disk(checkpoint), checkpoint, tmp_path / "store", form=pack.Form("int8"))
    how = {"pack": tmp_path / "store", "settings": Settings(heavy=0.5)}
    with pytest.raises(UsageError, match="--heavy takes no batch"):
        OffloadedDecoder(checkpoint, 4, batch=2, **how)
    with pytest.raises(UsageError, match="not stored in the dtype that computes"):
        OffloadedDecoder(checkpoint, 4, dtype=torch.bfloat16, **how)

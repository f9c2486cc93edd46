"""One checkpoint and one resident model a family, made once and never changed by a test."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import tiny_models
import torch

from conformance.rows import ROWS
from remoe_cli.families import find_gates, Gate
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.hub.checkpoint import Checkpoint


@dataclass
class Built:
    """A row, made: its checkpoint of several shards, fp32."""

    model_type: str
    checkpoint: Checkpoint

    @property
    def row(self):
        return ROWS[self.model_type]

    @cached_property
    def model(self):
        return load_resident(self.checkpoint, torch.float32, "cpu")

    @cached_property
    def gates(self) -> list[Gate]:
        return find_gates(self.model)

    @cached_property
    def disk_names(self) -> dict[str, str]:
        return gate_disk_names(self.model, self.checkpoint)


@pytest.fixture(scope="session")
def built(request, tmp_path_factory) -> Built:
    """Parametrised indirectly, by model type; the tests of one family run together."""
    folder = tmp_path_factory.mktemp("models") / request.param
    return Built(request.param, Checkpoint.open(tiny_models.make(request.param, folder)))


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

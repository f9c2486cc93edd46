"""One checkpoint and one resident model a family, made once and never changed by a test."""

import pytest
import tiny_models
import torch

from conformance.built import Built
from remoe_cli.hub.checkpoint import Checkpoint


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

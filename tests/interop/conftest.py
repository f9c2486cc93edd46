"""The demo with gates that were moved, and what it says of held-out text: what each runtime has to say as well."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from interop_model import logits, moved, perplexity

from remoe_cli.delta import Delta, gates_for, put
from remoe_cli.demo.corpus import documents
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.hub.resolve import resolve
from remoe_cli.train.tokens import load_tokenizer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.interop)


@pytest.fixture(scope="session")
def demo() -> Checkpoint:
    return resolve("demo")


@pytest.fixture(scope="session")
def demo_delta(demo) -> Delta:
    return moved(demo)


@pytest.fixture(scope="session")
def ids_BT(demo) -> torch.Tensor:
    """Two rows of 192 held-out tokens."""
    tokenizer = load_tokenizer(demo)
    rows = [tokenizer(document.text)["input_ids"][:192] for document in documents("heldout")]
    return torch.tensor([row for row in rows if len(row) == 192][:2])


@pytest.fixture(scope="session")
def in_memory(demo, demo_delta, ids_BT) -> dict[str, torch.Tensor]:
    """Logits in float32 of the base, and of the same model once the gates are put into it."""
    model = load_resident(demo, torch.float32, "cpu")
    base = logits(model, ids_BT)
    put(model, gates_for(gate_disk_names(model, demo), demo_delta))
    found = {"base": base, "tuned": logits(model, ids_BT)}
    assert abs(perplexity(found["tuned"], ids_BT) / perplexity(base, ids_BT) - 1) > 0.01, "nothing to tell apart"
    return found

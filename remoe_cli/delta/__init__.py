"""Delta: the changed gate tensors under the base's on-disk names, heads beside them, and enough to know which base they
belong to."""

from remoe_cli.delta.delta import BESIDE, Delta, FACTS, GATES, HEADS, is_delta
from remoe_cli.delta.patch import gates_for, heads_for, heads_on_disk, patched_copy, put

__all__ = [
    "BESIDE",
    "FACTS",
    "GATES",
    "HEADS",
    "Delta",
    "gates_for",
    "heads_for",
    "heads_on_disk",
    "is_delta",
    "patched_copy",
    "put",
]

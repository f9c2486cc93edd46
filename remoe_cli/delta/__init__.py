"""Delta: the changed gate tensors under the base's on-disk names, and enough to know which base they belong to."""

from remoe_cli.delta.delta import BESIDE, Delta, FACTS, GATES, is_delta
from remoe_cli.delta.patch import gates_for, patched_copy, put

__all__ = ["BESIDE", "FACTS", "GATES", "Delta", "gates_for", "is_delta", "patched_copy", "put"]

"""Delta: the changed gate tensors under the base's on-disk names, heads beside them, and enough to know which base they
belong to."""

from remoe_cli.delta.copy import patched_copy
from remoe_cli.delta.delta import BESIDE, Delta, FACTS, GATES, HEADS, is_delta
from remoe_cli.delta.overlay import overlay
from remoe_cli.delta.patch import gates_for, heads_for, heads_on_disk, put
from remoe_cli.delta.peft import peft_adapter

FORMS = {
    "copy": patched_copy,
    "overlay": overlay,
    "peft": peft_adapter,
}  # of a model folder; `remoe_cli.gguf` has the fourth

__all__ = [
    "BESIDE",
    "FACTS",
    "FORMS",
    "GATES",
    "HEADS",
    "Delta",
    "gates_for",
    "heads_for",
    "heads_on_disk",
    "is_delta",
    "overlay",
    "patched_copy",
    "peft_adapter",
    "put",
]

"""The sizes of a model as a decoder meets them, from config.json and the headers of its files."""

import math
from collections.abc import Sequence
from typing import NamedTuple, TYPE_CHECKING

import torch

from remoe_cli.delta.stored import dtype_label
from remoe_cli.families import Gate
from remoe_cli.families.loader import compute_dtype, DTYPES, experts_on_disk
from remoe_cli.families.quantised import BYTES
from remoe_cli.families.quantised import shape_of as shape_of_weight
from remoe_cli.families.refuse import quant_method
from remoe_cli.hub.headers import Headers
from remoe_cli.offload import budget
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.settings import Settings
from remoe_cli.offload.store import one_expert_bytes
from remoe_cli.offload.tiers import host_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Shape(NamedTuple):
    """one, outside: bytes of an expert and of all that is no routed expert's, as stored; dtype: in which they are computed with;
    slot: bytes of an expert in it; elements: outside; looked_up: those of them that are a table of tokens, of which one row is
    read a token; loading: bytes of the largest tensor outside. layout: where experts lie in a row, None without headers."""

    one: int
    outside: int
    dtype: torch.dtype
    slot: int
    elements: int
    looked_up: int
    loading: int
    layout: Layout | None = None

    @property
    def slot_bytes(self) -> int:
        """Of an expert as a decoder's slots hold it."""
        return self.layout.slot_bytes if self.layout else self.slot

    @property
    def reads(self) -> int:
        """In how many places an expert lies."""
        return self.layout.max_windows if self.layout else 1

    def host(self, device: str) -> int:
        """Bytes of host memory that experts pass through on their way to slots."""
        return host_bytes(self.layout, Settings().readers, torch.device(device)) if self.layout else 0


def shape_of(headers: Headers, model: "PreTrainedModel", gates: Sequence[Gate], device: str = "cpu") -> Shape | None:
    """model: as `meta_model` makes it, gates: its. Where no header is here as if every tensor were stored in config.json's own
    dtype (bfloat16 beside quantised experts), experts as it says; None where it names none.

    Raises FamilyError, CheckpointError for experts that cannot be told from one another.
    """
    table = torch.Size(getattr(model.config.get_text_config(), name) for name in ("vocab_size", "hidden_size"))
    if not headers.tensors:
        return _assumed(model, gates, headers.config, table, device)
    layers = experts_on_disk(headers)
    rest = budget.outside(headers, layers)
    dtype = compute_dtype(headers, device)
    shapes = [torch.Size(shape_of_weight(info)) for info in rest]
    return Shape(
        one_expert_bytes(layers),
        sum(info.nbytes for info in rest),
        dtype,
        sum(math.prod(part.shape) for part in layers[0].parts) * dtype.itemsize,
        sum(shape.numel() for shape in shapes),
        _looked_up(shapes, table),
        max(info.nbytes for info in rest),
        Layout(layers, dtype, direct=True),
    )


def _looked_up(shapes: Sequence[torch.Size], table: torch.Size) -> int:
    """With two tables the one that is no head; one alone is both."""
    return table.numel() if shapes.count(table) > 1 else 0


def _assumed(
    model: "PreTrainedModel", gates: Sequence[Gate], config: dict, table: torch.Size, device: str
) -> Shape | None:
    parts = (config, config.get("text_config") or {})
    named = next(
        (part[key] for part in parts for key in ("dtype", "torch_dtype") if isinstance(part.get(key), str)), ""
    )
    dtype = next((one for one in DTYPES.values() if dtype_label(one) == named), None)
    method = quant_method(config)
    if dtype is None and method is not None:
        dtype = torch.bfloat16
    if dtype is None:
        return None
    stored = dtype
    if device.startswith("cuda"):
        dtype = torch.bfloat16
    experts = [parameter for gate in gates for parameter in gate.experts.parameters()]
    theirs = {id(parameter) for parameter in experts}
    rest = [parameter.shape for parameter in model.parameters() if id(parameter) not in theirs]
    weights = sum(p.numel() for p in experts) // sum(gate.n_experts for gate in gates)
    one = int(weights * (BYTES[method] if method else stored.itemsize))
    sizes = [shape.numel() for shape in rest]
    return Shape(
        one, sum(sizes) * stored.itemsize, dtype, weights * dtype.itemsize, sum(sizes), _looked_up(rest, table),
        max(sizes) * stored.itemsize,
    )  # fmt: skip

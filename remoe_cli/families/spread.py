"""Parameters that several processes hold together, read and written whole."""

from typing import Any

from torch import Tensor


def is_spread(parameter: Tensor) -> bool:
    """Whether other processes hold parts of it."""
    return hasattr(parameter, "full_tensor")


def whole(parameter: Tensor) -> Tensor:
    """All of it, without graph; every process that holds a part calls this."""
    held: Any = parameter.detach()
    return held.full_tensor() if is_spread(held) else held


def assign(parameter: Tensor, value: Tensor) -> None:
    """Writes a whole value, in the parameter's own dtype; of a spread one this process' part. Without graph."""
    held: Any = parameter.detach()
    if not is_spread(held):
        held.copy_(value)
        return
    from torch.distributed.tensor import distribute_tensor

    moved = value.detach().to(device=held.device, dtype=held.dtype)
    held.copy_(distribute_tensor(moved, held.device_mesh, held.placements, src_data_rank=None))

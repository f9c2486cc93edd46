"""Whether a run's model stays in memory or is streamed, by what there is of it."""

import torch

from remoe_cli import memory
from remoe_cli.console import note
from remoe_cli.errors import UsageError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.recipe import Recipe
from remoe_cli.sizes import show_size
from remoe_cli.stream.stream import Stream
from remoe_cli.train.needs import choose, require_room, spare, streamed
from remoe_cli.train.scope import LAYERS_STAY
from remoe_cli.train.shape import shape_of
from remoe_cli.train.streamed import require_scope

_SMALL = 8  # a model of which memory holds so many copies is not counted any closer


def stream_of(
    checkpoint: Checkpoint, recipe: Recipe, dtype: torch.dtype, device: str, way: str = "auto", ram: int | None = None
) -> Stream | None:
    """None where the model is to stay in memory. way: "auto" streams what does not fit; ram: bytes of host memory for layers
    that stay there, by default what is left.

    Raises MemoryShortError, with the least that works, where neither way fits; UsageError for a recipe, or a device, that
    can't be streamed.
    """
    if way == "off" or (way == "auto" and recipe.train.scope not in LAYERS_STAY):
        return None
    cuda = device.startswith("cuda")
    if not cuda and device != "cpu":
        if way == "on":
            raise UsageError(
                f"layers are streamed to CUDA devices and the CPU, not to {device}.",
                "the same command with --stream off",
            )
        return None
    host = memory.available().nbytes
    free, apart = (memory.gpu(device).nbytes, host) if cuda else (host, None)
    stored = sum(info.nbytes for info in checkpoint.tensors.values())
    if way == "auto" and _SMALL * stored < free:
        return None
    shape = shape_of(checkpoint, dtype, "cuda" if cuda else "cpu")
    if way == "auto":
        needs = choose(shape, recipe, free, apart, ram)
        if needs.mode == "resident":
            return None
        kept = needs.ram
    else:
        require_scope(recipe.train.scope)
        bare = streamed(shape, recipe)
        require_room(shape, recipe, bare, free, apart)
        left = spare(bare, free, apart)
        kept = left if ram is None else min(left, ram)
    stream = Stream(checkpoint, dtype, device, ram=kept)
    count, size = len(stream.layers), show_size(sum(stream.layer_bytes))
    note(
        f"Streamed: {count} layers ({size}) pass through memory one by one, {stream.kept} of them stay; "
        f"{show_size(host)} are free"
    )
    return stream

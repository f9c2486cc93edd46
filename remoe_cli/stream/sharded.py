"""A model spread over the processes of a group: each holds a part of every layer, and gathers a layer while it computes.

PyTorch's FSDP2 does that (torch.distributed.fsdp.fully_shard). Gates are left out: each process holds them whole.
"""

from typing import TYPE_CHECKING

import torch

from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.stream.stream import Stream

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def load_sharded(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> "PreTrainedModel":
    """In eval mode; every process of the default group calls it. No process ever holds more than three layers whole.

    Raises as Stream does.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device.partition(":")[0], (torch.distributed.get_world_size(),))
    with Stream(checkpoint, dtype, device) as stream:
        model, gates = stream.model, stream.gates
        learning = {parameter for gate in gates for parameter in gate.parameters.values()}
        for index, layer in enumerate(stream.layers):
            with stream.layer(index, range(index + 1, len(stream.layers))):
                stream.give(index)
                fully_shard(layer, mesh=mesh, ignored_params=learning)
        stream.unhook()
    fully_shard(model, mesh=mesh, ignored_params=learning)
    return model.eval()

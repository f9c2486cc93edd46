"""What the tests of the offloaded decoder share."""

import pytest
import torch

from remoe_cli.hub.checkpoint import Checkpoint

PROMPT = [5, 17, 80, 3, 3, 99, 41, 64, 12, 110, 27]
NEW = 16
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
BOTH = [torch.float32, torch.bfloat16]


def dtype_of(checkpoint: Checkpoint) -> torch.dtype:
    return getattr(torch, checkpoint.config["dtype"])

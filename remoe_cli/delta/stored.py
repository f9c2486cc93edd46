"""Tensors as files store them: dtype names, bytes, digests."""

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOATS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' names of what a gate may be -> torch's


def dtype_named(name: str) -> "torch.dtype":
    """torch's dtype of safetensors' name. Raises KeyError for what no gate may be."""
    import torch

    dtype = getattr(torch, FLOATS[name])
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_label(dtype: "torch.dtype") -> str:
    """As remoe.json names it ("bfloat16")."""
    return str(dtype).removeprefix("torch.")


def stored_bytes(tensor: "torch.Tensor") -> bytes:
    """A tensor's bytes as safetensors stores them."""
    import torch

    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def digest(stored: bytes) -> str:
    """sha256, hex."""
    return hashlib.sha256(stored).hexdigest()

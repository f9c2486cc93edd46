"""Weights that are stored in fewer bits, and the numbers that they stand for.

fp8 (DeepSeek-V3 and its like): F8_E4M3 [O, I] beside `NAME_scale_inv`, one scale a block (usually 128 by 128, the last ones may
be cut); weight = stored x scale. mxfp4 (gpt-oss; OCP Microscaling Formats 1.0): `NAME_blocks` U8 [E, O, G, 16], two E2M1
numbers a byte, the low half first, and `NAME_scales` U8 [E, O, G], the exponent of a power of two, plus 127, of each 32; the
weight is [E, 32 G, O]. Gates are never stored so.

Shape letters: E experts, O outputs, I inputs, G groups of 32 inputs.
"""

import math

import torch

from remoe_cli.errors import CheckpointError, FamilyError
from remoe_cli.hub.checkpoint import Checkpoint, TensorInfo

STORED = {"F8_E4M3": torch.float8_e4m3fn, "U8": torch.uint8, "F32": torch.float32, "BF16": torch.bfloat16}
BLOCK = 128
BYTES = {"fp8": 1 + 4 / BLOCK**2, "mxfp4": 17 / 32}  # a weight, with its share of a scale
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_BIAS = 127


def is_quantised(checkpoint: Checkpoint) -> bool:
    return bool(checkpoint.config.get("quantization_config"))


def weights(checkpoint: Checkpoint) -> dict[str, TensorInfo]:
    """On-disk name -> place of every weight, as `Checkpoint.tensors` but for quantised ones: their scales are in
    `TensorInfo.scales`, and an mxfp4 one has its name without the "_blocks".

    Raises CheckpointError where scales do not fit their weight, FamilyError for any other layout.
    """
    tensors = checkpoint.tensors
    if not is_quantised(checkpoint):
        return tensors
    found = {}
    for name, info in tensors.items():
        if name.endswith(("_scales", "_scale_inv", ".activation_scale", ".input_scale")):
            continue
        if name.endswith("_blocks"):
            found[name.removesuffix("_blocks")] = _mxfp4(checkpoint, name, info)
        elif info.dtype == "F8_E4M3":
            found[name] = _fp8(checkpoint, name, info)
        else:
            found[name] = info
    return found


def shape_of(info: TensorInfo) -> tuple[int, ...]:
    """Of the weight in memory."""
    if info.scales is None or info.dtype != "U8":
        return info.shape
    *experts, outputs, groups, _ = info.shape
    return (*experts, 32 * groups, outputs)


def dequantised(stored: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[O, I] or [..., 32 G, O]: products in fp32, rounded once."""
    if stored.dtype == torch.uint8:
        table = torch.tensor(_E2M1, dtype=torch.float32, device=stored.device)
        halves = torch.stack((table[(stored & 15).long()], table[(stored >> 4).long()]), -1).flatten(-2)
        numbers = torch.ldexp(halves, (scales.int() - _BIAS)[..., None])
        return numbers.flatten(-2).to(dtype).transpose(-1, -2)
    numbers = stored.float()
    rows, columns = numbers.shape
    for dim, size in enumerate((rows, columns)):
        scales = scales.repeat_interleave(_block(size, scales.shape[dim]), dim)
    return (numbers * scales[:rows, :columns].float()).to(dtype)


def _block(size: int, scales: int) -> int:
    """Places that share a scale along a dimension: BLOCK and a shorter last one, or a whole fraction."""
    return BLOCK if math.ceil(size / BLOCK) == scales else size // scales


def _fp8(checkpoint: Checkpoint, name: str, info: TensorInfo) -> TensorInfo:
    scales = checkpoint.tensors.get(f"{name}_scale_inv")
    if scales is None or scales.dtype not in ("F32", "BF16") or len(info.shape) != 2:
        raise _unknown(checkpoint, name, info)
    if len(scales.shape) != 2:
        scales = scales._replace(shape=(1, 1)) if math.prod(scales.shape) == 1 else scales
    fits = len(scales.shape) == 2 and all(
        parts > 0 and (size % parts == 0 or parts == math.ceil(size / BLOCK))
        for size, parts in zip(info.shape, scales.shape, strict=True)
    )
    if not fits:
        raise _misfit(checkpoint, name, info, scales)
    return info._replace(scales=scales)


def _mxfp4(checkpoint: Checkpoint, name: str, info: TensorInfo) -> TensorInfo:
    scales = checkpoint.tensors.get(name.removesuffix("_blocks") + "_scales")
    if scales is None or (info.dtype, scales.dtype) != ("U8", "U8") or len(info.shape) != 4:
        raise _unknown(checkpoint, name, info)
    if info.shape[-1] != 16 or scales.shape != info.shape[:-1]:
        raise _misfit(checkpoint, name, info, scales)
    return info._replace(scales=scales)


def _unknown(checkpoint: Checkpoint, name: str, info: TensorInfo) -> FamilyError:
    return FamilyError(
        f"{checkpoint.id} stores {name} as {info.dtype} {list(info.shape)} in a way that remoe does not know; it reads fp8 "
        "with scales a block, and mxfp4.",
        f"remoe finetune a bf16 copy of {checkpoint.id}",
    )


def _misfit(checkpoint: Checkpoint, name: str, info: TensorInfo, scales: TensorInfo) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint.id}: {name} is {list(info.shape)}, which its scales {list(scales.shape)} do not fit.",
        "copy or download the model again",
    )

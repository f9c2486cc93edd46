"""Expert weights in 8 or 4 bits: how they are made, how they lie in a store, and products with them.

int8: [O, I] codes, one scale a row: weight = code x scale. int4: a scale and a zero for each group of inputs of a row: weight =
(code - 8) x scale + zero. The codes of int4 lie as torch's kernel for AVX-512 wants them: rows in blocks of 64 (the last one filled
up with zeros), of a block input by input 32 bytes, of which byte j holds row j below and row j + 32 above. Where torch's kernel
(Where 32 does not divide the inputs, both codes and inputs are filled up with zeros.) Where torch's kernel
for this machine wants something else, or has none for the dtype, weights are unpacked before each product.

Shape letters: M rows, O outputs, I inputs, G groups of inputs, B blocks of rows.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch.nn import functional as F

UNPACKED = "torch has no kernel for experts in 8 or 4 bits on this device and in this dtype: they are unpacked before each product"
INT4, INT8 = "int4", "int8"
SMALL = (INT8, INT4)
GROUPS = (32, 64, 128, 256)  # inputs that share a scale, as the kernel takes them
_BLOCK = 64
_MOST_ROWS = 8  # with more, unpacking first is quicker than the kernel
_SHRINK = (1.0, 0.9, 0.8)  # of a group's range, tried for the least squared error


class Small(NamedTuple):
    """One weight. codes: uint8 [B, I, 32] of int4, int8 [O, I]; scales: bf16 [G, 64 B, 2] (scale, zero) of int4, [O] of int8."""

    codes: torch.Tensor
    scales: torch.Tensor
    rows: int

    def __len__(self) -> int:
        return self.rows

    @property
    def is_int4(self) -> bool:
        return self.codes.dtype == torch.uint8

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O]"""
        if x.shape[-1] < self.codes.shape[1]:
            x = F.pad(x, (0, self.codes.shape[1] - x.shape[-1]))
        if not has_kernel(x.device.type, x.dtype) or x.numel() > _MOST_ROWS * x.shape[-1]:
            return F.linear(x, self.weight(x.dtype))
        x_MI = x.reshape(-1, x.shape[-1])
        if self.is_int4:
            packed, group = self.codes.view(len(self.codes) * _BLOCK, -1), x.shape[-1] // len(self.scales)
            out = torch._weight_int4pack_mm_for_cpu(x_MI, packed, group, self.scales)[:, : self.rows]
        else:
            out = torch._weight_int8pack_mm(x_MI, self.codes, self.scales)
        return out.view(*x.shape[:-1], self.rows)

    def weight(self, dtype: torch.dtype) -> torch.Tensor:
        """[O, I], of int4 with the inputs that were filled up."""
        if not self.is_int4:
            return self.codes.to(dtype) * self.scales.to(dtype)[:, None]
        low_BIH, high_BIH = self.codes & 15, self.codes >> 4
        codes_OI = torch.cat((low_BIH, high_BIH), -1).transpose(1, 2).reshape(-1, self.codes.shape[1])
        scale_OG1, zero_OG1 = (part.t()[..., None] for part in self.scales.to(dtype).unbind(-1))
        groups_OGJ = (codes_OI.to(dtype) - 8).view(*scale_OG1.shape[:2], -1)
        return (groups_OGJ * scale_OG1 + zero_OG1).view(codes_OI.shape)[: self.rows]


def int8(weight_OI: torch.Tensor) -> Small:
    """weight: fp32."""
    scale_O = (weight_OI.abs().amax(1) / 127).clamp_min(1e-12).bfloat16()
    codes = (weight_OI / scale_O.float()[:, None]).round().clamp(-127, 127).to(torch.int8)
    return Small(codes, scale_O, len(weight_OI))


def int4(weight_OI: torch.Tensor, group: int) -> Small:
    """weight: fp32; group: as `group_for` says. Of each group the range that leaves the least squared error of a few."""
    rows = len(weight_OI)
    weight_OI = F.pad(weight_OI, (0, -weight_OI.shape[1] % GROUPS[0], 0, -rows % _BLOCK))
    codes, scales = zip(
        *(_nearest(part.view(_BLOCK, -1, group)) for part in weight_OI.split(_BLOCK))
    )  # stays in the core's cache
    return Small(blocked(torch.cat(codes).view(weight_OI.shape)), torch.cat(scales).transpose(0, 1).contiguous(), rows)


def _nearest(groups_OGJ: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [O, G, J], and scales and zeros bf16 [O, G, 2]."""
    low, high = groups_OGJ.aminmax(dim=-1, keepdim=True)
    found: list[torch.Tensor] = []
    for shrink in _SHRINK:
        scale = ((high - low) * (shrink / 15)).clamp_min_(1e-12).bfloat16().float()
        zero = ((high + low) / 2 + scale / 2).bfloat16().float()  # the middle lies between codes 7 and 8
        codes = torch.sub(groups_OGJ, zero).div_(scale).round_().clamp_(-8, 7)
        error = (codes * scale).add_(zero).sub_(groups_OGJ).square_().sum(-1, keepdim=True)
        new = [codes, scale, zero, error]
        found = [torch.where(error < found[3], one, old) for one, old in zip(new, found, strict=True)] if found else new
    codes, scale, zero, _ = found
    return codes.add_(8).to(torch.uint8), torch.cat((scale, zero), -1).bfloat16()


def blocked(codes_OI: torch.Tensor) -> torch.Tensor:
    """[O, I] codes below 16, O a multiple of 64 -> [B, I, 32]"""
    halves = codes_OI.view(-1, 2, _BLOCK // 2, codes_OI.shape[1]).transpose(2, 3)
    return (halves[:, 0] | halves[:, 1] << 4).contiguous()


def group_for(inputs: int, most: int) -> int:
    """The largest group of at most `most` inputs that divides them, once they are filled up to a multiple of 32."""
    return max(group for group in GROUPS if group <= most and _filled(inputs) % group == 0)


def _filled(inputs: int) -> int:
    return inputs + -inputs % GROUPS[0]


def shapes(shape: tuple[int, int], precision: str, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of codes and scales of a weight [O, I]."""
    outputs, inputs = shape
    if precision == INT8:
        return shape, (outputs,)
    blocks = -(-outputs // _BLOCK)
    filled = _filled(inputs)
    return (blocks, filled, _BLOCK // 2), (filled // group, blocks * _BLOCK, 2)


def unpacked(small: bool, device: str, dtype: torch.dtype) -> list[str]:
    """What to say of a decoder whose experts are small and have no kernel; nothing of any other."""
    return [UNPACKED] if small and not has_kernel(device, dtype) else []


@lru_cache
def has_kernel(device: str, dtype: torch.dtype) -> bool:
    """Whether torch multiplies with these codes as they lie: in bf16, on a CPU whose kernel packs int4 as the store does."""
    if device != "cpu" or dtype != torch.bfloat16:
        return False
    pattern = torch.arange(2 * _BLOCK * 32, dtype=torch.int32).mul_(7).remainder_(16).view(-1, 32)
    try:
        packed = torch._convert_weight_to_int4pack_for_cpu(pattern, 1)
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return torch.equal(packed.flatten(), blocked(pattern.to(torch.uint8)).flatten())

"""Tensors as files hold them."""

import torch

from remoe_cli.families.quantised import dequantised, STORED
from remoe_cli.hub.checkpoint import TensorInfo

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
INTEGERS = {"I64": torch.int64, "I32": torch.int32}  # tables beside the weights, such as which expert a token id takes
TORCH = {**DTYPES, **STORED, **INTEGERS}  # all that is read


class Stored:
    """A tensor in its file, read into memory of its own when the loader asks for it.

    safetensors would hand out views of the mapped file: page faults during decoding, counted as reads nobody made, and
    a crash where the file shrinks. Quantised weights come in `dtype`.
    """

    def __init__(self, info: TensorInfo, dtype: torch.dtype) -> None:
        self._info, self._dtype = info, dtype

    def __getitem__(self, _whole: object) -> torch.Tensor:
        read = self._read(self._info)
        scales = self._info.scales
        return read if scales is None else dequantised(read, self._read(scales), self._dtype)

    @staticmethod
    def _read(info: TensorInfo) -> torch.Tensor:
        raw = torch.empty(info.nbytes, dtype=torch.uint8)
        with open(info.file, "rb", buffering=0) as file:
            file.seek(info.offset)
            rest = raw.numpy().data
            while rest:
                got = file.readinto(rest)
                if not got:
                    raise OSError(f"{info.file} ends inside a tensor")
                rest = rest[got:]
        return raw.view(TORCH[info.dtype]).view(info.shape)

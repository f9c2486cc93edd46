"""A model folder in Hugging Face format, read through its headers: which tensor lies where, and is it all there."""

import hashlib
import json
import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from remoe_cli.errors import CheckpointError

_MAX_HEADER = 100_000_000  # the safetensors format's own bound, bytes; no JSON file of a model is larger either
_ITEM_BYTES = {
    "F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
_MAX_NAME = 255  # bytes of a file's name, characters of a tensor's
_MAX_DIMS = 64  # torch's own bound
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorInfo(NamedTuple):
    """Where one tensor lies: `nbytes` bytes from `offset` (absolute) in `file`; dtype as safetensors writes it ("BF16"). scales:
    of a quantised weight, see families/quantised.py."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    scales: "TensorInfo | None" = None


@dataclass(frozen=True)
class Checkpoint:
    """id: what the user called it; commit: 40-hex for a Hub model, None for a local folder."""

    folder: Path
    id: str
    commit: str | None = None
    config: dict = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: Path, id: str | None = None, commit: str | None = None) -> "Checkpoint":
        """Reads config.json and every shard's header. Raises CheckpointError for a missing or truncated file."""
        folder = Path(folder)
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder} has no config.json, so it is not a model folder.", f"ls {folder}")
        config = read_object(folder / "config.json")
        checkpoint = cls(folder, id or str(folder), commit, config)
        checkpoint.tensors  # noqa: B018  read the headers now, so that damage is named before any work starts
        return checkpoint

    @property
    def model_type(self) -> str:
        return str(self.config.get("model_type", "unknown"))

    @cached_property
    def files(self) -> list[Path]:
        """The weight files that the index names (stray files beside them are not part of the model)."""
        index = self.folder / INDEX
        if index.is_file():
            names = indexed(index)
        elif (self.folder / SINGLE).is_file():
            names = [SINGLE]
        else:
            raise CheckpointError(
                f"{self.folder} has neither {INDEX} nor {SINGLE}; remoe reads safetensors only.", f"ls {self.folder}"
            )
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{self.folder} lacks {len(missing)} of {len(names)} weight files that its index names: {missing[0]}"
                + (", ..." if len(missing) > 1 else "") + ".",
                self._refetch(),
            )  # fmt: skip
        return [self.folder / name for name in names]

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """On-disk name -> place, over all weight files."""
        found: dict[str, TensorInfo] = {}
        for file in self.files:
            found.update(self._header(file))
        return found

    def read(self, name: str):
        """One tensor by its on-disk name, in its stored dtype (torch, CPU)."""
        from safetensors import safe_open

        with safe_open(self.tensors[name].file, framework="pt") as file:
            return file.get_tensor(name)

    def raw(self, name: str) -> bytes:
        """The stored bytes of one tensor."""
        info = self.tensors[name]
        with open(info.file, "rb") as file:
            file.seek(info.offset)
            return file.read(info.nbytes)

    def sha256(self, *names: str) -> str:
        """Hex digest of the stored bytes of a tensor, or of several one after the other."""
        digest = hashlib.sha256()
        for name in names:
            digest.update(self.raw(name))
        return digest.hexdigest()

    def _header(self, file: Path) -> dict[str, TensorInfo]:
        try:
            return read_header(file)
        except ValueError as error:
            raise CheckpointError(f"{file} is truncated or damaged: {error}.", self._refetch()) from None

    def _refetch(self) -> str:
        if self.commit:
            return f"hf download {self.id} --revision {self.commit} --force-download"
        return "copy the folder again from where it came"


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, from its header alone. Raises ValueError with the reason when it is damaged."""
    try:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > _MAX_HEADER or 8 + length > size:
                raise ValueError("its header is cut off")
            header = _parsed(stream.read(length))
    except OSError as error:
        raise ValueError(f"it cannot be read ({error.strerror})") from None
    return placed(file, header, 8 + length, size)


def placed(file: Path, header: dict, start: int, size: int) -> dict[str, TensorInfo]:
    """The tensors of a safetensors header. start: where the data begins in the file; size: the file's, bytes. Raises ValueError
    with the reason when the header is damaged."""
    found: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if len(name) > _MAX_NAME:
            raise ValueError(f"its header names a tensor in {len(name):,} characters")
        try:
            (begin, end), shape = entry["data_offsets"], tuple(entry["shape"])
            info = TensorInfo(file, start + begin, end - begin, entry["dtype"], shape)
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"its header does not say where {name} lies") from None
        numbers = (begin, end, *shape)
        if not isinstance(info.dtype, str) or len(shape) > _MAX_DIMS or not all(map(_is_size, numbers)):
            raise ValueError(f"its header does not say where {name} lies")
        size_of_one = _ITEM_BYTES.get(info.dtype)
        if begin > end or (size_of_one is not None and info.nbytes != size_of_one * math.prod(shape)):
            raise ValueError(f"its header puts {name} {list(info.shape)} at the bytes {begin} to {end}")
        if start + end > size:
            raise ValueError(f"it holds {size:,} bytes but {name} ends at {start + end:,}")
        found[name] = info
    before = start
    for name, info in sorted(found.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if info.offset < before:
            raise ValueError(f"its header gives bytes of {name} to another tensor too")
        before = info.offset + info.nbytes
    return found


def read_object(path: Path) -> dict:
    """A JSON file that holds one object. Raises CheckpointError when it cannot be read or holds anything else."""
    try:
        if (size := path.stat().st_size) > _MAX_HEADER:
            raise ValueError(f"it holds {size:,} bytes")
        return _parsed(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).", f"ls -l {path}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: {error}.", f"cat {path}") from None


def indexed(index: Path) -> list[str]:
    """The weight files that a safetensors index names. Raises CheckpointError when it is none."""
    places = read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(_is_name(name) for name in places.values()):
        raise CheckpointError(f"{index} is not a safetensors index: its weight_map names no files.", f"cat {index}")
    return sorted(set(places.values()))


def _is_name(name: object) -> bool:
    """Of a weight file in the model's own folder: nothing that leads out of it, is hidden, or is no name at all."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and len(name.encode()) <= _MAX_NAME
        and not name.startswith(".")
        and name.endswith(".safetensors")
        and Path(name).name == name
    )


def _is_size(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**63


def _parsed(text: bytes) -> dict:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("it holds no JSON object")
    return value

"""A model folder in Hugging Face format, read through its headers: which tensor lies where, and is it all there."""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from remoe_cli.errors import CheckpointError

_MAX_HEADER = 100_000_000  # the safetensors format's own bound, bytes
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class TensorInfo(NamedTuple):
    """Where one tensor lies: `nbytes` bytes from `offset` (absolute) in `file`; dtype as safetensors writes it ("BF16")."""

    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


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
        path = folder / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{folder} has no config.json, so it is not a model folder.", f"ls {folder}")
        try:
            config = json.loads(path.read_text())
        except ValueError as error:
            raise CheckpointError(f"{path} is not valid JSON ({error}).", f"cat {path}") from None
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
            try:
                names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
            except (ValueError, KeyError, AttributeError):
                raise CheckpointError(f"{index} is not a safetensors index.", f"cat {index}") from None
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

    def sha256(self, name: str) -> str:
        """Hex digest of the stored bytes of one tensor."""
        return hashlib.sha256(self.raw(name)).hexdigest()

    def _header(self, file: Path) -> dict[str, TensorInfo]:
        size = file.stat().st_size
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > _MAX_HEADER or 8 + length > size:
                raise self._damaged(file, "its header is cut off")
            try:
                header = json.loads(stream.read(length))
            except ValueError:
                raise self._damaged(file, "its header is not JSON") from None
        header.pop("__metadata__", None)
        start, found = 8 + length, {}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if start + end > size:
                raise self._damaged(file, f"it holds {size:,} bytes but {name} ends at {start + end:,}")
            found[name] = TensorInfo(file, start + begin, end - begin, entry["dtype"], tuple(entry["shape"]))
        return found

    def _damaged(self, file: Path, why: str) -> CheckpointError:
        return CheckpointError(f"{file} is truncated or damaged: {why}.", self._refetch())

    def _refetch(self) -> str:
        if self.commit:
            return f"hf download {self.id} --revision {self.commit} --force-download"
        return "copy the folder again from where it came"

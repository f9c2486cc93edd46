"""Packed experts: one file a MoE layer in which each expert's tensors lie side by side from a page on, so that one read
brings it whole: as they are stored, for checkpoints that keep an expert's tensors apart, or in 8 or 4 bits a weight."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from remoe_cli import atomic
from remoe_cli.errors import CheckpointError, command, RunError, UsageError
from remoe_cli.families.experts import ExpertLayer, Piece
from remoe_cli.hub.checkpoint import Checkpoint, read_object
from remoe_cli.offload.arena import PAGE
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.small import SMALL
from remoe_cli.offload.small_pack import blocks, small_layers

try:
    import fcntl
except ImportError:  # Windows: two processes that pack into one folder are not told apart there
    fcntl = None  # type: ignore[assignment]


class Form(NamedTuple):
    """experts: "stored", or a precision of offload.small. group: inputs that share a scale of int4, at most."""

    experts: str
    group: int = 0


STORED = Form("stored")
FACTS = "pack.json"
FORMAT = 1
# what is compared of a store and a checkpoint, and what a message calls it
_LAYOUT = {
    "layers": "the MoE layers",
    "experts": "the numbers of experts",
    "dtype": "the dtypes",
    "expert_bytes": "the sizes of experts",
    "layout": "the shapes of experts",
}
_SAMPLE = 4096  # bytes of each expert that must equal the checkpoint's


def reads_an_expert(layers: Sequence[ExpertLayer]) -> float:
    """How many stretches of a file hold one expert, on average."""
    images = [image for row in Layout(layers, torch.float32, direct=False).images for image in row]
    return sum(len(image.windows) for image in images) / len(images)


def packed_bytes(layers: Sequence[ExpertLayer], form: Form = STORED) -> int:
    """The size of a store of these layers."""
    return sum(_places(layer)[1] for layer in _in_form(layers, Path(), form))


def write(
    layers: Sequence[ExpertLayer],
    checkpoint: Checkpoint,
    out: Path,
    *,
    form: Form = STORED,
    on_bytes: Callable[[int], None] = lambda _done: None,
) -> None:
    """Packs the experts of `layers` (of this checkpoint) into the new folder `out`. on_bytes: is told how many bytes are done.

    The folder appears when it is whole; whatever ends this earlier leaves nothing, `kill -9` a hidden folder that the next
    call removes. Raises RunError where `out` is taken, cannot be written, or is being packed by another process,
    CheckpointError where a source file cannot be read.
    """
    done = 0
    with _alone(out) as scratch, _Files() as files:
        made = _in_form(layers, scratch, form)
        for layer, contents in zip(made, _contents(layers, form, files), strict=True):
            starts, end = _places(layer)
            with open(scratch / _file_name(layer), "wb") as stream:
                for content, start, after in zip(contents, starts, [*starts[1:], end], strict=True):
                    stream.write(content.ljust(after - start, b"\0"))
                    done += after - start
                    on_bytes(done)
                stream.flush()
                os.fsync(stream.fileno())
        facts = _facts(layers, checkpoint, form)
        if form.experts != STORED.experts:
            facts["samples"] = [files.samples(layers), files.samples(made)]
        atomic.write(scratch / FACTS, json.dumps(facts, indent=1) + "\n")


def _in_form(layers: Sequence[ExpertLayer], folder: Path, form: Form) -> list[ExpertLayer]:
    """These layers as a store in `folder` has them."""
    files = [folder / _file_name(layer) for layer in layers]
    if form.experts == STORED.experts:
        return [_moved(layer, file) for layer, file in zip(layers, files, strict=True)]
    return small_layers(layers, form.experts, form.group, files)


def _contents(layers: Sequence[ExpertLayer], form: Form, files: "_Files") -> Iterator[Iterator[bytes]]:
    """Of each layer each expert's bytes, without what fills up its last page."""
    if form.experts != STORED.experts:
        yield from blocks(layers, form.experts, form.group, files.read)
        return
    for layer in layers:
        yield (b"".join(files.whole(piece) for piece in layer.pieces(expert)) for expert in range(layer.n_experts))


def packed(layers: Sequence[ExpertLayer], checkpoint: Checkpoint, folder: Path) -> list[ExpertLayer]:
    """The same layers, with every piece in the packed files of `folder`.

    4 KiB of each expert are compared with the checkpoint's. Raises CheckpointError where the folder is no whole store, or
    one of another model, revision, dtype or layout.
    """
    facts = _check_facts(layers, checkpoint, folder)
    form = form_of(facts)
    moved = _in_form(layers, folder, form)
    for layer in moved:
        file, (_, end) = folder / _file_name(layer), _places(layer)
        size = file.stat().st_size if file.is_file() else None
        if size != end:
            held = "is missing" if size is None else f"holds {size:,} bytes, not {end:,}"
            raise CheckpointError(f"{file} {held}: the packed experts are not whole.", _again(checkpoint, folder, form))
    with _Files() as files:
        if form.experts != STORED.experts and facts.get("samples") != [files.samples(layers), files.samples(moved)]:
            raise CheckpointError(
                f"the experts in {folder} are not those of {checkpoint.id}: they were packed from another model, or damaged since.",
                _again(checkpoint, folder, form),
            )
        for layer, after in zip(layers, moved, strict=True) if form.experts == STORED.experts else ():
            for expert in range(layer.n_experts):
                if files.sample(layer, expert) != files.sample(after, expert):
                    raise CheckpointError(
                        f"expert {expert} of layer {layer.layer} in {folder} is not that of {checkpoint.id}: it was packed "
                        "from another model, or damaged since.",
                        _again(checkpoint, folder),
                    )
    return moved


def form_of(facts: dict[str, Any]) -> Form:
    """Of a store's pack.json."""
    return Form(facts.get("experts_as", STORED.experts), facts.get("group", 0))


def check_form(folder: Path | None, experts: str | None, again: Callable[..., str]) -> None:
    """Raises UsageError where packed experts are asked for in one form and lie there in another. again: the command with
    options changed."""
    if experts is None:
        return
    if experts not in (allowed := (STORED.experts, *SMALL)):
        raise UsageError(
            f"--experts is {', '.join(allowed[:-1])} or {allowed[-1]}, not {experts!r}.", again(experts=None)
        )
    if folder is None:
        if experts != STORED.experts:
            raise UsageError(
                f"--experts {experts}: the checkpoint has them as stored; --pack names a folder that has them so.",
                command("pack", "MODEL", experts=experts, out="DIR"),
            )
        return
    held = form_of(read_object(folder / FACTS)).experts if (folder / FACTS).is_file() else experts
    if held != experts:
        raise UsageError(f"{folder} holds the experts as {held}, not as {experts}.", again(experts=held))


def _check_facts(layers: Sequence[ExpertLayer], checkpoint: Checkpoint, folder: Path) -> dict[str, Any]:
    if not (folder / FACTS).is_file():
        raise CheckpointError(f"{folder} holds no packed experts (no {FACTS}).", _again(checkpoint, folder))
    facts, expected = read_object(folder / FACTS), _facts(layers, checkpoint)
    if facts.get("format") != FORMAT:
        raise CheckpointError(
            f"{folder} is of the format {facts.get('format')!r}; this version reads {FORMAT}.",
            _again(checkpoint, folder),
        )
    commits = (facts.get("commit"), checkpoint.commit)
    if all(commits) and commits[0] != commits[1]:
        raise CheckpointError(
            f"{folder} was packed from {facts.get('model')}@{commits[0]}, not from {checkpoint.id}@{commits[1]}.",
            _again(checkpoint, folder),
        )
    for key, name in _LAYOUT.items():
        if facts.get(key) != expected[key]:
            raise CheckpointError(
                f"{folder} was packed from {facts.get('model')}, where {name} are not those of {checkpoint.id}.",
                _again(checkpoint, folder),
            )
    return facts


def _facts(layers: Sequence[ExpertLayer], checkpoint: Checkpoint, form: Form = STORED) -> dict[str, Any]:
    pieces = [
        [(part.name, *piece[2:7], *filter(None, piece[7:])) for part in layer.parts for piece in part.pieces[expert]]
        for layer in layers
        for expert in range(layer.n_experts)
    ]
    return {
        "format": FORMAT,
        "model": checkpoint.id,
        "commit": checkpoint.commit,
        "layers": [layer.layer for layer in layers],
        "experts": layers[0].n_experts,
        "dtype": layers[0].pieces(0)[0].dtype,
        "expert_bytes": sum(piece.nbytes for piece in layers[0].pieces(0)),
        "layout": hashlib.sha256(json.dumps(pieces).encode()).hexdigest(),
        **({"experts_as": form.experts, "group": form.group} if form.experts != STORED.experts else {}),
    }


def _places(layer: ExpertLayer) -> tuple[list[int], int]:
    """Where each expert of a layer begins in its packed file, and where the last one ends, all on pages."""
    starts, end = [], 0
    for expert in range(layer.n_experts):
        starts.append(end)
        end += -(-sum(piece.nbytes for piece in layer.pieces(expert)) // PAGE) * PAGE
    return starts, end


def _moved(layer: ExpertLayer, file: Path) -> ExpertLayer:
    ends, _ = _places(layer)  # of what is placed so far of each expert
    parts = []
    for part in layer.parts:
        pieces = []
        for expert, of_expert in enumerate(part.pieces):
            moved = []
            for piece in of_expert:
                moved.append(piece._replace(file=file, offset=ends[expert]))
                ends[expert] += piece.nbytes
            pieces.append(tuple(moved))
        parts.append(part._replace(pieces=tuple(pieces)))
    return layer._replace(parts=tuple(parts))


def _file_name(layer: ExpertLayer) -> str:
    return f"layer-{layer.layer:05d}.bin"


def _again(checkpoint: Checkpoint, folder: Path, form: Form = STORED) -> str:
    model = f"{checkpoint.id}@{checkpoint.commit}" if checkpoint.commit else checkpoint.id
    experts = form.experts if form.experts != STORED.experts else None
    return command("pack", model, experts=experts, out=atomic.free_name(folder if folder.name else folder.absolute()))


@contextmanager
def _alone(out: Path) -> Iterator[Path]:
    """As atomic.new_folder, but the scratch folder has one name for all processes: one of them holds it."""
    atomic.require_free(out)
    out = out.absolute()  # "." has no name
    scratch = out.with_name(f".{out.name}.packing")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(scratch)
    except OSError as error:
        raise atomic.unwritable(out, error) from None
    try:
        for left in scratch.iterdir():
            left.unlink()
        yield scratch
        if out.is_dir():
            out.rmdir()
        os.replace(scratch, out)
    except BaseException as error:
        shutil.rmtree(scratch, ignore_errors=True)
        if isinstance(error, OSError):
            raise atomic.unwritable(out, error) from None
        raise
    finally:
        os.close(lock)


def _lock(scratch: Path) -> int:
    """Makes the folder and holds it until the file descriptor is closed."""
    while True:
        scratch.mkdir(exist_ok=True)
        lock = os.open(scratch, os.O_RDONLY)
        try:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if scratch.exists() and os.path.samestat(os.fstat(lock), os.stat(scratch)):
                return lock
        except BlockingIOError:
            os.close(lock)
            out = scratch.name.removeprefix(".").removesuffix(".packing")
            raise RunError(
                f"another process is packing into {scratch.with_name(out)}.", "the same command once it is done"
            ) from None
        os.close(lock)  # the folder was renamed or removed by who held it


class _Files:
    """Files that are opened as they are first read, and closed with the block."""

    def __init__(self) -> None:
        self._open: dict[Path, int] = {}

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_exc: object) -> None:
        for file in self._open.values():
            os.close(file)

    def read(self, path: Path, offset: int, block: memoryview) -> None:
        """Fills the block. Raises CheckpointError where the file ends early or cannot be read."""
        try:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
            while block:
                got = os.preadv(self._open[path], [block], offset)
                if not got:
                    raise CheckpointError(
                        f"{path} ends at byte {offset}, inside an expert: the file changed since it was opened.",
                        "copy or download the model again",
                    )
                block, offset = block[got:], offset + got
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}.", f"ls -l {path}") from None

    def whole(self, piece: Piece) -> bytes:
        """All of one piece."""
        block = bytearray(piece.nbytes)
        self.read(piece.file, piece.offset, memoryview(block))
        return bytes(block)

    def samples(self, layers: Sequence[ExpertLayer]) -> str:
        """sha256 of the samples of all experts."""
        found = hashlib.sha256()
        for layer in layers:
            for expert in range(layer.n_experts):
                found.update(self.sample(layer, expert))
        return found.hexdigest()

    def sample(self, layer: ExpertLayer, expert: int) -> bytes:
        """Bytes from the middle of an expert's largest piece, which do not stay in the page cache."""
        piece = max(layer.pieces(expert), key=lambda piece: piece.nbytes)
        nbytes = min(piece.nbytes, _SAMPLE)
        offset = piece.offset + (piece.nbytes - nbytes) // 2
        block = bytearray(nbytes)
        self.read(piece.file, offset, memoryview(block))
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._open[piece.file], offset // PAGE * PAGE, 2 * PAGE, os.POSIX_FADV_DONTNEED)
        return bytes(block)

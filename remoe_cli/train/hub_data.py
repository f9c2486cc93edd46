"""Data sets on the Hub, downloaded whole or streamed."""

import random
import re
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from remoe_cli.errors import DataError, RemoeError
from remoe_cli.recipe import Data
from remoe_cli.train.rows import detect, read, READABLE, Row, Shape
from remoe_cli.train.source import ANOTHER, draw, Drawn, HELD_OUT_SPLITS, Source

BLOCK = 10_000  # rows of a stream that are in memory at once, to be shuffled
_NAME = r"[A-Za-z0-9][\w.-]*"
HUB_ID = re.compile(rf"(?P<repo>{_NAME}(?:/{_NAME})?)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>\S+))?")


class _Asked(NamedTuple):
    repo: str
    config: str | None
    revision: str | None

    def __str__(self) -> str:
        part = f"{self.repo}:{self.config}" if self.config else self.repo
        return f"{part}@{self.revision}" if self.revision else part


def load(data: Data, seed: int | None) -> Source:
    """data.source: `org/name[:config][@revision]`. Raises DataError or HubError."""
    match = HUB_ID.fullmatch(data.source)
    assert match is not None  # else it counts as a local file
    asked = _Asked(match["repo"], match["config"], match["revision"])
    commit = _pin(asked)
    pinned = asked._replace(revision=commit or asked.revision)
    splits = _splits(pinned, data.streaming)
    train = splits["train"] if "train" in splits else next(iter(splits.values()))
    first = _first(train, pinned)
    shape = detect(first, data.format)
    if shape is None:
        fields = ", ".join(first) or "none"
        reason = f"the data set {asked} has no text in its fields ({fields}); remoe reads {READABLE}."
        raise DataError(reason, ANOTHER)
    others = [name for name in HELD_OUT_SPLITS if name in splits and splits[name] is not train]
    held = next((name for name in others if _says_something(_first(splits[name], pinned), shape)), None)
    heldout = splits[held] if held else None
    if data.streaming:
        said = f"streamed, {shape}; shuffled in blocks of {BLOCK:,} rows"
        drawn = _stream(train, heldout, data, seed, pinned)
    else:
        said = f"{train.num_rows:,} rows, {shape}"
        drawn = draw(data.source, train, heldout, data, seed)
    notes = [f"{asked.repo}: {said}"]
    if held:
        notes.append(f"{asked.repo}: held-out rows are of its split {held}")
    if commit is None:
        notes.append(f"{asked.repo}: the Hub gave no answer, its cached copy is read")
    name = asked._replace(revision=commit[:12] if commit else None)
    return Source(str(name), str(pinned), shape, drawn, notes)


def _says_something(row: Any, shape: Shape) -> bool:
    """A published test split may have come without its answers."""
    try:
        return set(shape.fields) <= set(row) and bool(read(row, shape))
    except ValueError:
        return False


def _stream(train: Any, heldout: Any | None, data: Data, seed: int | None, asked: _Asked) -> Drawn:
    """Held out are the first rows of their split, else of the data set itself; the next rows are trained on."""
    first = train if heldout is None else heldout
    held = list(_explained(islice(first, data.heldout_samples), asked))
    skipped = len(held) if heldout is None else 0

    def rows(start: int) -> Iterator[Row]:
        """Blocks, each shuffled by the seed and its number, so that reading may begin at any place."""
        block, inside = divmod(start, BLOCK)
        read = block * BLOCK
        reading = _explained(train.skip(skipped + read).take(max(0, data.train_samples - read)), asked)
        while chunk := list(islice(reading, BLOCK)):
            random.Random(f"{seed} {block}").shuffle(chunk)
            yield from chunk[inside:]
            block, inside = block + 1, 0

    return Drawn(rows, data.train_samples, held, streamed=True)


def _first(rows: Iterable[Row], asked: _Asked) -> Row:
    return next(_explained(rows, asked), {})


def _explained(rows: Iterable[Row], asked: _Asked) -> Iterator[Row]:
    """The rows; what `datasets` raises on the way, in our words."""
    try:
        yield from rows
    except Exception as error:
        raise _explain(error, asked) from error


def _pin(asked: _Asked) -> str | None:
    """The commit of the data set; None when the Hub cannot be asked (then its cached copy will do)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    from remoe_cli.hub.failures import explain, MissingError, unreachable

    try:
        found = HfApi().dataset_info(asked.repo, revision=asked.revision, timeout=30)
        if found.gated:  # its description is open to all, its files are not; `datasets` would hide the reason
            HfApi().auth_check(asked.repo, repo_type="dataset")
        return found.sha
    except HFValidationError as error:
        raise DataError(f"{asked} is neither a file here nor a Hub data set ({error}).", ANOTHER) from error
    except Exception as error:  # the library raises its own and httpx's: explain tells them apart
        if unreachable(error):
            return None
        reason = explain(error, asked.repo, "dataset", asked.revision)
        if isinstance(reason, MissingError):
            raise DataError(f"there is no file ./{asked}, and {reason.message}", reason.hint) from error
        raise reason from error


def _splits(asked: _Asked, streaming: bool) -> dict[str, Any]:
    try:
        import datasets
    except ImportError as error:
        reason = f"the data set {asked.repo} needs the package `datasets` ({error})."
        raise DataError(reason, "pip install datasets") from None
    try:
        return datasets.load_dataset(asked.repo, asked.config, revision=asked.revision, streaming=streaming)
    except Exception as error:
        raise _explain(error, asked) from error


def _explain(error: Exception, asked: _Asked) -> RemoeError:
    """For what `datasets` raises: its own errors, the Hub's, Arrow's and the file system's."""
    from remoe_cli.hub.failures import explain, unreachable, without_token

    if unreachable(error) or (isinstance(error, OSError) and error.errno is not None):
        return explain(error, asked.repo, "dataset", asked.revision)
    said = without_token(" ".join(str(error).split()))[:300]
    if isinstance(error, ValueError) and "config" in said.lower():
        return DataError(f"the data set {asked.repo} has several parts: {said}", f"--data {asked.repo}:PART")
    return DataError(f"the data set {asked.repo} cannot be read ({type(error).__name__}: {said}).", ANOTHER)

"""Local texts: a file, or the data files of a folder."""

import csv
import gzip
import hashlib
import io
import json
import re
import shlex
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from remoe_cli.errors import DataError
from remoe_cli.recipe import Data
from remoe_cli.train.rows import detect, read, READABLE, Row, Shape
from remoe_cli.train.source import ANOTHER, draw, HELD_OUT_SPLITS, Source

SEPARATOR = "<|endoftext|>"
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
FORMS = (*TABLES, ".txt")
COMPRESSED = (".gz", ".zst")
_ABOUT = ("readme", "license", "licence", "notice", "source", "changelog")  # .txt files of these names are no data
_NAMED = 5  # files of a folder in a note
_SPLIT = re.compile(rf"(train|{'|'.join(HELD_OUT_SPLITS)})(?![a-z0-9])", re.IGNORECASE)


def load(path: Path, data: Data, seed: int | None) -> Source:
    """Every row is read once here, so that a malformed one is named with its place; seed: as `draw`. Raises DataError."""
    if not path.exists():
        raise DataError(f"there is no file {path}.", f"ls {shlex.quote(str(path.parent))}")
    train, held, others = _of_folder(path) if path.is_dir() else ([path], [], [])
    rows, shape = _rows(train, data.format)
    heldout = _rows(held, data.format, shape)[0] if held else None
    name = path.resolve().name
    said = f"{len(rows):,} rows, {shape}"
    if all(form(file) == ".txt" for file in train):
        said = f"{len(rows):,} documents, cut at lines that hold only {SEPARATOR}"
        if len(rows) == 1 and heldout is None and seed is not None:
            rows, heldout = _cut(rows[0]["text"], path)
            said = f"one document; its last tenth is held out (lines of only {SEPARATOR} would separate several)"
    for what, these in (("from", train), ("held out", held), ("not read", others)):
        if these and path.is_dir():
            said += f"; {what}: {_names(these)}"
    drawn, digest = draw(name, rows, heldout, data, seed), hashlib.sha256()
    for row in [*rows, *(heldout or [])]:
        digest.update(json.dumps(row, default=str).encode())
    return Source(name, str(path.resolve()), shape, drawn, [f"{name}: {said}"], digest.hexdigest())


def _of_folder(folder: Path) -> tuple[list[Path], list[Path], list[Path]]:
    """Files to train on, files held out, others. Beside tables, .txt files are no data."""
    files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    tables = [file for file in files if form(file) in TABLES]
    texts = [file for file in files if form(file) == ".txt" and file.name.split(".")[0].lower() not in _ABOUT]
    chosen = tables or texts
    if not chosen:
        raise DataError(f"{folder} holds no data file ({', '.join(FORMS)}).", f"ls {shlex.quote(str(folder))}")
    splits: dict[str, list[Path]] = {}
    for file in chosen:
        named = _SPLIT.match(file.name)
        splits.setdefault(named[1].lower() if named else "", []).append(file)
    train = splits.get("train") or splits.get("")
    if train is None:  # nothing but files that are named as held out
        train, splits = chosen, {}
    held = next((splits[name] for name in HELD_OUT_SPLITS if name in splits), [])
    return train, held, [file for file in files if file not in train and file not in held]


def _names(files: list[Path]) -> str:
    more = f" and {len(files) - _NAMED} more" if len(files) > _NAMED else ""
    return ", ".join(file.name for file in files[:_NAMED]) + more


def _cut(text: str, path: Path) -> tuple[list[Row], list[Row]]:
    """One document without its last tenth, and that; cut at a line's end."""
    at = text.find("\n", len(text) * 9 // 10) + 1
    if not at:
        hint = f"a line that holds only {SEPARATOR} between the documents of {path.name}, then the same command"
        raise DataError(f"{path} holds one document only, of one line, so nothing can be held out.", hint)
    return [{"text": text[:at]}], [{"text": text[at:]}]


def _rows(files: Sequence[Path], format: str, shape: Shape | None = None) -> tuple[list[Row], Shape]:
    """All rows, and their shape: that of the first, whose fields all others must have."""
    rows: list[Row] = []
    for file in files:
        for number, row in rows_of(file):
            where = f"{file}, {'line' if form(file) == '.jsonl' else 'row'} {number}"
            hint = _show(file, number) if form(file) == ".jsonl" else ANOTHER
            if not isinstance(row, dict):
                raise DataError(f"{where}: not a JSON object with fields.", hint)
            shape = shape or detect(row, format)
            if shape is None:
                raise DataError(f"{file} has no text in its fields ({', '.join(row)}); remoe reads {READABLE}.", hint)
            missing = [name for name in shape.fields if name not in row]
            if missing:
                said = f"no field {missing[0]!r} as in the rows before (fields: {', '.join(row)})"
                raise DataError(f"{where}: {said}.", hint if number > 1 else f"--data {shlex.quote(str(file))}")
            try:
                read(row, shape)
            except ValueError as error:
                raise DataError(f"{where}: {error}.", hint) from None
            rows.append(row)
    if shape is None:
        raise DataError(f"{files[0]} holds no row.", ANOTHER)
    return rows, shape


def form(file: Path) -> str:
    """The suffix that says what a file holds, compressed or not."""
    return Path(file.stem).suffix if file.suffix in COMPRESSED else file.suffix


def _show(file: Path, line: int) -> str:
    path = shlex.quote(str(file))
    return f"zcat {path} | sed -n {line}p" if file.suffix == ".gz" else f"sed -n {line}p {path}"


def rows_of(file: Path) -> Iterator[tuple[int, Any]]:
    """Rows, each with its number (its line, where rows are lines), as the file has them: not checked."""
    kind = form(file)
    if kind not in FORMS or (kind == ".parquet" and file.suffix != kind):
        forms = ", ".join(FORMS)
        raise DataError(f"{file} is no data file; remoe reads {forms} (text also as .gz), and Hub data sets.", ANOTHER)
    if kind == ".parquet":
        yield from enumerate(_parquet(file), 1)
        return
    text = _text(file)
    if not text.strip():
        raise DataError(f"{file} is empty.", ANOTHER)
    if kind == ".txt":
        parts = re.split(rf"^{re.escape(SEPARATOR)}[ \t]*$", text, flags=re.MULTILINE)
        yield from enumerate(({"text": part.strip("\n")} for part in parts if part.strip()), 1)
    elif kind in (".csv", ".tsv"):
        yield from enumerate(_separated(file, text, "\t" if kind == ".tsv" else ","), 1)
    elif kind == ".json":
        yield from enumerate(_json(file, text), 1)
    else:
        yield from _lines(file, text)


def _text(file: Path) -> str:
    path = shlex.quote(str(file))
    if file.suffix == ".zst":
        raise DataError(f"{file} is compressed with zstd, which remoe does not read; .gz it does.", f"zstd -d {path}")
    try:
        raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{file} is damaged ({error}).", f"gzip -t {path}") from None
    except OSError as error:
        raise DataError(f"{file} cannot be read ({error.strerror}).", f"ls -l {path}") from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        cat = f"zcat {path}" if file.suffix == ".gz" else f"cat {path}"
        target = shlex.quote(str(file.with_name(f"utf8-{file.name.removesuffix('.gz')}")))
        raise DataError(
            f"{file} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}.",
            f"{cat} | iconv -f latin1 -t utf-8 > {target}",
        ) from None


def _lines(file: Path, text: str) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except ValueError as error:
                raise DataError(f"{file}, line {number}: not valid JSON ({error}).", _show(file, number)) from None


def _json(file: Path, text: str) -> list[Any]:
    """A list of rows, an object with one list in it, or in truth lines of JSON."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return [row for _, row in _lines(file, text)]
        raise DataError(
            f"{file}, line {error.lineno}: not valid JSON ({error.msg}).", _show(file, error.lineno)
        ) from None
    if isinstance(found, dict):
        lists = [value for value in found.values() if isinstance(value, list)]
        if len(lists) != 1:
            fields = ", ".join(found)
            raise DataError(f"{file} holds an object, not with one list of rows in it (fields: {fields}).", ANOTHER)
        found = lists[0]
    if not isinstance(found, list):
        raise DataError(f"{file} holds no list of rows.", ANOTHER)
    return found


def _separated(file: Path, text: str, delimiter: str) -> Iterator[dict[str, str]]:
    csv.field_size_limit(2**31 - 1)
    try:
        yield from csv.DictReader(io.StringIO(text), delimiter=delimiter, restkey="(no name)", strict=True)
    except csv.Error as error:
        raise DataError(f"{file} is no table that can be read ({error}).", ANOTHER) from None


def _parquet(file: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{file} is not a whole Parquet file ({str(error).splitlines()[0]}).", ANOTHER) from None

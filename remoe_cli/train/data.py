"""Where texts come from: the demo's corpus, a local file, or a data set on the Hub; which are held out."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from remoe_cli.errors import DataError
from remoe_cli.recipe import Data
from remoe_cli.train.rows import detect, read, READABLE, Shape, Turn
from remoe_cli.train.tokens import check, Encoder, load_tokenizer

__all__ = ["Documents", "TokenisedTexts", "load_documents", "load_tokenizer"]

SEPARATOR = "<|endoftext|>"
_HELD_OUT_SPLITS = ("heldout", "test", "validation", "valid", "dev")
_HELD_OUT_AT_MOST = 10  # one row in ten, of a source too small for the recipe's number
_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(rf"(?P<repo>{_NAME}(?:/{_NAME})?)(?::(?P<config>[\w.-]+))?(?:@(?P<revision>\S+))?")
_ANOTHER = 'the same command with --data FILE.jsonl (one object a line: {"text": ...}), or --data demo'


class TokenisedTexts:
    """Token ids of one document after the other, each tokenised when it is asked for; the same order every time.

    Rows that say nothing, that the template refuses, or that equal a held-out document are left out.
    """

    def __init__(self, rows: "_Rows", order: Sequence[int], encode: Encoder, held_out: set[tuple[int, ...]]) -> None:
        self._rows, self._order, self._encode, self._held_out = rows, order, encode, held_out

    def __len__(self) -> int:
        """Number of rows, of which some may be left out."""
        return len(self._order)

    def __iter__(self) -> Iterator[list[int]]:
        for i in self._order:
            try:
                ids = self._encode(self._rows.read(i))
            except ValueError:
                continue
            if ids and tuple(ids) not in self._held_out:
                yield ids


@dataclass(frozen=True)
class Documents:
    """train: lists of token ids, lazily; heldout: the same, in an order that no seed changes, never also in train.

    source: what was read, pinned where it can be. notes: what a user should know. domains: of each held-out document
    the kind of text ("" where the source does not say).
    """

    train: TokenisedTexts
    heldout: list[list[int]]
    source: str
    notes: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Rows:
    """A source's rows by number. read raises ValueError for a row that is malformed."""

    count: int
    read: Callable[[int], str | list[Turn]]
    domain: Callable[[int], str] = lambda i: ""


@dataclass(frozen=True)
class _Source:
    """heldout None: the last rows of train are to be held out."""

    name: str
    train: _Rows
    heldout: _Rows | None
    notes: list[str]
    shape: Shape


def load_documents(data: Data, tokenizer: Any, *, seed: int) -> Documents:
    """The texts of a recipe, tokenised; train in an order drawn by `seed`, at most data.train_samples of its rows.

    data.source: "demo"; a .jsonl or .txt file; a Hub data set `org/name[:config][@revision]`. Of a source without a
    held-out split the last rows are held out: data.heldout_samples, at most a tenth, at least one.
    Raises DataError or HubError.
    """
    notes = check(tokenizer)
    encode = Encoder(tokenizer, data.format)
    if data.source == "demo":
        source = _demo()
    elif _is_local(data.source):
        source = _local(Path(data.source).expanduser(), data.format)
    else:
        source = _hub(data.source, data.format)
    notes = [*notes, *source.notes, *_about_format(source.shape, data.format)]
    train, held = source.train, source.heldout
    if held is None:
        train, held = _cut(source, data.heldout_samples)
    heldout, domains, left_out = _encode_held_out(held, encode, data.heldout_samples, source.name)
    if left_out:
        notes.append(left_out)
    if tokenizer.eos_token_id is None:
        notes.append("the tokenizer has no end-of-text token: documents end without one")
    order = list(range(train.count))
    random.Random(seed).shuffle(order)
    texts = TokenisedTexts(train, order[: data.train_samples], encode, {tuple(ids) for ids in heldout})
    if next(iter(texts), None) is None:
        raise DataError(f"{source.name} has no text to train on beside its {len(heldout)} held-out ones.", _ANOTHER)
    notes.append(f"{len(texts):,} rows to train on, {len(heldout):,} held out")
    return Documents(texts, heldout, source.name, notes, domains)


def _cut(source: _Source, wanted: int) -> tuple[_Rows, _Rows]:
    rows = source.train
    if rows.count < 2:
        raise DataError(f"{source.name} holds one document only, so none can be held out.", _one_document(source))
    n = max(1, min(wanted, rows.count // _HELD_OUT_AT_MOST))
    first = rows.count - n
    return _Rows(first, rows.read), _Rows(n, lambda i: rows.read(first + i))


def _one_document(source: _Source) -> str:
    if source.name.endswith(".txt"):
        return f"a line that holds only {SEPARATOR} between the documents of {source.name}, then the same command"
    return _ANOTHER


def _encode_held_out(
    rows: _Rows, encode: Encoder, wanted: int, name: str
) -> tuple[list[list[int]], list[str], str | None]:
    """Ids and domains of at most `wanted` rows, and a note on those that gave none."""
    order = list(range(rows.count))
    random.Random(0).shuffle(order)  # so that the first of them are of all kinds; fixed, so that runs can be compared
    found, domains, reason, left_out = [], [], "empty", 0
    for i in order[:wanted]:
        try:
            ids = encode(rows.read(i))
        except ValueError as error:
            ids, reason = [], str(error)
        if ids:
            found.append(ids)
            domains.append(rows.domain(i))
        else:
            left_out += 1
    if not found:
        raise DataError(f"no row of {name} can be used: {reason}.", _ANOTHER)
    note = f"{left_out} of {len(order[:wanted])} held-out rows left out ({reason})" if left_out else None
    return found, domains, note


def _about_format(shape: Shape, format: str) -> list[str]:
    if shape.kind == "text":
        if format == "chat":
            raise DataError(
                f"the rows hold plain text ({shape}), which has no turns for a chat template.",
                "the same command with --set data.format=raw",
            )
        return []
    how = {"prefix": "User:/Assistant: transcripts", "chat": "the chat template", "raw": "their texts joined"}
    return [f"conversations become text as {how[format]}"]


# The demo's corpus


def _demo() -> _Source:
    from remoe_cli import demo
    from remoe_cli.demo import corpus

    digest, notes = corpus.fingerprint(), []
    facts = demo.PATH / "training.json"
    if facts.is_file():
        trained = json.loads(facts.read_text())
        if trained.get("corpus_sha256") != digest:
            notes.append(
                f"this Python's library differs from the one the demo was trained on (Python {trained.get('python')}): "
                "numbers may differ from the documented ones"
            )
    splits = [_of_texts(corpus.documents(split)) for split in ("train", "heldout")]
    return _Source(f"demo (corpus {digest[:12]})", splits[0], splits[1], notes, Shape("text", ("text",)))


def _of_texts(documents: list) -> _Rows:
    return _Rows(len(documents), lambda i: documents[i].text, lambda i: documents[i].domain)


# Local files


def _is_local(source: str) -> bool:
    path = Path(source).expanduser()
    known = path.suffix in (".jsonl", ".json", ".txt", ".csv", ".tsv", ".parquet", ".gz", ".zst")
    return path.exists() or known or source.startswith((".", "/", "~")) or not _HUB_ID.fullmatch(source)


def _local(path: Path, format: str) -> _Source:
    if not path.exists():
        raise DataError(f"there is no file {path}.", f"ls {path.parent}")
    if path.suffix not in (".jsonl", ".txt") or path.is_dir():
        hint = f"jq -c '.[]' {path} > {path.with_suffix('.jsonl')}" if path.suffix == ".json" else _ANOTHER
        raise DataError(f"{path} is no .jsonl or .txt file; remoe reads those, and data sets on the Hub.", hint)
    text = _decode(path)
    if not text.strip():
        raise DataError(f"{path} is empty.", _ANOTHER)
    if path.suffix == ".txt":
        texts = [part.strip("\n") for part in re.split(rf"^{re.escape(SEPARATOR)}[ \t]*$", text, flags=re.MULTILINE)]
        texts = [part for part in texts if part.strip()]
        return _plain(path, texts)
    rows, shape = _parse(path, text, format)
    note = f"{path.name}: the field {shape} of {len(rows)} rows"
    return _Source(str(path), _Rows(len(rows), lambda i: rows[i]), None, [note], shape)


def _plain(path: Path, texts: list[str]) -> _Source:
    """A .txt file. One document alone gives its last tenth to the held-out side, cut at a line's end."""
    shape = Shape("text", ("text",))
    tail = texts[0].find("\n", len(texts[0]) * (_HELD_OUT_AT_MOST - 1) // _HELD_OUT_AT_MOST) + 1
    if len(texts) == 1 and tail:
        train, held = [texts[0][:tail]], [texts[0][tail:]]
        note = (
            f"{path.name}: one document; its last tenth is held out (lines of only {SEPARATOR} would separate several)"
        )
        return _Source(str(path), _Rows(1, train.__getitem__), _Rows(1, held.__getitem__), [note], shape)
    note = f"{path.name}: {len(texts)} documents, cut at lines that hold only {SEPARATOR}"
    return _Source(str(path), _Rows(len(texts), lambda i: texts[i]), None, [note], shape)


def _decode(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror}).", f"ls -l {path}") from None
    try:
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise DataError(
            f"{path} is not UTF-8: byte 0x{raw[error.start]:02x} in line {line}.",
            f"iconv -f latin1 -t utf-8 {path} > {path.with_stem(path.stem + '-utf8')}",
        ) from None


def _parse(path: Path, text: str, format: str) -> tuple[list[str | list[Turn]], Shape]:
    """What every row says. All rows must have the fields of the first."""
    said: list[str | list[Turn]] = []
    shape: Shape | None = None
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        show = f"sed -n {number}p {path}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: not valid JSON ({error}).", show) from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: not a JSON object with fields.", show)
        shape = shape or detect(row, format)
        if shape is None:
            raise DataError(f"{path} has no text in its fields ({', '.join(row)}); remoe reads {READABLE}.", show)
        missing = [name for name in shape.fields if name not in row]
        if missing:
            raise DataError(f"{path}, line {number}: no field {missing[0]!r} (fields: {', '.join(row)}).", show)
        try:
            said.append(read(row, shape))
        except ValueError as error:
            raise DataError(f"{path}, line {number}: {error}.", show) from None
    assert shape is not None  # the text is not blank
    return said, shape


# Data sets on the Hub


def _hub(source: str, format: str) -> _Source:
    match = _HUB_ID.fullmatch(source)
    assert match is not None  # else it counted as local
    repo, config = match["repo"], match["config"]
    try:
        import datasets
    except ImportError as error:
        reason = f"the data set {repo} needs the package `datasets` ({error})."
        raise DataError(reason, "pip install datasets") from None
    commit = _pin(source, repo, match["revision"])
    splits = _load(datasets, source, repo, config, commit or match["revision"])
    train = splits.get("train") or next(iter(splits.values()))
    shape = detect(train.column_names, format)
    if shape is None:
        fields = ", ".join(train.column_names)
        raise DataError(f"the data set {repo} has no text in its fields ({fields}); remoe reads {READABLE}.", _ANOTHER)
    held = next((name for name in _HELD_OUT_SPLITS if name in splits and splits[name] is not train), None)
    notes = [f"{repo}: the field {shape} of {train.num_rows:,} rows"]
    if held and not set(shape.fields) <= set(splits[held].column_names):
        held = None
    if held:
        notes.append(f"{repo}: held-out rows are of its split {held}")
    if commit is None:
        notes.append(f"{repo}: the Hub gave no answer, its cached copy is read")
    name = f"{repo}{f':{config}' if config else ''}{f'@{commit[:12]}' if commit else ''}"
    return _Source(name, _of_table(train, shape), _of_table(splits[held], shape) if held else None, notes, shape)


def _of_table(table: Any, shape: Shape) -> _Rows:
    return _Rows(table.num_rows, lambda i: read(table[i], shape))


def _pin(source: str, repo: str, revision: str | None) -> str | None:
    """The commit of the data set; None when the Hub cannot be asked (then its cached copy will do)."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    from remoe_cli.hub.failures import explain, MissingError, unreachable

    try:
        found = HfApi().dataset_info(repo, revision=revision, timeout=30)
        if found.gated:  # its description is open to all, its files are not; `datasets` would hide the reason
            HfApi().auth_check(repo, repo_type="dataset")
        return found.sha
    except HFValidationError as error:
        raise DataError(f"{source} is neither a file here nor a Hub data set ({error}).", _ANOTHER) from error
    except Exception as error:  # the library raises its own and httpx's: explain tells them apart
        if unreachable(error):
            return None
        reason = explain(error, repo, "dataset", revision)
        if isinstance(reason, MissingError):
            raise DataError(f"there is no file ./{source}, and {reason.message}", reason.hint) from error
        raise reason from error


def _load(datasets: Any, source: str, repo: str, config: str | None, revision: str | None) -> dict[str, Any]:
    from remoe_cli.hub.failures import explain, unreachable

    try:
        return datasets.load_dataset(repo, config, revision=revision)
    except Exception as error:  # `datasets` raises its own, the Hub's, Arrow's and the file system's
        if unreachable(error) or (isinstance(error, OSError) and error.errno is not None):
            raise explain(error, repo, "dataset", revision) from error
        said = " ".join(str(error).split())
        if isinstance(error, ValueError) and "config" in said.lower():
            raise DataError(f"the data set {repo} has several parts: {said[:300]}", f"--data {repo}:PART") from error
        reason = f"the data set {source} cannot be read ({type(error).__name__}: {said[:300]})."
        raise DataError(reason, _ANOTHER) from error

"""The texts of a recipe, tokenised: those to train on, one after the other, and those held out."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from remoe_cli.errors import DataError
from remoe_cli.recipe import Data
from remoe_cli.train import files, hub_data
from remoe_cli.train.encode import Encoder
from remoe_cli.train.packing import Document
from remoe_cli.train.rows import read, Shape
from remoe_cli.train.source import ANOTHER, draw, Source
from remoe_cli.train.tokens import check, load_tokenizer

__all__ = ["Documents", "TokenisedTexts", "load_documents", "load_texts", "load_tokenizer"]

DEMO_DOMAINS = ("code", "prose")
_COUNTED = 100  # documents, of which a note says how many tokens are learned


class TokenisedTexts:
    """One document after the other, each tokenised when it is asked for; the same order every time.

    Rows that say nothing, that the template refuses, or that equal a held-out document are left out.
    """

    def __init__(self, source: Source, encode: Encoder, held_out: set[tuple[int, ...]]) -> None:
        self._source, self._encode, self._held_out = source, encode, held_out
        self.refused = ""  # why the last of the rows that could not be read was left out

    def __len__(self) -> int:
        """Number of rows at most, of which some may be left out."""
        return self._source.rows.total

    def __iter__(self) -> Iterator[Document]:
        return (document for _, document in self.numbered())

    def numbered(self, start: int = 0) -> Iterator[tuple[int, Document]]:
        """Documents with their places in the order, from place `start` on; nothing before it is tokenised."""
        for place, row in enumerate(self._source.rows.train(start), start):
            try:
                document = self._encode(read(row, self._source.shape))
            except ValueError as error:
                self.refused = str(error)
                continue
            if document.ids and tuple(document.ids) not in self._held_out:
                yield place, document


@dataclass(frozen=True)
class Documents:
    """train: documents, lazily; heldout: lists of token ids, in an order that no seed changes, never also in train.

    source: what was read, for display. notes: what a user should know. domains: of each held-out document the kind of
    text ("" where the source does not say). pinned: the data.source that reads the same again, from any folder.
    sha256: over all rows, "" where `pinned` names a commit.
    """

    train: TokenisedTexts
    heldout: list[list[int]]
    source: str
    notes: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    pinned: str = ""
    sha256: str = ""

    @cached_property
    def heldout_sha256(self) -> str:
        """Over the held-out token ids: equal exactly when two loads hold out the same."""
        return hashlib.sha256(json.dumps(self.heldout).encode()).hexdigest()


def load_documents(data: Data, tokenizer: Any, *, seed: int) -> Documents:
    """The texts of a recipe, tokenised; train in an order drawn by `seed`, at most data.train_samples of its rows.

    data.source: "demo", "demo:code", "demo:prose"; a file; a folder of files; a Hub data set
    `org/name[:config][@revision]`. Without a held-out split the last rows are held out (of a stream the first):
    data.heldout_samples, at most a tenth, at least one. Raises DataError or HubError.
    """
    notes = check(tokenizer)
    encode = Encoder(tokenizer, data.format, data.labels)
    source = _source(data, seed)
    notes = [*notes, *source.notes, *_about_format(source.shape, data.format)]
    heldout, domains, left_out = _held_out(source, Encoder(tokenizer, data.format))
    if left_out:
        notes.append(left_out)
    if data.streaming and not source.rows.streamed:
        notes.append("data.streaming is for data sets on the Hub: these texts are read whole")
    if tokenizer.eos_token_id is None:
        notes.append("the tokenizer has no end-of-text token: documents end without one")
    texts = TokenisedTexts(source, encode, {tuple(ids) for ids in heldout})
    if next(iter(texts), None) is None:
        why = f": {texts.refused}" if texts.refused else ""
        raise DataError(f"{source.name} has no text to train on beside its {len(heldout)} held-out ones{why}.", ANOTHER)
    if data.labels == "answers":
        notes.append(_about_labels(texts, source.name))
    notes.append(f"rows to train on: {'up to ' * source.rows.streamed}{len(texts):,}; held out: {len(heldout):,}")
    return Documents(texts, heldout, source.name, notes, domains, source.pinned, source.sha256)


def load_texts(data: Data, tokenizer: Any) -> tuple[TokenisedTexts, str]:
    """Every text of a file, a folder or a Hub data set as it lies there, and what was read, for display; none is held out,
    and where a source holds some out by itself they come first. Raises DataError or HubError."""
    check(tokenizer)
    source = _source(replace(data, streaming=False), None)
    _about_format(source.shape, data.format)
    texts = TokenisedTexts(source, Encoder(tokenizer, data.format), set())
    if next(iter(texts), None) is None:
        raise DataError(f"no row of {source.name} can be used: {texts.refused or 'empty'}.", ANOTHER)
    return texts, source.name


def _source(data: Data, seed: int | None) -> Source:
    if not data.source.strip():
        raise DataError("no source of texts is named.", "--data demo, a file, a folder, or a Hub data set")
    name, _, domain = data.source.partition(":")
    if name == "demo":
        return _demo(domain, data, seed)
    path = Path(data.source).expanduser()
    named_as_file = (
        files.form(path) in files.FORMS or path.suffix in files.COMPRESSED or data.source.startswith((".", "/", "~"))
    )
    if path.exists() or named_as_file or not hub_data.HUB_ID.fullmatch(data.source):
        return files.load(path, data, seed)
    return hub_data.load(data, seed)


def _demo(domain: str, data: Data, seed: int | None) -> Source:
    from remoe_cli import demo
    from remoe_cli.demo import corpus

    if domain not in ("", *DEMO_DOMAINS):
        allowed = ", ".join(f"demo:{name}" for name in DEMO_DOMAINS)
        raise DataError(f"no part demo:{domain} of the demo's texts; allowed: demo, {allowed}.", "--data demo")
    digest, notes = corpus.fingerprint(), []
    facts = demo.PATH / "training.json"
    if facts.is_file():
        trained = json.loads(facts.read_text())
        if trained.get("corpus_sha256") != digest:
            notes.append(
                f"this Python's library differs from the one the demo was trained on (Python {trained.get('python')}): "
                "numbers may differ from the documented ones"
            )
    train, held = (
        [doc._asdict() for doc in corpus.documents(split) if domain in ("", doc.domain)]
        for split in ("train", "heldout")
    )
    name = f"{data.source} (corpus {digest[:12]})"
    return Source(name, data.source, Shape("text", ("text",)), draw(name, train, held, data, seed), notes, digest)


def _held_out(source: Source, encode: Encoder) -> tuple[list[list[int]], list[str], str | None]:
    """Ids and domains of the held-out rows, and a note on those that gave none."""
    found, domains, reason = [], [], "empty"
    for row in source.rows.heldout:
        try:
            ids = encode(read(row, source.shape)).ids
        except ValueError as error:
            ids, reason = [], str(error)
        if ids:
            found.append(ids)
            domains.append(str(row.get("domain") or ""))
    if not found:
        raise DataError(f"no row of {source.name} can be used: {reason}.", ANOTHER)
    left_out = len(source.rows.heldout) - len(found)
    note = f"{left_out} of {len(source.rows.heldout)} held-out rows left out ({reason})" if left_out else None
    return found, domains, note


def _about_format(shape: Shape, format: str) -> list[str]:
    if shape.plain:
        if format == "chat":
            raise DataError(
                f"the rows hold plain text ({shape}), which has no turns for a chat template.",
                "the same command with --set data.format=raw",
            )
        return []
    how = {"prefix": "User:/Assistant: transcripts", "chat": "the chat template", "raw": "their texts joined"}
    return [f"conversations become text as {how[format]}"]


def _about_labels(texts: Iterable[Document], name: str) -> str:
    tokens = learned = 0
    for number, document in enumerate(texts):
        if document.learned is None:
            return "plain text has no answers: all its tokens are learned"
        if number >= _COUNTED and learned:
            break
        tokens += len(document.ids)
        learned += sum(document.learned)
    if not learned:
        raise DataError(
            f"no row of {name} holds an answer, so data.labels=answers leaves nothing to learn.",
            "the same command with --set data.labels=all",
        )
    return f"answers only are learned: {learned:,} of the first {tokens:,} tokens"

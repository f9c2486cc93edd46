"""Domains: kinds of text that are measured beside the run's own, since gates tuned on one may not help another."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from remoe_cli.console import progress
from remoe_cli.errors import DataError, UsageError
from remoe_cli.measure.sample import Sample
from remoe_cli.measure.steering import reported
from remoe_cli.recipe import Recipe
from remoe_cli.train.data import Documents, load_documents
from remoe_cli.train.files import COMPRESSED, FORMS
from remoe_cli.train.source import HELD_OUT_SPLITS

OWN = ""  # the name of the run's own texts among the samples
_NAMED = re.compile(r"(?P<name>[\w -]+)=(?P<source>.+)")


class Domain(NamedTuple):
    """trained: the gates were trained on texts of this kind (others than these)."""

    name: str
    source: str
    trained: bool
    sample: Sample


class HeldOut(NamedTuple):
    """sample: of the run's own texts. notes: what a reader of the figures should know."""

    documents: Documents
    sample: Sample
    domains: list[Domain]
    notes: list[str]

    @property
    def samples(self) -> dict[str, Sample]:
        """By domain; the run's own under OWN."""
        return {OWN: self.sample, **{domain.name: domain.sample for domain in self.domains}}


def held_out(recipe: Recipe, tokenizer: Any, draws: int, asked: Sequence[str] = ()) -> HeldOut:
    """The held-out texts of recipe.data (without those that steered the run) and their domains: the kinds that the source tells, then [NAME=]SOURCE of `asked`.

    A run on a part of the demo shows the rest of it too; one on a source of a single kind shows its own only beside what
    was asked for. A domain of the run's own texts shares their sample; no domain holds a text that was trained on.
    Raises UsageError for two domains of one name, DataError or HubError for texts that cannot be used.
    """
    data = replace(recipe.data, labels="all")  # which tokens are learned is no matter here

    def load(source: str) -> Documents:
        try:
            return load_documents(replace(data, source=source), tokenizer, seed=recipe.train.seed)
        except DataError:
            if data.format != "chat" or source == data.source:
                raise
        return load_documents(
            replace(data, source=source, format="raw"), tokenizer, seed=recipe.train.seed
        )  # plain text

    own = reported(load(data.source), recipe)
    sample = Sample.of(own.heldout, recipe, draws)
    found: dict[str, Domain] = {}
    notes = [*own.notes, *(f"the held-out texts hold {less}" for less in sample.fewer(recipe, draws))]
    unseen = _Unseen(own, data.heldout_samples)
    for kind in _kinds_of_text(asked, own, load):
        name, documents = kind.name, kind.documents
        if name in found:
            raise UsageError(f"two domains are called {name!r}.", f"--domain ANOTHER_NAME={documents.pinned}")
        try:
            texts, trained, dropped = unseen.of(kind)
            part = sample if texts == own.heldout else Sample.of(texts, recipe, draws)
        except DataError as error:
            if kind.asked:
                raise DataError(f"domain {name}: {error.message}", error.hint) from None
            notes.append(f"domain {name} is left out: {error.message}")
            continue
        found[name] = Domain(name, documents.source, trained, part)
        if dropped:
            notes.append(f"domain {name}: {dropped:,} of its texts were trained on and are left out")
        if part is not sample:
            notes += [f"domain {name}: its texts hold {less}" for less in part.fewer(recipe, draws)]
    return HeldOut(own, sample, list(found.values()), notes)


class _Kind(NamedTuple):
    """texts: the held-out ones of one kind; None: the whole source. asked: by the user."""

    name: str
    documents: Documents
    texts: list[list[int]] | None
    asked: bool


def _kinds_of_text(asked: Sequence[str], own: Documents, load: Callable[[str], Documents]) -> Iterator[_Kind]:
    if own.pinned.partition(":")[0] == "demo":
        whole = own if own.pinned == "demo" else load("demo")
        for kind, texts in {**_by_kind(whole), **_by_kind(own)}.items():
            yield _Kind(kind, whole, texts, asked=False)
    elif asked:
        yield _Kind(default_name(own), own, None, asked=False)
    for option in asked:
        named = _NAMED.fullmatch(option)
        documents = load(named["source"] if named else option)
        if named or not _by_kind(documents):
            yield _Kind(named["name"] if named else default_name(documents), documents, None, asked=True)
        else:
            yield from (_Kind(kind, documents, texts, asked=True) for kind, texts in _by_kind(documents).items())


def _by_kind(documents: Documents) -> dict[str, list[list[int]]]:
    """Held-out texts by kind, in the order of their names; empty where the source tells none."""
    return {
        kind: [ids for ids, of in zip(documents.heldout, documents.domains, strict=True) if of == kind]
        for kind in sorted(set(documents.domains) - {""})
    }


class _Unseen:
    """Picks the texts of a kind that the run did not train on, by their token ids."""

    def __init__(self, own: Documents, wanted: int) -> None:
        self._own, self._wanted = own, wanted

    def of(self, kind: _Kind) -> tuple[list[list[int]], bool, int]:
        """The texts; whether the gates were trained on texts of this kind; how many were dropped.

        The run's own source and the demo hold their held-out texts apart. Of another source every row that was not
        trained on will do, the held-out ones first. Raises DataError where none is left.
        """
        documents, own = kind.documents, self._own
        trained = is_part(own.pinned, documents.pinned + (f":{kind.name}" if kind.texts else ""))
        if documents.pinned == own.pinned or not kind.asked:
            return kind.texts or documents.heldout, trained, 0
        candidates: Iterable[list[int]] = kind.texts or documents.heldout
        if not any(documents.domains):
            candidates = chain(candidates, (document.ids for document in documents.train))
        kept: list[list[int]] = []
        dropped = 0
        for ids in candidates:
            if len(kept) == self._wanted:
                break
            if hash(tuple(ids)) in self._trained_on:
                dropped += 1
            else:
                kept.append(ids)
        if not kept:
            raise DataError("all of its texts were trained on.", "the same command with another --domain")
        held_out = {tuple(ids) for ids in own.heldout}
        return kept, trained or dropped > 0 or any(tuple(ids) in held_out for ids in kept), dropped

    @cached_property
    def _trained_on(self) -> set[int]:
        """Hashes of all documents to train on, tokenised for this once, where a domain asks for it."""
        found = set()
        with progress("read what was trained on", len(self._own.train)) as bar:
            for place, document in self._own.train.numbered():
                found.add(hash(tuple(document.ids)))
                bar.update(place + 1)
        return found


def is_part(one: str, other: str) -> bool:
    """Whether either data.source is a part of the other, as demo:code of demo, or the same at another commit."""
    one, other = (name if name.startswith("/") else name.partition("@")[0] for name in (one, other))
    return one == other or one.startswith(f"{other}:") or other.startswith(f"{one}:")


def default_name(documents: Documents) -> str:
    """Of a file its name without suffixes, or its folder's where it is named as a split; of others their source."""
    if not documents.pinned.startswith("/"):
        return documents.source.partition("@")[0]
    path = Path(documents.pinned)
    name = path.name
    while Path(name).suffix in (*FORMS, *COMPRESSED):
        name = Path(name).stem
    return path.parent.name or name if name.lower() in ("train", *HELD_OUT_SPLITS) else name

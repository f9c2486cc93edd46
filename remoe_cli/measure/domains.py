"""Domains: kinds of text that are measured beside the run's own, since gates tuned on one may not help another."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from remoe_cli.errors import DataError, UsageError
from remoe_cli.measure.sample import Sample
from remoe_cli.recipe import Recipe
from remoe_cli.train.data import Documents, load_documents

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
    """The held-out texts of recipe.data and their domains: the kinds that the source tells, then [NAME=]SOURCE of `asked`.

    A run on a part of the demo shows the rest of it too; one on a source of a single kind shows its own only beside what
    was asked for. A domain of the run's own texts shares their sample. Raises UsageError for two domains of one name,
    DataError or HubError for texts that cannot be used.
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

    own = load(data.source)
    sample = Sample.of(own.heldout, recipe, draws)
    found: dict[str, Domain] = {}
    notes = [*own.notes]
    if sample.draws < draws:
        notes.append(f"the held-out texts hold {sample.draws} of {draws} draws")
    for kind in _kinds_of_text(asked, own, load):
        name, documents = kind.name, kind.documents
        if name in found:
            raise UsageError(f"two domains are called {name!r}.", f"--domain ANOTHER_NAME={documents.pinned}")
        texts = kind.texts or _unseen(documents, own, data.heldout_samples)
        try:
            part = sample if texts == own.heldout else Sample.of(texts, recipe, draws)
        except DataError as error:
            if kind.asked:
                raise DataError(f"domain {name}: {error.message}", error.hint) from None
            notes.append(f"domain {name} is left out: {error.message}")
            continue
        found[name] = Domain(name, documents.source, _is_trained(own.pinned, kind), part)
        if part.draws < sample.draws:
            notes.append(f"domain {name}: its texts hold {part.draws} of {draws} draws")
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
        yield _Kind(_short(own.source), own, None, asked=False)
    for option in asked:
        named = _NAMED.fullmatch(option)
        documents = load(named["source"] if named else option)
        if named or not _by_kind(documents):
            yield _Kind(named["name"] if named else _short(documents.source), documents, None, asked=True)
        else:
            yield from (_Kind(kind, documents, texts, asked=True) for kind, texts in _by_kind(documents).items())


def _by_kind(documents: Documents) -> dict[str, list[list[int]]]:
    """Held-out texts by kind, in the order of their names; empty where the source tells none."""
    return {
        kind: [ids for ids, of in zip(documents.heldout, documents.domains, strict=True) if of == kind]
        for kind in sorted(set(documents.domains) - {""})
    }


def _unseen(documents: Documents, own: Documents, wanted: int) -> list[list[int]]:
    """Of a source that the gates were not trained on every row is unseen: the held-out ones first, then others."""
    if any(documents.domains) or documents.pinned == own.pinned:
        return documents.heldout
    missing = max(0, wanted - len(documents.heldout))
    return [*documents.heldout, *(document.ids for document in islice(documents.train, missing))]


def _is_trained(own: str, kind: _Kind) -> bool:
    """demo:code is a part of demo."""
    source = kind.documents.pinned + (f":{kind.name}" if kind.texts else "")
    return own == source or own.startswith(f"{source}:") or source.startswith(f"{own}:")


def _short(source: str) -> str:
    return source.partition("@")[0]

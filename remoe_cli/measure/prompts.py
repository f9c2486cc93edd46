"""The texts that a model is looked at with, where no run says which: the demo's held-out ones, or those of --prompts."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from remoe_cli import recipe as recipes
from remoe_cli.errors import DataError
from remoe_cli.measure.steering import unsteered
from remoe_cli.recipe import Data, Recipe
from remoe_cli.train.data import Documents, load_documents, load_texts
from remoe_cli.train.source import ANOTHER

Prompt = tuple[int, list[int]]  # the row that it is from, or begins in, and its token ids


def default_recipe(model: str, model_type: str) -> Recipe:
    """How texts are cut and measured where no run says it: the shipped recipe of the family, or the demo's."""
    return recipes.load("remoe", "demo" if model == "demo" else model_type)


def load_prompts(
    prompts: str | None, recipe: Recipe, tokenizer: Any, other: str = ANOTHER, delta: str | None = None
) -> tuple[list[list[int]], Documents]:
    """Token ids of at most data.heldout_samples texts, and where they are from. prompts: as --data of finetune, None
    for the demo's. other: the command with other texts. delta: as the user named it; texts that steered its run are left out.

    Nothing was trained on these, so of a source without a held-out part every row will do. Raises DataError or HubError for
    texts that cannot be used.
    """
    data = _data(prompts, recipe)
    with _named(other):
        found = unsteered(load_documents(data, tokenizer, seed=recipe.train.seed), delta)
    if found.pinned.partition(":")[0] == "demo":
        return found.heldout, found
    everything = chain(found.heldout, (document.ids for document in found.train))
    return list(islice(everything, data.heldout_samples)), found


def load_in_order(
    prompts: str | None, recipe: Recipe, tokenizer: Any, other: str = ANOTHER, delta: str | None = None
) -> tuple[Iterator[Prompt], str]:
    """Texts as they lie in their source, without their end tokens, each with its row there from 1 on; and what was read,
    for display. Rows that say nothing are left out. prompts, other, delta and errors as `load_prompts`; of the demo the held-out ones.
    """
    data, end = _data(prompts, recipe), tokenizer.eos_token_id
    numbered: Iterable[Prompt]
    if data.source.partition(":")[0] == "demo":
        heldout, documents = load_prompts(data.source, recipe, tokenizer, other, delta)
        numbered, source = enumerate(heldout, 1), documents.source
    else:
        with _named(other):
            texts, source = load_texts(data, tokenizer)
        numbered = ((place + 1, document.ids) for place, document in texts.numbered())
    bodies = ((row, ids[:-1] if ids[-1] == end else ids) for row, ids in numbered)  # a text is to go on
    return ((row, ids) for row, ids in bodies if ids), source


def _data(prompts: str | None, recipe: Recipe) -> Data:
    return replace(recipe.data, source="demo" if prompts is None else prompts, labels="all")


@contextmanager
def _named(other: str) -> Iterator[None]:
    """Errors on texts, in the words of --prompts. other: the command with other texts."""
    try:
        yield
    except DataError as error:
        hint = other if error.hint == ANOTHER else error.hint.replace("--data", "--prompts")
        raise DataError(error.message.replace("--data", "--prompts"), hint) from None


def lay_out(
    texts: Iterable[Prompt], wanted: int, *, together: int, context: int | None, room: int | None
) -> tuple[list[Prompt], list[str]]:
    """At most `wanted` prompts, and notes on what is not as it was asked for.

    context: of exactly so many tokens. room: tokens that a prompt may have at most, None for no limit. together: so many
    are decoded at once: only a multiple of it is given, all of one length. Empty where the texts give fewer than that.
    """
    notes = []
    if context is not None:
        prompts = list(islice(_join(texts, context), wanted))
    else:
        whole = list(islice(texts, wanted))
        prompts = [(row, ids[:room]) for row, ids in whole]
        if long := sum(len(ids) > len(cut) for (_, ids), (_, cut) in zip(whole, prompts)):
            notes.append(
                f"{long} of {len(prompts)} prompts are cut to their first {room} tokens: the model has no room for more"
            )
    prompts = prompts[: len(prompts) // together * together]
    if len(prompts) < wanted:
        why = (
            f", a multiple of the {together} that --batch takes together"
            if together > 1
            else ": the texts give no more"
        )
        notes.append(f"{len(prompts)} prompt{'s are' if len(prompts) != 1 else ' is'} decoded, not {wanted}{why}")
    shortest = min((len(ids) for _, ids in prompts), default=0)
    if together > 1 and any(len(ids) > shortest for _, ids in prompts):
        notes.append(
            f"prompts that are decoded together are cut to their first {shortest} tokens; --context N sets a length"
        )
        prompts = [(row, ids[:shortest]) for row, ids in prompts]
    return prompts, notes


def _join(texts: Iterable[Prompt], length: int) -> Iterator[Prompt]:
    """Prompts of exactly `length` ids: each begins with a text of its own, goes on with the next ones where that is too
    short, and is cut at the end."""
    first, ids = 0, list[int]()
    for row, text in texts:
        first = first if ids else row
        ids += text
        if len(ids) >= length:
            yield first, ids[:length]
            ids = []

"""The texts that a model is looked at with, where no run says which: the demo's held-out ones, or those of --prompts."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, islice
from typing import Any

from remoe_cli import recipe as recipes
from remoe_cli.errors import DataError
from remoe_cli.recipe import Recipe
from remoe_cli.train.data import Documents, load_documents
from remoe_cli.train.source import ANOTHER


def default_recipe(model: str, model_type: str) -> Recipe:
    """How texts are cut and measured where no run says it: the shipped recipe of the family, or the demo's."""
    return recipes.load("remoe", "demo" if model == "demo" else model_type)


def load_prompts(
    prompts: str | None, recipe: Recipe, tokenizer: Any, other: str = ANOTHER
) -> tuple[list[list[int]], Documents]:
    """Token ids of at most data.heldout_samples texts, and where they are from. prompts: as --data of finetune, None
    for the demo's. other: the command with other texts.

    Nothing was trained on these, so of a source without a held-out part every row will do. Raises DataError or HubError for
    texts that cannot be used.
    """
    data = replace(recipe.data, source=prompts or "demo", labels="all")
    try:
        found = load_documents(data, tokenizer, seed=recipe.train.seed)
    except DataError as error:
        hint = other if error.hint == ANOTHER else error.hint.replace("--data", "--prompts")
        raise DataError(error.message.replace("--data", "--prompts"), hint) from None
    if found.pinned.partition(":")[0] == "demo":
        return found.heldout, found
    everything = chain(found.heldout, (document.ids for document in found.train))
    return list(islice(everything, data.heldout_samples)), found


def lay_out(
    texts: Iterable[list[int]], wanted: int, *, together: int, context: int | None, room: int | None
) -> tuple[list[list[int]], list[str]]:
    """At most `wanted` prompts, and notes on what is not as it was asked for.

    context: of exactly so many tokens. room: tokens that a prompt may have at most, None for no limit. together: so many
    are decoded at once: only a multiple of it is given, all of one length. Empty where the texts give fewer than that.
    """
    notes = []
    if context is not None:
        prompts = list(islice(_join(texts, context), wanted))
    else:
        whole = list(islice(texts, wanted))
        prompts = [text[:room] for text in whole]
        if long := sum(len(text) > len(cut) for text, cut in zip(whole, prompts)):
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
        notes.append(f"{len(prompts)} prompts are decoded, not {wanted}{why}")
    shortest = min(map(len, prompts), default=0)
    if together > 1 and any(len(prompt) > shortest for prompt in prompts):
        notes.append(
            f"prompts that are decoded together are cut to their first {shortest} tokens; --context N sets a length"
        )
        prompts = [prompt[:shortest] for prompt in prompts]
    return prompts, notes


def _join(texts: Iterable[list[int]], length: int) -> Iterator[list[int]]:
    """Prompts of exactly `length` ids: each begins with a text of its own, goes on with the next ones where that is too
    short, and is cut at the end."""
    ids: list[int] = []
    for text in texts:
        ids += text
        if len(ids) >= length:
            yield ids[:length]
            ids = []

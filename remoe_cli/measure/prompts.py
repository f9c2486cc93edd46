"""The texts that a model is looked at with, where no run says which: the demo's held-out ones, or those of --prompts."""

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

"""What the command line says about a run, and the recipe that comes of it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from remoe_cli import recipe as recipes
from remoe_cli.errors import RunError
from remoe_cli.recipe import key_names, OWN_TEXT, prompts_of, Recipe, value_of
from remoe_cli.run import Run


class Asked(NamedTuple):
    """What the command line says about a run."""

    recipe: str | None = None
    data: str | None = None
    steps: int | None = None
    overrides: Sequence[str] = ()
    max_ppl: str | None = None


def choose_recipe(model: str, model_type: str, asked: Asked) -> Recipe:
    """The recipe for this model, then --set, then --data and --steps. `--data self` continues the recipe's own texts."""
    return _with(recipes.load(asked.recipe or "remoe", "demo" if model == "demo" else model_type), asked)


def _with(recipe: Recipe, asked: Asked) -> Recipe:
    given = {"train.steps": asked.steps, "train.max_ppl": asked.max_ppl}
    found = recipes.override(recipe, [*asked.overrides, *(f"{k}={v}" for k, v in given.items() if v is not None)])
    source = found.data.source if asked.data is None else asked.data
    if source == OWN_TEXT:
        texts = next((one for one in (found.data.source, recipe.data.source) if one != OWN_TEXT), "")
        source = f"{OWN_TEXT}:{prompts_of(texts)}"
    return replace(found, data=replace(found.data, source=source))


def kept_recipe(run: Run, model_type: str, asked: Asked) -> Recipe:
    """The run's own recipe, with another train.tracker where the command line asks for that. Raises RunError when it asks
    for another recipe."""
    kept = run.recipe
    if asked == Asked():
        return kept
    wanted = _with(kept, asked)
    if asked.recipe is not None:
        named = choose_recipe(run.facts["model"], model_type, Asked(asked.recipe)).name
        wanted = replace(wanted, name=named)
    for key in key_names():
        if value_of(kept, key) != value_of(wanted, key) and key != "train.tracker":
            raise RunError(
                f"the run {run.folder} was started with {key} {value_of(kept, key)!r}, not {value_of(wanted, key)!r}.",
                "remoe finetune --resume without other options, or the same command without --resume",
            )
    return wanted

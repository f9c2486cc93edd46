"""Recipes: shipped ones load, unknown keys are named, what a run writes reads back the same."""

from pathlib import Path

import pytest

from remoe_cli import recipe
from remoe_cli.errors import RecipeError
from remoe_cli.families import FAMILIES


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
@pytest.mark.parametrize("name", ["remoe", *recipe.CONTROLS])
def test_every_shipped_recipe_loads(family, name):
    found = recipe.load(name, family)
    off = {
        "remoe": (), "ce-only": ("trust", "reuse", "smooth", "lag", "window"), "no-trust": ("trust",), "no-reuse": ("reuse",),
        "no-consistency": ("smooth", "lag", "window"),
    }[name]  # fmt: skip
    for term in ("trust", "reuse", "smooth", "lag", "window"):
        assert (getattr(found.objective, term) == 0) == (term in off)
    assert found.name == name


def test_the_papers_settings():
    found = recipe.load("remoe", "deepseek_v2")
    assert found == recipe.Recipe(), "the code's defaults and the family's file must not drift apart"
    o, t = found.objective, found.train
    assert (o.trust, o.reuse, o.smooth, o.lag, o.window, o.lags) == (0.45, 0.2, 0.05, 0.05, 0.01, (1, 2, 4, 8, 16))
    assert (t.steps, t.sequence, t.micro_batch, t.accumulation, t.lr, t.clip) == (2000, 2048, 1, 8, 5e-5, 1.0)
    assert (t.lr_warmup * t.steps, o.reuse_warmup * t.steps, o.consistency_warmup * t.steps) == (200, 400, 800)


def test_family_recipes_comment_every_key():
    for family in ("demo", *FAMILIES):
        lines = (recipe.folder() / family / "remoe.yaml").read_text().splitlines()
        for key in recipe.key_names():
            leaf = key.rpartition(".")[2]
            found = [line for line in lines if line.strip().startswith(f"{leaf}:")]
            assert found and all("#" in line for line in found), f"{family} does not comment {key}"


def test_overrides_and_round_trip(tmp_path):
    found = recipe.load("ce-only", "demo", ["train.lr=5e-5", "objective.lags=[1, 3]", "train.checkpointing=true"])
    assert found.train.lr == 5e-5 and found.objective.lags == (1, 3) and found.train.checkpointing is True
    path = tmp_path / "recipe.yaml"
    path.write_text(found.to_yaml())
    assert recipe.read(path) == found


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stpes=3", "train.steps"), ("steps=3", "train.steps"), ("train.steps=three", "whole number"), ("train.steps=0", "too small"),
        ("train.steps=1.5", "whole number"), ("train.lr=7", "between 0 and 1"), ("train.lr=-1", "too small"), ("train.dtype=int8", "float32"),
        ("objective.name=remeo", "remoe"), ("objective.lags=[0]", "lags"), ("train.checkpointing=3", "true or false"), ("plain", "key=value"),
        ("data.format=xml", "prefix"), ("objective.lags=3", "list"), ("train.lr=nan", "too small"),
    ],
)  # fmt: skip
def test_bad_overrides_are_named(override, words):
    with pytest.raises(RecipeError, match=words):
        recipe.load("remoe", "demo", [override])


def test_bad_files(tmp_path):
    for text, words in (
        ("objective: {trsut: 1}", "objective.trust"),
        ("- a list", "section"),
        ("a: [", "not valid YAML"),
        ("extends: nothing-like-it", "no recipe"),
    ):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        with pytest.raises(RecipeError, match=words):
            recipe.load(str(path), "demo")
    with pytest.raises(RecipeError, match="no recipe file"):
        recipe.load(str(Path(tmp_path / "absent.yaml")), "demo")

"""Recipes: shipped ones load, unknown keys are named, what a run writes reads back the same, bad values are one line."""

import shlex
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_the_demos_strong_recipe_is_the_demos_own():
    found, plain = recipe.load("demo-strong", "demo"), recipe.load("remoe", "demo")
    assert found.name == "demo-strong" and found.objective.name == "soft-misses"
    assert found.evaluate == plain.evaluate, "the two are compared on the same texts"
    with pytest.raises(RecipeError, match="no recipe 'demo-strong' for qwen3_moe"):
        recipe.load("demo-strong", "qwen3_moe")


def test_the_papers_settings():
    found = recipe.load("remoe", "deepseek_v2")
    assert found == recipe.Recipe(), "the code's defaults and the shipped file must not drift apart"
    o, t = found.objective, found.train
    assert (o.trust, o.reuse, o.smooth, o.lag, o.window, o.lags) == (0.45, 0.2, 0.05, 0.05, 0.01, (1, 2, 4, 8, 16))
    assert (t.steps, t.sequence, t.micro_batch, t.accumulation, t.lr, t.clip) == (2000, 2048, 1, 8, 5e-5, 1.0)
    assert (t.lr_warmup * t.steps, o.reuse_warmup * t.steps, o.consistency_warmup * t.steps) == (200, 400, 800)


@pytest.mark.parametrize(
    ("family", "cache", "tau", "coverage", "lr"), [("qwen3_moe", 20, 0.03, 0.1, 1e-5), ("gpt_oss", 8, 0.05, 0.01, 5e-6)]
)
def test_cacherouters_settings(family, cache, tau, coverage, lr):
    texts = {
        "": ("openai/gsm8k:main", 512, 467),
        "-math": ("DigitalLearningGmbH/MATH-lighteval", 2048, 469),
        "-csqa": ("tau/commonsense_qa", 512, 609),
    }
    for kind in ("temporal", "spatio-temporal"):
        for ending, (source, sequence, steps) in texts.items():
            found = recipe.load(f"cacherouter-{kind}{ending}", family)
            o, t, d = found.objective, found.train, found.data
            assert found.name == f"cacherouter-{kind}{ending}" and o.name == f"coverage-{kind}" and t.scope == "full"
            assert (o.cache, o.tau, o.coverage, t.lr) == (cache, tau, coverage, lr)
            assert (t.schedule, t.lr_warmup, t.weight_decay, t.clip) == ("cosine", 0.03, 0.1, 1.0)
            assert (d.source, t.sequence, t.steps, d.labels) == (source, sequence, steps, "answers")
            assert o.trust == o.reuse == o.smooth == o.lag == o.window == o.reuse_warmup == 0 and not o.detach_target
            assert found.heads == {"temporal": ("temporal",), "spatio-temporal": ("temporal", "spatio")}[kind]
    control = recipe.load("lm-only", family)
    assert (control.train.lr, control.train.scope, control.heads, control.objective.trust) == (lr, "full", (), 0)


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_what_the_recipes_with_heads_train(family):
    gates, heads = recipe.load("gate-cacherouter", family), recipe.load("heads-only", family)
    assert (gates.train.scope, gates.heads, gates.objective.trust) == ("gates+heads", ("temporal",), 0.45)
    assert (heads.train.scope, heads.heads) == ("heads", ("temporal",))
    assert recipe.load("resident-mass", family).objective.name == "resident-mass"
    assert recipe.load("decayed-coverage", family).heads == ()


def test_a_familys_recipe_extends_the_common_one_of_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(recipe, "folder", lambda: tmp_path)
    (tmp_path / "mixtral").mkdir()
    (tmp_path / "one.yaml").write_text("train: {steps: 5, lr: 1e-3}")
    (tmp_path / "mixtral/one.yaml").write_text("extends: one\ntrain: {lr: 1e-4}")
    (tmp_path / "two.yaml").write_text("extends: one\ntrain: {seed: 3}")
    found, other = recipe.load("two", "mixtral"), recipe.load("two", "olmoe")
    assert (found.train.steps, found.train.lr, found.train.seed) == (5, 1e-4, 3) and other.train.lr == 1e-3
    (tmp_path / "mixtral/alone.yaml").write_text("extends: alone")
    with pytest.raises(RecipeError, match="extends itself"):
        recipe.load("alone", "mixtral")


@pytest.mark.parametrize("family", ["demo", "any other"])
def test_the_remoe_recipes_comment_every_key(family):
    lines = recipe.shipped(family)["remoe"].read_text().splitlines()
    for key in recipe.key_names():
        leaf = key.rpartition(".")[2]
        found = [line for line in lines if line.strip().startswith(f"{leaf}:")]
        assert found and all("#" in line for line in found), f"{family} does not comment {key}"


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_every_shipped_recipe_says_what_it_is_for(family):
    found = recipe.shipped(family)
    assert set(found) >= {"remoe", *recipe.CONTROLS}
    purposes = {recipe.purpose(path) for path in found.values()}
    assert len(purposes) == len(found) and all(len(purpose) > 20 for purpose in purposes)


def test_overrides_and_round_trip(tmp_path):
    found = recipe.load("ce-only", "demo", ["train.lr=5e-5", "objective.lags=[1, 3]", "train.checkpointing=true"])
    assert found.train.lr == 5e-5 and found.objective.lags == (1, 3) and found.train.checkpointing is True
    assert recipe.load("remoe", "demo", ["data.source=2024-01-01"]).data.source == "2024-01-01"
    path = tmp_path / "recipe.yaml"
    path.write_text(found.to_yaml())
    assert recipe.read(path) == found


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))
def test_any_text_survives_the_round_trip(tmp_path_factory, source):
    written = recipe.Recipe(data=recipe.Data(source=source))
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    path.write_text(written.to_yaml(), encoding="utf-8")
    assert recipe.read(path) == written


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.stpes=3", "train.steps"), ("steps=3", "train.steps"), ("plain", "key=value"), ("=", "unknown recipe key"),
        ("train.steps=three", "whole number"), ("train.steps=1.5", "whole number"), ("train.steps=.inf", "whole number"),
        ("train.steps=inf", "whole number"), ("train.steps=.nan", "whole number"), ("train.steps=nan", "whole number"),
        ("train.steps=true", "whole number"), ("train.steps=", "whole number"), ("train.steps=1e300", "whole number"),
        ("train.steps=" + "9" * 5000, "whole number"), ("train.steps={a: 1}", "whole number"), ("train.steps=0", "at least 1"),
        ("train.sequence=1", "between 2 and 1048576"), ("train.sequence=1e9", "between 2 and"), ("train.micro_batch=1e9", "65536"),
        ("train.accumulation=0", "between 1 and 65536"), ("train.lr=7", "at most 1"), ("train.lr_decay=1.5", "between 0 and 1"), ("train.lr=-1", "above 0"),
        ("train.lr=nan", "a number"), ("train.lr=[1", "not valid YAML"), ("train.lr=[1]", "a number"), ("train.lr=1e999", "a number"),
        ("train.clip=0", "above 0"), ("train.betas=0.9", "a list"), ("train.betas=[0.9]", "two numbers"), ("train.betas=[0.9, 1]", "two numbers"),
        ("train.betas=[a, b]", "a list"), ("train.betas={a: 1}", "a list"), ("train.weight_decay=-1", "between 0 and 1"),
        ("train.weight_decay=.inf", "a number"), ("train.seed=-1", "4294967295"), ("train.seed=1.5", "whole number"), ("train.seed=1e18", "whole"),
        ("train.dtype=int8", "float32"), ("train.delta_dtype=bfloat16", "base, float32"), ("train.checkpointing=3", "true or false"), ("train.checkpointing=", "true or false"),
        ("objective.name=remeo", "remoe"), ("objective.lags=[0]", "lags"), ("objective.reuse_tokens=0", "between 1 and 64"), ("objective.lags=[]", "lags"), ("objective.lags=3", "a list"),
        ("objective.lags=12", "a list"), ("objective.lags=[1.5]", "a list"), ("objective.lags=[[1]]", "a list"), ("objective.lags=[.inf]", "a list"),
        ("objective.name=spatio-only", "by its head alone"), ("train.scope=heads", "no heads"), ("train.scope=all", "gates\\+lora"),
        ("train.schedule=linear", "cosine"), ("train.lora_rank=0", "between 1 and 1024"), ("objective.tau=0", "above 0"),
        ("objective.decay=1", "below 1"), ("objective.coverage=-1", "at least 0"), ("objective.policy=temporal", "needs no heads"),
        ("objective.trust=-1", "at least 0"), ("objective.policy=belady", "lru"), ("objective.admission=none", "bypass"), ("objective.reuse_warmup=2", "between 0 and 1"), ("data.format=xml", "prefix"), 
        ("name=../../esc", "letters"), ("name=", "letters"), ("name=" + "x" * 61, "letters"), ("name=[red]", "letters"), ("name=a/b", "letters"),
        ("train.lr=\x00", "not valid YAML"), ("train.lr=" + "[" * 3000, "not valid YAML"),
    ],
    ids=lambda text: text[:30].encode("unicode_escape").decode(),
)  # fmt: skip
def test_bad_overrides_are_named(override, words):
    with pytest.raises(RecipeError, match=words) as caught:
        recipe.load("remoe", "demo", [override])
    assert len(str(caught.value)) < 1500 and "\n" not in str(caught.value)


@pytest.mark.parametrize("family", ["demo", *FAMILIES])
def test_every_key_takes_its_own_value_as_shown(family):
    other = recipe.Recipe(
        "other", recipe.Objective("spatio-only", "base", *[0.5] * 6, (3,), 2, 3, 0.5, 0.5, 0.5, 3, "lfu", "bypass", *[0.5] * 3, True, 0.5, 0.5),
        recipe.Train(*[2] * 4, *[0.25] * 3, "cosine", "+2%", "gates+heads", 3, 0.25, (0.5, 0.5), 0.5, True, "bfloat16", "float32", 5, 7.0, True, "wandb"),
        recipe.Data("elsewhere", "chat", "answers", True, *[3] * 6), recipe.Evaluate(*[1] * 5),
    )  # fmt: skip
    found = recipe.load("remoe", family)
    for key in recipe.key_names():
        assert recipe.value_of(other, key) != recipe.value_of(found, key)
    assert recipe.override(other, [recipe.setting(found, key) for key in recipe.key_names()]) == found


def test_the_list_of_recipes_shows_what_each_key_is_and_can_be_copied(remoe):
    shown = remoe("recipes", "qwen3_moe").out
    assert "  --set train.lr=5e-05\n" in shown and "  --set train.checkpointing=false\n" in shown
    assert "  --set train.lr=0.0006\n" in remoe("recipes", "demo").out
    options = [shlex.split(line) for line in shown.splitlines() if line.startswith("  --set ")]
    assert [option[1].partition("=")[0] for option in options] == recipe.key_names()
    assert recipe.load("ce-only", "qwen3_moe", [option[1] for option in options]) == recipe.load("remoe", "qwen3_moe")


@pytest.mark.parametrize(
    "text", ["a #b", "@x", "[a]", "a: b", "{a}", "'a'", "#", " a ", "true", "~", "*a", "a\\b", "ä=b", "null"]
)
def test_text_is_taken_as_it_stands(text):
    assert recipe.load("remoe", "demo", [f"data.source={text}"]).data.source == text


YAMLISH = st.one_of(
    st.text(),
    st.text("[]{}:,&*!|>'\"%@`-?#= \n.0123456789einfa~_", max_size=30),
    st.from_regex(
        r"(!!(int|float|bool|timestamp|binary|set|omap|python/name) )?[-+]?[0-9._:xobe-]{1,12}", fullmatch=True
    ),
    st.integers().map(str),
    st.floats().map(str),
)


@given(st.sampled_from(recipe.key_names()) | st.text(max_size=20), YAMLISH)
def test_any_override_gives_a_recipe_or_one_line(key, value):
    try:
        found = recipe.load("remoe", "demo", [f"{key}={value}"])
    except RecipeError:
        return
    assert isinstance(found, recipe.Recipe)


@given(YAMLISH)
def test_any_file_gives_a_recipe_or_one_line(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    try:
        recipe.load(str(path), "demo")
    except RecipeError as error:
        assert "\n" not in str(error)


def test_bad_files(tmp_path):
    mine = tmp_path / "mine.yaml"
    for text, words in (
        ("objective: {trsut: 1}", "objective.trust"),
        ("- a list", "section"),
        ("a: [", "not valid YAML"),
        ("1: 2", "unknown recipe key '1'"),
        ("[1]: 2", "not valid YAML"),
        ("train: {[1]: 2}", "not valid YAML"),
        ("train: {null: 2}", "train.null"),
        ("train: 3", "unknown recipe key 'train'"),
        ("trian:", "unknown recipe key 'trian'"),
        ("name: ../../esc", "letters"),
        ("extends: nothing-like-it", "no recipe"),
        ("extends: [a]", "no recipe"),
        (f"extends: {mine}", "extends itself"),
    ):
        mine.write_text(text)
        with pytest.raises(RecipeError, match=words):
            recipe.load(str(mine), "demo")
    (tmp_path / "other.yaml").write_text(f"extends: {mine}")
    mine.write_text(f"extends: {tmp_path / 'other.yaml'}")
    with pytest.raises(RecipeError, match="extends itself"):
        recipe.load(str(mine), "demo")
    mine.write_bytes(b"name: \xff")
    with pytest.raises(RecipeError, match="UTF-8"):
        recipe.load(str(mine), "demo")
    for name in (str(Path(tmp_path / "absent.yaml")), str(tmp_path) + "/.yaml", "a" * 5000 + ".yaml", "\x00.yaml"):
        with pytest.raises(RecipeError, match="no recipe file"):
            recipe.load(name, "demo")
    for name in ("a" * 5000, "../demo/remoe", "\x00", ""):
        with pytest.raises(RecipeError, match="no recipe"):
            recipe.load(name, "demo")


def test_a_file_holds_what_differs_and_a_section_may_be_empty(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: ce-only\nobjective:\ntrain: {steps: 1e3, lr: 5e-5}\n")
    found = recipe.load(str(path), "demo")
    assert found.name == "mine" and found.train.steps == 1000 and found.train.lr == 5e-5 and found.objective.trust == 0

"""Recipe: all inputs of a run, as frozen dataclasses read from YAML. Unknown keys fail with the nearest name.

Defaults live here once; a recipe file may leave keys out, and may start from another with `extends: NAME`.
"""

import difflib
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from remoe_cli.errors import RecipeError

CONTROLS = ("ce-only", "no-trust", "no-reuse", "no-consistency")


@dataclass(frozen=True)
class Objective:
    """L = CE + trust*L_Trust + scale*(a_r*reuse*L_Reuse + a_l*(smooth*L_Smooth + lag*L_Lag + window*L_WS)).

    Defaults: ReMoE (arXiv 2605.27081). window_tokens is not published there; 16 is ours, and so is scale (1 = paper).
    reuse_warmup, consistency_warmup: fractions of the run until a_r, a_l reach 1.
    """

    name: str = "remoe"
    trust: float = 0.45
    reuse: float = 0.2
    smooth: float = 0.05
    lag: float = 0.05
    window: float = 0.01
    scale: float = 1.0
    lags: tuple[int, ...] = (1, 2, 4, 8, 16)
    window_tokens: int = 16
    reuse_warmup: float = 0.2
    consistency_warmup: float = 0.4


@dataclass(frozen=True)
class Train:
    """One optimiser step sees micro_batch * accumulation rows of `sequence` tokens. lr_warmup: fraction of the run."""

    steps: int = 2000
    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 8
    lr: float = 5e-5
    lr_warmup: float = 0.1
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    checkpointing: bool = False
    dtype: str = "auto"
    seed: int = 0


@dataclass(frozen=True)
class Data:
    """source: "demo", a .jsonl or .txt file, or a Hub dataset id. format: how a conversation becomes text."""

    source: str = "teknium/OpenHermes-2.5"
    format: str = "prefix"
    train_samples: int = 100_000
    heldout_samples: int = 1_000


@dataclass(frozen=True)
class Evaluate:
    """rows: held-out rows of `train.sequence` tokens for perplexity and teacher-forced EOR. requests: held-out
    continuations decoded for the traces; measured: how many of them the offloaded decoder times."""

    rows: int = 64
    requests: int = 32
    prompt_tokens: int = 64
    new_tokens: int = 64
    measured: int = 8


@dataclass(frozen=True)
class Recipe:
    name: str = "remoe"
    objective: Objective = field(default_factory=Objective)
    train: Train = field(default_factory=Train)
    data: Data = field(default_factory=Data)
    evaluate: Evaluate = field(default_factory=Evaluate)

    def to_yaml(self) -> str:
        return yaml.safe_dump(_plain(asdict(self)), sort_keys=False)


def folder() -> Path:
    """Where the shipped recipes lie: inside the installed package, else beside it in a checkout."""
    packaged = Path(__file__).parent / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "recipes"


def names(family: str) -> list[str]:
    """Names that `load` accepts for this family."""
    found = {path.stem for pattern in ("*.yaml", f"{family}/*.yaml") for path in folder().glob(pattern)}
    return sorted(found)


def load(name: str, family: str, overrides: list[str] | None = None) -> Recipe:
    """The recipe NAME for `family` ("deepseek_v2", ..., "demo"), or a YAML file, then each `section.key=value`.

    Raises RecipeError for an unknown recipe, an unknown key or a value of the wrong kind.
    """
    recipe = _from_file(_find(name, family), family)
    for override in overrides or []:
        key, equals, value = override.partition("=")
        if not equals:
            raise RecipeError(f"--set takes key=value, not {override!r}.", "remoe finetune MODEL --set train.lr=1e-4")
        recipe = _set(recipe, key.strip(), yaml.safe_load(value))
    return _checked(recipe)


def read(path: Path) -> Recipe:
    """A recipe that a run wrote (no `extends`)."""
    return _from_file(path, "")


def _find(name: str, family: str) -> Path:
    as_file = Path(name)
    if as_file.suffix in (".yaml", ".yml"):
        if not as_file.is_file():
            raise RecipeError(f"no recipe file {name}.", "remoe recipes")
        return as_file
    for path in (folder() / family / f"{name}.yaml", folder() / f"{name}.yaml"):
        if path.is_file():
            return path
    allowed = names(family)
    raise RecipeError(f"no recipe {name!r} for {family}{_nearest(name, allowed)}", "remoe recipes")


def _from_file(path: Path, family: str) -> Recipe:
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise RecipeError(f"the recipe {path} cannot be read ({error.strerror}).", "remoe recipes") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(f"{path} is not valid YAML ({str(error).splitlines()[0]}).", f"cat {path}") from None
    if not isinstance(values, dict):
        raise RecipeError(f"{path} does not hold `section: {{key: value}}` pairs.", "remoe recipes")
    parent = values.pop("extends", None)
    recipe = _from_file(_find(str(parent), family), family) if parent else Recipe()
    recipe = replace(recipe, name=str(values.pop("name", path.stem)))
    for section, entries in values.items():
        if isinstance(entries, dict):
            for key, value in entries.items():
                recipe = _set(recipe, f"{section}.{key}", value)
        else:
            recipe = _set(recipe, section, entries)
    return _checked(recipe)


def _set(recipe: Recipe, key: str, value: Any) -> Recipe:
    allowed = key_names()
    if key not in allowed:
        raise RecipeError(f"unknown recipe key {key!r}{_nearest(key, list(allowed))}", "remoe recipes")
    section, _, leaf = key.rpartition(".")
    if not section:
        return replace(recipe, name=str(value))
    part = getattr(recipe, section)
    return replace(recipe, **{section: replace(part, **{leaf: _coerced(key, value, getattr(part, leaf))})})


def key_names() -> list[str]:
    """Every key that a recipe and `--set` take."""
    recipe = Recipe()
    sections = [f.name for f in fields(recipe) if is_dataclass(getattr(recipe, f.name))]
    return ["name", *(f"{section}.{f.name}" for section in sections for f in fields(getattr(recipe, section)))]


def _coerced(key: str, value: Any, like: Any) -> Any:
    """The value in the kind of the default it replaces (YAML reads 5e-5 as text)."""
    try:
        if isinstance(like, bool):
            if not isinstance(value, bool):
                raise ValueError
            return value
        if isinstance(like, tuple):
            return tuple(type(like[0])(item) for item in value)
        if isinstance(like, int) and float(value) != int(float(value)):
            raise ValueError
        return int(float(value)) if isinstance(like, int) else type(like)(value)
    except (TypeError, ValueError):
        kind = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(type(like), "a list")
        raise RecipeError(f"recipe key {key} takes {kind}, not {value!r}.", "remoe recipes") from None


def _checked(recipe: Recipe) -> Recipe:
    positive = {
        "train.steps": recipe.train.steps, "train.sequence": recipe.train.sequence - 1,
        "train.micro_batch": recipe.train.micro_batch, "train.accumulation": recipe.train.accumulation,
        "train.lr": recipe.train.lr, "train.clip": recipe.train.clip, "evaluate.rows": recipe.evaluate.rows,
        "evaluate.requests": recipe.evaluate.requests, "evaluate.new_tokens": recipe.evaluate.new_tokens,
        "evaluate.prompt_tokens": recipe.evaluate.prompt_tokens, "objective.window_tokens": recipe.objective.window_tokens,
        "evaluate.measured": recipe.evaluate.measured, "data.heldout_samples": recipe.data.heldout_samples,
    }  # fmt: skip
    for key, value in positive.items():
        if not value > 0:
            raise RecipeError(f"recipe key {key} is too small.", "remoe recipes")
    for key, chosen, allowed in (
        ("data.format", recipe.data.format, ("prefix", "chat", "raw")),
        ("train.dtype", recipe.train.dtype, ("auto", "float32", "bfloat16")),
        ("objective.name", recipe.objective.name, ("remoe",)),
    ):
        if chosen not in allowed:
            raise RecipeError(f"recipe key {key} is one of {', '.join(allowed)}, not {chosen!r}.", "remoe recipes")
    for key, value in (
        ("train.lr", recipe.train.lr), ("train.lr_warmup", recipe.train.lr_warmup),
        ("objective.reuse_warmup", recipe.objective.reuse_warmup),
        ("objective.consistency_warmup", recipe.objective.consistency_warmup),
    ):  # fmt: skip
        if not 0 <= value <= 1:
            raise RecipeError(f"recipe key {key} lies between 0 and 1, not {value}.", "remoe recipes")
    if any(lag < 1 for lag in recipe.objective.lags) or not recipe.objective.lags:
        raise RecipeError("recipe key objective.lags holds whole numbers of at least 1.", "remoe recipes")
    return recipe


def _nearest(word: str, allowed: list[str]) -> str:
    leaf = {key.rpartition(".")[2]: key for key in allowed}
    close = difflib.get_close_matches(word, allowed, 1) or [
        leaf[match] for match in difflib.get_close_matches(word.rpartition(".")[2], list(leaf), 1)
    ]
    return f"; did you mean {close[0]}?" if close else f"; allowed: {', '.join(allowed)}."


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value

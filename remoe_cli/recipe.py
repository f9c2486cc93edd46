"""Recipe: all inputs of a run, as frozen dataclasses read from YAML. Unknown keys fail with the nearest name.

Defaults live here once; a recipe file may leave keys out, and may start from another with `extends: NAME`.
"""

import difflib
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from remoe_cli.errors import RecipeError
from remoe_cli.recipe_rules import OBJECTIVES, OWN_TERMS, RULES

OWN_TEXT = "self"  # the data.source of what the base itself writes
CONTROLS = ("ce-only", "no-trust", "no-reuse", "no-consistency")


@dataclass(frozen=True)
class Objective:
    """L = CE + trust*L_Trust + scale*(a_r*reuse*L_Reuse + a_l*(smooth*L_Smooth + lag*L_Lag + window*L_WS)).

    Defaults: ReMoE (arXiv 2605.27081). window_tokens is not published there; 16 is ours, and so are scale and
    reuse_tokens (1 = paper): the experts of how many tokens before count for reuse.
    "resident-mass" has resident*L_Resident in the place of reuse*L_Reuse: mass on what a cache of `cache` slots a layer,
    with this policy and admission, holds; "soft-misses" has misses*L_Misses: the choices outside that cache, each expert
    counted by a sigmoid of width misses_tau nats around the K-th rank. The coverage objectives (CacheRouter, arXiv 2609.04895)
    have coverage*L_Coverage there: how far the `cache` best of a score (softened by tau) miss the probability that comes next;
    "decayed-coverage" sums the gate's past with a factor `decay` a token. detach_target: that probability then has no gradient.
    target: "text": CE is cross entropy; "base": it is KL to the base's own next-token distribution.
    reuse_warmup, consistency_warmup: fractions of the run until a_r, a_l reach 1.
    """

    name: str = "remoe"
    target: str = "text"
    trust: float = 0.45
    reuse: float = 0.2
    smooth: float = 0.05
    lag: float = 0.05
    window: float = 0.01
    scale: float = 1.0
    lags: tuple[int, ...] = (1, 2, 4, 8, 16)
    window_tokens: int = 16
    reuse_tokens: int = 1
    resident: float = 0.2
    misses: float = 0.3
    misses_tau: float = 0.25
    cache: int = 12
    policy: str = "lru"
    admission: str = "forced"
    coverage: float = 0.1
    tau: float = 0.03
    decay: float = 0.8
    detach_target: bool = False
    reuse_warmup: float = 0.2
    consistency_warmup: float = 0.4


@dataclass(frozen=True)
class Train:
    """One optimiser step sees micro_batch * accumulation rows of `sequence` tokens. lr_warmup: fraction of the run
    until lr is reached; lr_decay: fraction at its end over which lr falls in a line towards 0 (0: it stays); schedule:
    constant, or cosine from the warm-up's end towards 0. max_ppl: "off", or how far held-out perplexity may rise ("+1%"), to
    which the locality terms are steered. scope: what trains; every scope but "gates" trains the heads that
    the objective reads. lora_rank: of the adapters on attention, for the scope "gates+lora". delta_dtype: what the delta
    keeps, the base's stored dtype ("base") or the float32 that was learned.
    save_seconds: the least time between two saved states, from which --resume goes on; 0 saves after every step.
    refit_bias: whether selection biases are refitted after training, so that each expert has the load it had in the base.
    tracker: what gets each step's figures beside metrics.jsonl, "" nothing."""

    steps: int = 2000
    sequence: int = 2048
    micro_batch: int = 1
    accumulation: int = 8
    lr: float = 5e-5
    lr_warmup: float = 0.1
    lr_decay: float = 0.0
    schedule: str = "constant"
    max_ppl: str = "off"
    scope: str = "gates"
    lora_rank: int = 8
    clip: float = 1.0
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    checkpointing: bool = False
    dtype: str = "auto"
    delta_dtype: str = "base"
    seed: int = 0
    save_seconds: float = 60.0
    refit_bias: bool = False
    tracker: str = ""


@dataclass(frozen=True)
class Data:
    """source: "demo", a file or folder, or a Hub dataset id. format: how a conversation becomes text. labels: which
    tokens cross entropy counts. streaming: read a Hub dataset row by row, without downloading it whole. own_*: of the
    texts that the base writes itself for the source "self:SOURCE"."""

    source: str = "teknium/OpenHermes-2.5"
    format: str = "prefix"
    labels: str = "all"
    streaming: bool = False
    train_samples: int = 100_000
    heldout_samples: int = 1_000
    own_samples: int = 1_000
    own_prompt_tokens: int = 32
    own_tokens: int = 224
    own_beside: int = 0


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

    @property
    def heads(self) -> tuple[str, ...]:
        """The kinds of heads that the run trains."""
        return () if self.train.scope == "gates" else OBJECTIVES[self.objective.name]

    @property
    def has_locality(self) -> bool:
        """Whether any locality term has a factor above 0."""
        own = OWN_TERMS[self.objective.name]
        return self.objective.scale > 0 and any(
            getattr(self.objective, key) > 0 for key in (own, "smooth", "lag", "window")
        )

    def to_yaml(self) -> str:
        return yaml.safe_dump(_plain(asdict(self)), sort_keys=False)


def folder() -> Path:
    """Where the shipped recipes lie: inside the installed package, else beside it in a checkout."""
    packaged = Path(__file__).parent / "recipes"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "recipes"


def shipped(family: str) -> dict[str, Path]:
    """Recipes that `load` knows for this family, by name; one of the family's own stands before a common one."""
    return {path.stem: path for pattern in ("*.yaml", f"{family}/*.yaml") for path in sorted(folder().glob(pattern))}


def purpose(path: Path) -> str:
    """What a recipe is for: the comment in its first line."""
    return path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")


def load(name: str, family: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe NAME for `family` ("deepseek_v2", ..., "demo"), or a YAML file, then each `section.key=value`.

    Raises RecipeError for an unknown recipe, an unknown key or a value of the wrong kind or range.
    """
    return override(_from_file(_find(name, family), family), overrides)


def override(recipe: Recipe, overrides: Sequence[str]) -> Recipe:
    """The recipe with each `section.key=value` set: text as it stands, other values in YAML. Raises RecipeError as `load`."""
    for option in overrides:
        key, equals, value = option.partition("=")
        if not equals:
            raise RecipeError(
                f"--set takes key=value, not {_shown(option)}.", "remoe finetune MODEL --set train.lr=1e-4"
            )
        key = key.strip()
        if not _is_text(recipe, key):
            value = _parsed(value, f"the value of {key}", "remoe recipes")
        recipe = _set(recipe, key, value)
    return _checked(recipe)


def read(path: Path) -> Recipe:
    """A recipe that a run wrote (no `extends`)."""
    return _checked(_from_file(path, ""))


def _find(name: str, family: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        if not os.path.isfile(name):
            raise RecipeError(f"no recipe file {_shown(name)}.", "remoe recipes")
        return Path(name)
    known = shipped(family)
    if name not in known:
        raise RecipeError(f"no recipe {_shown(name)} for {family}{_nearest(name, list(known))}", "remoe recipes")
    return known[name]


def _from_file(path: Path, family: str, children: tuple[Path, ...] = ()) -> Recipe:
    if path in children:
        raise RecipeError(f"the recipe {path} extends itself.", f"cat {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise RecipeError(f"the recipe {path} cannot be read ({error.strerror}).", "remoe recipes") from None
    except UnicodeDecodeError:
        raise RecipeError(f"the recipe {path} is not UTF-8 text.", "remoe recipes") from None
    values = _parsed(text, str(path), f"cat {path}")
    if not isinstance(values, dict):
        raise RecipeError(f"{path} does not hold `section: {{key: value}}` pairs.", "remoe recipes")
    parent = values.pop("extends", None)
    recipe = _from_file(_parent(str(parent), path, family), family, (*children, path)) if parent else Recipe()
    recipe = _set(recipe, "name", values.pop("name", path.stem))
    for section, entries in values.items():
        if isinstance(entries, dict):
            for key, value in entries.items():
                recipe = _set(recipe, f"{section}.{key}", value)
        elif entries or section not in asdict(recipe):  # a section may be empty
            recipe = _set(recipe, section, entries)
    return recipe


def _parent(name: str, child: Path, family: str) -> Path:
    """What a file extends: of a family's recipe that extends its own name, the common one."""
    found, common = _find(name, family), folder() / f"{name}.yaml"
    return common if found == child and common.is_file() else found


def _parsed(text: str, what: str, hint: str) -> Any:
    """YAML whose scalars all stay text: the default that a value replaces says its kind (so 5e-5 is a number)."""
    try:
        found = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise RecipeError(f"{what} is not valid YAML ({reason}).", hint) from None
    return "" if found is None else found


def _set(recipe: Recipe, key: str, value: Any) -> Recipe:
    allowed = key_names()
    if key not in allowed:
        raise RecipeError(f"unknown recipe key {_shown(key)}{_nearest(key, allowed)}", "remoe recipes")
    section, _, leaf = key.rpartition(".")
    value = _coerced(key, value, value_of(recipe, key))
    if section:
        leaf, value = section, replace(getattr(recipe, section), **{leaf: value})
    return replace(recipe, **{leaf: value})


def key_names() -> list[str]:
    """Every key that a recipe and `--set` take."""
    recipe = Recipe()
    sections = [f.name for f in fields(recipe) if is_dataclass(getattr(recipe, f.name))]
    return ["name", *(f"{section}.{f.name}" for section in sections for f in fields(getattr(recipe, section)))]


def is_own(source: str) -> bool:
    """Whether a data.source asks for the base's own text: "self:SOURCE", SOURCE giving prompts and held-out texts."""
    return source == OWN_TEXT or source.startswith(f"{OWN_TEXT}:")


def prompts_of(source: str) -> str:
    """The source of prompts and held-out texts; of another source, itself."""
    return source.partition(":")[2] if is_own(source) else source


def value_of(recipe: Recipe, key: str) -> Any:
    """The value of one of `key_names`."""
    for part in key.split("."):
        recipe = getattr(recipe, part)
    return recipe


def setting(recipe: Recipe, key: str) -> str:
    """key=value, as `override` takes it."""
    value = value_of(recipe, key)
    if isinstance(value, bool):
        value = str(value).lower()
    return f"{key}={list(value) if isinstance(value, tuple) else value}"


def _is_text(recipe: Recipe, key: str) -> bool:
    return key in key_names() and isinstance(value_of(recipe, key), str)


def _coerced(key: str, value: Any, like: Any) -> Any:
    """Text, or a list of texts, in the kind of the default that it replaces."""
    try:
        if not isinstance(like, tuple):
            return _scalar(value, type(like))
        if not isinstance(value, list):
            raise ValueError
        return tuple(_scalar(item, type(like[0])) for item in value)
    except ValueError:
        one = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        kind = one.get(type(like)) or f"a list such as {list(like)}"
        raise RecipeError(f"recipe key {key} takes {kind}, not {_shown(value)}.", "remoe recipes") from None


def _scalar(value: Any, kind: type) -> Any:
    """Raises ValueError for what is not text of that kind; a number is finite, a whole one exact in a float."""
    if not isinstance(value, str) or (kind is bool and value.lower() not in ("true", "false")):
        raise ValueError
    if kind is bool:
        return value.lower() == "true"
    if kind is str:
        return value
    number = float(value)
    if not math.isfinite(number) or (kind is int and not (number.is_integer() and abs(number) < 2**53)):
        raise ValueError
    return kind(number)


def limit_of(text: str) -> float | None:
    """A train.max_ppl as a relative change: .01 of "+1%", None of "off"."""
    return None if text == "off" else float(text.removesuffix("%")) / 100


def _checked(recipe: Recipe) -> Recipe:
    for allowed, holds, keys in RULES:
        for key in keys:
            if not holds(value := value_of(recipe, key)):
                shown = list(value) if isinstance(value, tuple) else value
                raise RecipeError(f"recipe key {key} is {allowed}, not {_shown(shown)}.", "remoe recipes")
    scope, objective = recipe.train.scope, recipe.objective.name
    if scope in ("heads", "gates+heads") and not recipe.heads:
        with_heads = ", ".join(name for name, kinds in OBJECTIVES.items() if kinds)
        raise RecipeError(
            f"objective {objective} has no heads to train; those with heads: {with_heads}.", "remoe recipes"
        )
    if scope == "heads" and recipe.train.max_ppl != "off":
        raise RecipeError(
            "heads alone move no perplexity, so train.max_ppl has nothing to steer.",
            "the same command without --max-ppl",
        )
    if recipe.train.max_ppl != "off" and not recipe.has_locality:
        raise RecipeError(
            "all locality terms of this recipe have a factor of 0, so train.max_ppl has nothing to steer.",
            "the same command without --max-ppl, or with another --recipe",
        )
    if objective == "spatio-only" and scope == "gates":
        raise RecipeError(
            "spatio-only scores by its head alone, and train.scope gates has none.", "--set train.scope=gates+heads"
        )
    return recipe


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


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

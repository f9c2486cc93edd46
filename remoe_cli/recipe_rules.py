"""What the values of a recipe may be: one table, (what is allowed, whether a value is, the keys that it holds for)."""

import re
from collections.abc import Callable
from typing import Any

# each objective, and the heads that it reads where the scope has any
OBJECTIVES: dict[str, tuple[str, ...]] = {
    "remoe": (),
    "resident-mass": (),
    "soft-misses": (),
    "coverage-temporal": ("temporal",),
    "coverage-spatio-temporal": ("temporal", "spatio"),
    "spatio-only": ("spatio",),
    "decayed-coverage": ("temporal",),
}
# the factor of each objective's own term, beside those of consistency
OWN_TERMS = {"remoe": "reuse", "resident-mass": "resident", "soft-misses": "misses"}
OWN_TERMS |= {name: "coverage" for name in OBJECTIVES if name not in OWN_TERMS}
_CHANGE = re.compile(r"[+-]?(\d{1,3}(\.\d{0,6})?|\.\d{1,6})%")
_NAME = re.compile(r"[^\W_][\w.-]{0,59}")  # it becomes part of folder names


def _one_of(*words: str) -> tuple[str, Callable[[Any], bool]]:
    return f"one of {', '.join(words)}", words.__contains__


def _is_change(text: str) -> bool:
    return bool(_CHANGE.fullmatch(text)) and -50 <= float(text.removesuffix("%")) <= 100


def _is_live(policy: str) -> bool:
    """Whether a cache can run it on what the gate chose and scored, without heads."""
    from remoe_cli.cache import choose, live_policies
    from remoe_cli.errors import CacheError

    try:
        chosen = choose(policy)
    except CacheError:
        return False
    needs_heads = {"temporal", "spatio"} & set(chosen.policy.needs)
    return chosen.name in live_policies() and not needs_heads and not chosen.policy.refines


RULES: tuple[tuple[str, Callable[[Any], bool], tuple[str, ...]], ...] = (
    ("at least 1", lambda n: n >= 1, (
        "train.steps", "data.train_samples", "data.heldout_samples", "data.own_samples",
        "data.own_prompt_tokens", "data.own_tokens", "objective.window_tokens", "objective.cache", "evaluate.rows",
        "evaluate.requests", "evaluate.prompt_tokens", "evaluate.new_tokens", "evaluate.measured",
    )),
    ("at least 0", lambda n: n >= 0, ("data.own_beside",)),
    ("between 2 and 1048576", lambda n: 2 <= n <= 2**20, ("train.sequence",)),
    ("between 1 and 64", lambda n: 1 <= n <= 64, ("objective.reuse_tokens",)),
    ("between 1 and 1024", lambda n: 1 <= n <= 2**10, ("train.lora_rank",)),
    ("between 1 and 65536", lambda n: 1 <= n <= 2**16, ("train.micro_batch", "train.accumulation")),
    ("between 0 and 4294967295", lambda n: 0 <= n < 2**32, ("train.seed",)),
    ("above 0", lambda x: x > 0, ("train.clip", "objective.tau", "objective.misses_tau")),
    ("from 0 to below 1", lambda x: 0 <= x < 1, ("objective.decay",)),
    ("above 0 and at most 1", lambda x: 0 < x <= 1, ("train.lr",)),
    ("between 0 and 1", lambda x: 0 <= x <= 1, (
        "train.lr_warmup", "train.lr_decay", "train.weight_decay", "objective.reuse_warmup",
        "objective.consistency_warmup",
    )),
    ("at least 0", lambda x: x >= 0, (
        "objective.trust", "objective.reuse", "objective.resident", "objective.misses", "objective.coverage", "objective.smooth", "objective.lag",
        "objective.window", "objective.scale", "train.save_seconds",
    )),
    ("two numbers from 0 to below 1", lambda b: len(b) == 2 and all(0 <= x < 1 for x in b), ("train.betas",)),
    ("at least one number, each at least 1", lambda lags: bool(lags) and min(lags) >= 1, ("objective.lags",)),
    ("1 to 60 letters, digits or . _ - (first a letter or digit)", lambda s: bool(_NAME.fullmatch(s)), ("name",)),
    (*_one_of("text", "base"), ("objective.target",)),
    (*_one_of("forced", "bypass"), ("objective.admission",)),
    ("a cache policy that a decoder can use and that needs no heads, such as lru or decayed:0.8", _is_live, ("objective.policy",)),
    (*_one_of(*OBJECTIVES), ("objective.name",)),
    (*_one_of("gates", "heads", "gates+heads", "gates+lora", "full"), ("train.scope",)),
    (*_one_of("constant", "cosine"), ("train.schedule",)),
    ("off, or a change from -50% to +100% such as +1%", lambda text: text == "off" or _is_change(text), ("train.max_ppl",)),
    (*_one_of("auto", "float32", "bfloat16"), ("train.dtype",)),
    (*_one_of("base", "float32"), ("train.delta_dtype",)),
    ("empty, or one of tensorboard, wandb, trackio", ("", "tensorboard", "wandb", "trackio").__contains__, ("train.tracker",)),
    (*_one_of("prefix", "chat", "raw"), ("data.format",)),
    (*_one_of("all", "answers"), ("data.labels",)),
)  # fmt: skip

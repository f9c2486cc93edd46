"""Task quality: every arm on the same items of lm-eval's tasks, compared item by item with the base."""

import contextlib
import hashlib
import importlib.util
import logging
import math
import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from remoe_cli.environment import out_of_memory
from remoe_cli.errors import DataError, UsageError
from remoe_cli.families.loader import quiet
from remoe_cli.measure.arms import Arm
from remoe_cli.measure.decode_options import Again
from remoe_cli.measure.run_code import check_limits
from remoe_cli.report.paired import compare, Items

_BATCH = 8  # requests computed together
_SEED = 1234  # of the worked examples, as lm-eval's own
Key = tuple[str, str, str]  # part, metric, filter


@dataclass(frozen=True)
class TaskOptions:
    """The options of `remoe eval` on tasks, as given. tasks: NAME or NAME=FILE, comma-separated."""

    tasks: str | None = None
    limit: int | None = None
    few_shot: int | None = None
    chat_template: bool = False
    run_code: bool = False

    def given(self) -> dict[str, Any]:
        """Those that are not as by default."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) != field.default}


NO_TASKS = TaskOptions()


class Tasks:
    """What was asked for, loaded; then `run` once for each arm, then `rows` and `conditions` for the report."""

    def __init__(self, options: TaskOptions, tokenizer: Any, again: Again) -> None:
        """Raises UsageError and DataError for every mistake, so that nothing is measured before."""
        self._options, self._tokenizer = options, tokenizer
        asked = _asked(options, again)
        self._loaded: Sequence[Any] = []
        self._found: dict[str, dict[Key, _Found]] = {}
        self._cut: dict[str, int] = {}
        self._bos, self._context = "none", 0
        self.notes: list[str] = []
        if not asked:
            return
        if options.chat_template and not tokenizer.chat_template:
            raise UsageError(
                "--chat-template needs one, and the tokenizer of this model has none.", again(chat_template=None)
            )
        from remoe_cli.measure import task_items

        def mended(name: str, other: str | None, **changes: Any) -> str:
            words = [other if one == name else f"{one}={file}" if file else one for one, file in asked.items()]
            return again(tasks=",".join(word for word in words if word) or None, **changes)

        if any(map(task_items.needs_code, asked)):
            if not options.run_code:
                raise UsageError(
                    "humaneval runs the code that the model writes, on this machine, with time and memory limits but no sandbox.",
                    again(run_code=True),
                )
            check_limits()
        with _silent():
            self._loaded = task_items.load(asked, options.few_shot, mended)

    def run(self, arm: str, model: Any) -> None:
        """Every task with the gates that the model holds now. Raises DataError where the prompts are not those of the
        arms before, or a task fails."""
        if not self._loaded:
            return
        from remoe_cli.measure.task_model import TaskModel

        stderr = sys.stderr
        with _silent(), quiet():
            asked = TaskModel(model, self._tokenizer, arm, _BATCH, stderr)
            self._context = asked.max_length
            self._make_room()
            self.ask(arm, asked)
        self._bos = asked.bos()
        self._cut = {name: len(items) for name, items in asked.cut.items()}

    def ask(self, arm: str, model: Any) -> None:
        """As `run`, of anything that answers as lm-eval's LM does."""
        import lm_eval

        _reseed()
        for part in self._parts.values():
            part.set_fewshot_seed(seed=_SEED)
        with _one_line():
            results = lm_eval.evaluate(
                lm=model, task_dict={"tasks": self._parts}, limit=self._options.limit, bootstrap_iters=0,
                apply_chat_template=self._options.chat_template, fewshot_as_multiturn=self._options.chat_template,
            )  # fmt: skip
        self._found[arm] = self._items(results)
        self._check_same(arm)

    def rows(self, arms: Sequence[Arm]) -> list[dict[str, Any]]:
        """One a task (docs/report.md)."""
        return [self._row(one, arms) for one in self._loaded]

    def conditions(self) -> dict[str, Any] | None:
        if not self._loaded:
            return None
        import lm_eval

        template = self._tokenizer.chat_template if self._options.chat_template else None
        return {
            "lm_eval": lm_eval.__version__,
            "tasks": [one.name for one in self._loaded],
            "limit": self._options.limit,
            "template": "none" if template is None else "chat",
            "template_sha256": template and hashlib.sha256(str(template).encode()).hexdigest(),
            "bos": self._bos,
            "context": self._context,
            "batch": _BATCH,
            "few_shot_seed": _SEED,
        }

    def _row(self, task: Any, arms: Sequence[Arm]) -> dict[str, Any]:
        base = self._found[arms[0].name]
        measures = dict.fromkeys((metric, rule) for part, metric, rule in base if part in task.parts)
        metrics = []
        for metric, rule in measures:
            pooled = {arm.name: _pool(self._found[arm.name], task.parts, metric, rule) for arm in arms}
            first = pooled[arms[0].name]
            changes = [None, *(compare(first.items, pooled[arm.name].items) for arm in arms[1:])]
            metrics.append(
                {
                    "metric": metric, "filter": rule, "n": int(sum(first.items.possible_N)), "higher_is_better": first.higher,
                    "arms": [
                        {"name": arm.name, "role": arm.role, "score": pooled[arm.name].items.score, **(change or _NO_CHANGE)}
                        for arm, change in zip(arms, changes, strict=True)
                    ],
                }
            )  # fmt: skip
        part = next(iter(task.parts.values()))
        hashes = _pool(base, task.parts, *next(iter(measures))).hashes if measures else []
        return {
            "task": task.name, "source": task.source, "parts": len(task.parts),
            "version": (part.config.metadata or {}).get("version"), "few_shot": part.get_config("num_fewshot"),
            "items": len(hashes), "items_sha256": hashlib.sha256("".join(hashes).encode()).hexdigest(),
            "cut": sum(self._cut.get(name, 0) for name in task.parts), "metrics": metrics,
        }  # fmt: skip

    @property
    def _parts(self) -> dict[str, Any]:
        return {name: part for one in self._loaded for name, part in one.parts.items()}

    def _make_room(self) -> None:
        """No answer takes more than half of the context, so that a prompt fits beside it."""
        from remoe_cli.measure.task_model import OWN_LENGTH

        room, shortened = self._context // 2, []
        for name, part in self._parts.items():
            if part.OUTPUT_TYPE == "generate_until":
                settings = part.get_config("generation_kwargs") or {}
                if settings.get("max_gen_toks", OWN_LENGTH) > room:
                    part.set_config("generation_kwargs", {"max_gen_toks": room}, update=True)
                    shortened.append(name)
        if shortened:
            self.notes.append(
                f"answers of {', '.join(shortened)} end after {room} tokens, half of what this model's context holds"
            )

    def _items(self, results: dict[str, Any]) -> dict[Key, "_Found"]:
        """Those metrics whose score is a mean over items, as lm-eval's own figure must confirm; a note names the others."""
        found: dict[Key, _Found] = {}
        for part, samples in results["samples"].items():
            samples = sorted(samples, key=lambda one: one["doc_id"])
            keys = dict.fromkeys((one["filter"], metric) for one in samples for metric in one["metrics"])
            for rule, metric in keys:
                these = [one for one in samples if one["filter"] == rule]
                items = _sums([one[metric] for one in these])
                theirs = results["results"][part].get(f"{metric},{rule}")
                if items is None or theirs is None or not math.isclose(items.score or 0.0, theirs, abs_tol=1e-9):
                    note = f"{part}: {metric} is no mean over items, so it is left out"
                    self.notes += [note] if note not in self.notes else []
                    continue
                hashes = [one["doc_hash"] + one["prompt_hash"] for one in these]
                higher = results["higher_is_better"].get(part, {}).get(metric)
                found[part, metric, rule] = _Found(items, hashes, higher)
        return found

    def _check_same(self, arm: str) -> None:
        first = next(iter(self._found.values()))
        for (part, *_), one in first.items():
            other = self._found[arm].get((part, *_))
            if other is None or other.hashes != one.hashes:
                raise DataError(
                    f"the task {part} gave {arm} other prompts than the base, so they do not pair.",
                    "the same command without it",
                )


class _Found(NamedTuple):
    items: Items
    hashes: list[str]  # of each item and its prompt
    higher: bool | None  # whether more is better


_NO_CHANGE: dict[str, None] = dict.fromkeys(("change", "change_95", "test", "p", "gained", "lost"))


def _pool(found: dict[Key, _Found], parts: Any, metric: str, rule: str) -> _Found:
    """Over the parts of a task, every item alike."""
    these = [found[part, metric, rule] for part in parts if (part, metric, rule) in found]
    items = Items([n for one in these for n in one.items.got_N], [n for one in these for n in one.items.possible_N])
    return _Found(items, [item for one in these for item in one.hashes], these[0].higher)


def _sums(values: Sequence[Any]) -> Items | None:
    """A number an item, or a list of them where an item holds several (IFEval's instructions); None for anything else."""
    lists = [value if isinstance(value, list) else [value] for value in values]
    numbers = (bool, int, float, np.number)
    if not all(isinstance(number, numbers) and math.isfinite(number) for one in lists for number in one):
        return None
    return Items([float(sum(one)) for one in lists], [float(len(one)) for one in lists])


def _asked(options: TaskOptions, again: Again) -> dict[str, Path | None]:
    """Raises UsageError."""
    if options.tasks is None:
        if given := options.given():
            name = next(iter(given)).replace("_", "-")
            raise UsageError(f"--{name} is of tasks, and --tasks names none.", again(tasks="gsm8k"))
        return {}
    if importlib.util.find_spec("lm_eval") is None:
        raise UsageError("--tasks needs lm-eval, which is not installed.", 'pip install "remoe-cli[tasks]"')
    if options.limit is not None and options.limit < 1:
        raise UsageError(f"--limit is at least 1, not {options.limit}.", again(limit=100))
    if options.few_shot is not None and options.few_shot < 0:
        raise UsageError(f"--few-shot is at least 0, not {options.few_shot}.", again(few_shot=0))
    found: dict[str, Path | None] = {}
    for word in options.tasks.split(","):
        name, _, file = (part.strip() for part in word.partition("="))
        if not name or name in found or ("=" in word and not file):
            raise UsageError(
                f"--tasks takes NAME or NAME=FILE, separated by commas, each once, not {options.tasks!r}.",
                again(tasks="gsm8k,mmlu"),
            )
        found[name] = Path(file).expanduser() if file else None
    return found


def _reseed() -> None:
    """For tasks that draw something as they make their prompts: every arm gets the same."""
    random.seed(0)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)


@contextlib.contextmanager
def _one_line() -> Iterator[None]:
    """Of what goes wrong in a task's own templates and scorers, which may be any kind of error."""
    try:
        yield
    except Exception as error:
        if out_of_memory(error):
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise DataError(f"a task could not be asked or scored ({reason}).", "the same command without it") from error


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """lm-eval's own bars, warnings and prints, which would end up among a script's JSON."""
    loggers = [logging.getLogger(name) for name in ("lm_eval", "huggingface_hub", "datasets")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)

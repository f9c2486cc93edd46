"""lm-eval's tasks, with their items from the Hub or from local files."""

import difflib
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import lm_eval.tasks
from lm_eval.tasks import TaskManager

from remoe_cli.errors import DataError, UsageError
from remoe_cli.measure.run_code import passes
from remoe_cli.train.files import form, rows_of, TABLES

HUMANEVAL = ("humaneval", "humaneval_instruct", "humaneval_plus")  # code that is run within limits of ours
# the whole of lm-eval's 14,000 task files takes seconds to read, these folders do not
_USUAL = ("gsm8k", "humaneval", "mmlu/default", "ifeval", "hendrycks_math", "commonsense_qa")
_KINDS = ("subject", "type", "category")  # columns that name the part of a task that a row belongs to
_OWN = (".yaml", ".yml")  # a task of the user's
Row = dict[str, Any]


class Loaded(NamedTuple):
    """One task as it was asked for. source: its file's name, or the Hub's data set. parts: lm-eval's own tasks by name, one, or
    those of a group such as mmlu's subjects."""

    name: str
    source: str
    parts: dict[str, Any]


def load(asked: Mapping[str, Path | None], few_shot: int | None, again: Callable[..., str]) -> list[Loaded]:
    """few_shot: None for each task's own number. again: the command with another word in place of a task (None: without it),
    and other options. Raises UsageError for a task that lm-eval has not, DataError for items that cannot be read or do not
    fit."""
    return [_load(name, file, few_shot, again) for name, file in asked.items()]


def needs_code(name: str) -> bool:
    return name in HUMANEVAL


def _load(name: str, file: Path | None, few_shot: int | None, again: Callable[..., str]) -> Loaded:
    manager, own = _manager(name), Path(name).suffix in _OWN
    if own and not Path(name).is_file():
        raise UsageError(f"there is no file {name}.", f"ls {shlex.quote(str(Path(name).parent))}")
    if name not in manager.task_index and not own:
        near = difflib.get_close_matches(name, manager.all_tasks, 1)
        raise UsageError(
            f"lm-eval has no task {name!r}{f'; the nearest name is {near[0]}' if near else ''}.",
            again(name, near[0]) if near else "lm-eval ls tasks",
        )
    try:
        spec = _spec(manager, name, file, few_shot)
        parts = {part.task_name: part for part in manager.load([spec])["tasks"].values()}
        shots(parts, few_shot)
    except (DataError, UsageError):
        raise
    except Exception as error:  # of data sets, of the Hub, of templates: any kind
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        if file is not None:
            raise DataError(f"the rows of {file} do not fit {name} ({reason}).", _head(file)) from None
        mended = None if own else f"{name}=FILE.jsonl"
        raise DataError(f"the items of {name} cannot be loaded ({reason}).", again(name, mended)) from None
    unsafe = [part for part, task in parts.items() if getattr(task, "UNSAFE_CODE", False)]
    if unsafe:
        known = ", ".join(HUMANEVAL)
        raise UsageError(
            f"{unsafe[0]} runs the model's code without limits; of such tasks remoe eval takes {known}.",
            again(name, "humaneval", run_code=True),
        )
    if any(part.startswith("ifeval") for part in parts):
        _check_sentences()
    source = file.name if file else Path(name).name if own else _hub_names(parts)
    return Loaded(Path(name).stem if own else name, source, parts)


def _check_sentences() -> None:
    """Raises UsageError where NLTK's tables are missing, which lm-eval fetches by itself where there is a network."""
    from nltk.tokenize.punkt import PunktTokenizer

    try:
        PunktTokenizer("english")
    except LookupError:
        raise UsageError(
            "ifeval counts sentences with NLTK's tables punkt_tab, which are not on this machine.",
            "python -m nltk.downloader punkt_tab",
        ) from None


def shots(parts: Mapping[str, Any], few_shot: int | None) -> None:
    """The number of worked examples in each prompt; a task that says 0 itself keeps it, as with lm-eval."""
    for part in parts.values():
        own = part.get_config("num_fewshot")
        if own is None or (few_shot is not None and own != 0):
            part.set_config("num_fewshot", few_shot or 0)


@lru_cache(maxsize=1)
def _usual() -> TaskManager:
    folder = Path(lm_eval.tasks.__file__).parent
    return TaskManager(include_defaults=False, include_path=[folder / name for name in _USUAL])


@lru_cache(maxsize=1)
def _all() -> TaskManager:
    return TaskManager()


def _manager(name: str) -> TaskManager:
    return _usual() if name in _usual().task_index or Path(name).suffix in _OWN else _all()


def _spec(manager: TaskManager, name: str, file: Path | None, few_shot: int | None) -> str | dict[str, Any]:
    """What lm-eval is to load: a name, or its task with other items or another scorer."""
    if name in HUMANEVAL:
        config = {**(manager.task_index[name].cfg or {}), **_humaneval(name)}
        return config if file is None else {**config, **_local(config, _rows(file), file, few_shot)}
    if file is None:
        return name
    parts = list(_parts(manager, name))
    if not parts:
        raise UsageError(
            f"{name} takes no file of items; a task of lm-eval does, by its name.",
            "remoe eval --tasks gsm8k=test.jsonl",
        )
    rows = _rows(file)
    of_parts = {parts[0]: rows} if len(parts) == 1 else _split(manager, name, parts, rows, file)
    members = [
        {"task": part, **_local(manager.task_index[part].cfg or {}, of_part, file, few_shot)}
        for part, of_part in of_parts.items()
    ]
    return {"group": f"{name} of {file.name}", "task": members}


def _parts(manager: TaskManager, name: str) -> Iterator[str]:
    """The tasks below a name: of a group or tag all of theirs."""
    entry = manager.task_index.get(name)
    if entry is None:
        return
    members = (entry.cfg or {}).get("task")
    if isinstance(members, list):
        for member in members:
            yield from _parts(manager, member if isinstance(member, str) else str(member.get("task")))
    elif entry.cfg is None:
        yield from sorted(entry.tags)
    else:
        yield name


def _split(manager: TaskManager, name: str, parts: Sequence[str], rows: list[Row], file: Path) -> dict[str, list[Row]]:
    """The rows of each part of a group, by the column that names it."""
    kinds = {_word((manager.task_index[part].cfg or {}).get("dataset_name")): part for part in parts}
    column = next((one for one in _KINDS if one in rows[0]), None)
    if column is None:
        raise DataError(
            f"{name} has {len(parts)} parts, and {file} has no column {' or '.join(_KINDS)} that says which a row is of.",
            _head(file),
        )
    found: dict[str, list[Row]] = {}
    for number, row in enumerate(rows, 1):
        part = kinds.get(_word(row[column]))
        if part is None:
            raise DataError(f"{file}, row {number}: {name} has no part {row[column]!r} ({column}).", _head(file))
        found.setdefault(part, []).append(row)
    return found


def _word(name: Any) -> str:
    """ "Counting & Probability" as counting_and_probability."""
    return re.sub(r"[^a-z0-9]+", "_", str(name).lower().replace("&", "and")).strip("_")


def _local(config: Mapping[str, Any], rows: list[Row], file: Path, few_shot: int | None) -> dict[str, Any]:
    """The part of a task's configuration that makes it take these rows, and worked examples from a file beside."""
    measured = "test_split" if config.get("test_split") else "validation_split"
    split = config[measured]
    own = config.get("num_fewshot")
    wanted = own or 0 if few_shot is None or own == 0 else few_shot
    examples = config.get("fewshot_split") or config.get("training_split") or split
    splits = {split: rows}
    if examples != split:  # lm-eval looks at them even where no prompt holds one
        splits[examples] = _examples(config, str(examples), file, rows) if wanted else rows
    elif wanted:
        raise DataError(
            f"{config.get('task')} has no split with worked examples but the one that is measured.",
            "the same command with --few-shot 0",
        )
    made: dict[str, datasets.Dataset] = {}

    def items(**_: Any) -> dict[str, datasets.Dataset]:
        return made or made.update({name: datasets.Dataset.from_list(of) for name, of in splits.items()}) or made

    unused = {f"{kind}_split": None for kind in ("training", "validation", "test")}
    return {**unused, measured: split, "fewshot_split": examples, "custom_dataset": items}


def _examples(config: Mapping[str, Any], split: str, file: Path, rows: list[Row]) -> list[Row]:
    """Of the file beside that is named as their split; of a group's part those of its kind."""
    beside = [one for one in sorted(file.parent.glob(f"{split}.*")) if form(one) in TABLES]
    if not beside:
        raise DataError(
            f"{config.get('task')} shows worked examples of its split {split}, and beside {file} lies no file {split}.jsonl.",
            "that file beside it, or the same command with --few-shot 0",
        )
    found = _rows(beside[0])
    column = next((one for one in _KINDS if one in rows[0]), None)
    if column is None or column not in found[0]:
        return found
    kinds = {row[column] for row in rows}
    return [row for row in found if row[column] in kinds] if len(kinds) == 1 else found


def _rows(file: Path) -> list[Row]:
    """Raises DataError where there is none, or one lacks a field that the first one has."""
    if not file.is_file():
        what = "is a folder: name the file that is to be measured" if file.is_dir() else "is no file"
        raise DataError(f"{file} {what}.", f"ls {shlex.quote(str(file if file.is_dir() else file.parent))}")
    rows: list[Row] = []
    for number, row in rows_of(file):
        if not isinstance(row, dict):
            raise DataError(f"{file}, row {number}: not a JSON object with fields.", _head(file))
        missing = [
            field for field in (rows[0] if rows else ()) if row.get(field) is None and rows[0][field] is not None
        ]
        if missing:
            raise DataError(f"{file}, row {number}: no field {missing[0]!r} as in the rows before.", _head(file))
        rows.append(row)
    if not rows:
        raise DataError(f"{file} holds no row.", _head(file))
    return rows


def _head(file: Path) -> str:
    path = shlex.quote(str(file))
    return f"zcat {path} | head -n 3" if file.suffix == ".gz" else f"head -n 3 {path}"


def _hub_names(parts: Mapping[str, Any]) -> str:
    return ", ".join(dict.fromkeys(str(part.config.dataset_path) for part in parts.values()))


def _humaneval(name: str) -> dict[str, Any]:
    """pass@1 by our own limits: lm-eval's scorer is fetched from the Hub, and has a time limit only.

    A program is the prompt, the answer (of the instruct form up to its closing fence), the item's tests and a call of
    them, as in HumanEval's own evaluation (2107.03374).
    """

    def process_results(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
        answer = results[0].partition("```")[0] if name.endswith("_instruct") else results[0]
        program = f"{doc['prompt']}{answer}\n{doc['test']}\ncheck({doc['entry_point']})\n"
        return {"pass@1": float(passes(program))}

    metric = {"metric": "pass@1", "aggregation": "mean", "higher_is_better": True}
    return {"unsafe_code": False, "process_results": process_results, "metric_list": [metric], "filter_list": None}

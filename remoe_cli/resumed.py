"""A run that is taken up again, or begun: its base, its texts and its state, as they must be found."""

import json
import math
from dataclasses import replace
from typing import Any

import torch

from remoe_cli.console import note
from remoe_cli.errors import DataError, RunError
from remoe_cli.measure.sample import Sample
from remoe_cli.measure.steering import halves
from remoe_cli.recipe import is_own, limit_of, prompts_of, Recipe
from remoe_cli.run import Run
from remoe_cli.train.data import Documents, load_documents
from remoe_cli.train.state import newest, State


def base_of(run: Run) -> str:
    """The base as it was pinned, or as the user named it where the run was killed before that."""
    facts = run.facts
    return facts.get("base", facts["model"]) + (f"@{facts['commit']}" if facts.get("commit") else "")


def documents_of(settings: Recipe, old: Run | None, tokenizer: Any) -> tuple[Documents, list[list[int]]]:
    """The texts, checked against what will be asked of them later, and those to steer by. Raises DataError."""
    facts, data = old.facts if old else {}, settings.data
    if is_own(data.source):  # the prompts need no answers
        data = replace(data, source=prompts_of(data.source), labels="all")
    data = replace(data, source=facts.get("data", data.source))
    documents = load_documents(data, tokenizer, seed=settings.train.seed)
    steering_texts: list[list[int]] = []
    if limit_of(settings.train.max_ppl) is not None:
        steering_texts, documents = halves(documents)
    for known, found in (("data_sha256", documents.sha256), ("heldout_sha256", documents.heldout_sha256)):
        if facts.get(known, found) != found:
            raise DataError(
                f"the texts of {documents.source} have changed since the run {old.folder if old else ''} began.",
                "the same command without --resume",
            )
    Sample.of(documents.heldout, settings, draws=1)  # eval will want it
    return documents, steering_texts


def check_resumed(run: Run, facts: dict[str, Any]) -> None:
    """Of a run that is taken up again: its base must be the same, a report of its former gates is laid aside."""
    before = run.facts
    if before.get("gates_sha256", facts["gates_sha256"]) != facts["gates_sha256"]:
        raise RunError(
            f"the gates of {facts['base']} have changed since the run {run.folder} began.",
            "the same command without --resume",
        )
    for what in ("device", "dtype"):
        if before.get(what, facts[what]) != facts[what]:
            note(f"Note: begun with {what} {before[what]}, now {facts[what]}: figures may differ in their last digits")
    if run.report.is_file():
        aside = run.report.with_name(f"report-step-{before.get('steps', 0)}.json")
        run.report.replace(aside)
        note(f"Note: the report of the gates so far is kept as {aside}")


def state_of(run: Run) -> State | None:
    """Where the run is taken up, said to the user."""
    found = newest(run.states)
    if found is None:
        note("No step was saved: training begins at its first step")
        return None
    state, threads = found
    note(f"Going on after step {state.step}")
    if threads != torch.get_num_threads():
        note(f"Note: begun with {threads} threads, now {torch.get_num_threads()}: sums may differ in their last digits")
    return state


def step_of(line: str) -> float:
    """The step of a line of metrics.jsonl; infinity for one that a kill cut off."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf

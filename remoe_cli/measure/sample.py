"""A sample of held-out text, and what one set of gates does on it: text teacher-forced, requests decoded."""

from typing import NamedTuple

import torch

from remoe_cli.console import progress
from remoe_cli.families import Gate, Heads
from remoe_cli.measure.decode_traces import decode
from remoe_cli.measure.requests import cut_requests, Requests
from remoe_cli.measure.text import measure_rows
from remoe_cli.recipe import Recipe
from remoe_cli.report.figures import Measured
from remoe_cli.report.metrics import TextRows
from remoe_cli.stream.passes import Layers


class Sample(NamedTuple):
    """Disjoint draws of evaluate.requests requests and evaluate.rows rows each, one after the other; a single draw may be
    smaller."""

    documents: list[list[int]]
    requests: Requests
    draws: int

    @classmethod
    def of(cls, documents: list[list[int]], recipe: Recipe, draws: int) -> "Sample":
        """At most `draws`; fewer when the texts run out. Raises DataError when no document is long enough for a request."""
        settings = recipe.evaluate
        steps = settings.new_tokens + 1  # the last token is never fed
        requests = cut_requests(documents, draws * settings.requests, settings.prompt_tokens, steps)
        rows = sum(map(len, documents)) // recipe.train.sequence
        whole = max(1, min(draws, len(requests.prompts_RP) // settings.requests, rows // settings.rows))
        kept = Requests(*(part[: whole * settings.requests] for part in requests))
        return cls(documents, kept, whole)

    def fewer(self, recipe: Recipe, draws: int) -> list[str]:
        """What it holds less of than was asked for."""
        found, asked = len(self.requests.prompts_RP), recipe.evaluate.requests
        return [
            *([f"{self.draws} of {draws} draws"] if self.draws < draws else []),
            *([f"{found} of {asked} requests"] if found < asked else []),
        ]


def measure(
    title: str,
    model: torch.nn.Module,
    gates: list[Gate],
    sample: Sample,
    recipe: Recipe,
    scores: bool = False,
    heads: Heads | None = None,
) -> Measured:
    """The model as it is, with whatever gates are in it. scores: the decode traces hold the routers' probabilities, and what
    the heads gave."""
    text = measure_heldout(title, model, gates, sample.documents, recipe, sample.draws)
    decoded = {}
    for kind, forced in (("forced", sample.requests.continuations_RS[:, :-1]), ("greedy", None)):
        with progress(f"{title}: {kind} decode", len(sample.requests.prompts_RP)) as bar:
            decoded[kind] = decode(
                model, gates, sample.requests.prompts_RP, recipe.evaluate.new_tokens, forced,
                probabilities=scores, heads=heads if scores else None, batch=min(32, recipe.evaluate.requests), on_batch=bar.update,
            )  # fmt: skip
    return Measured(text, decoded)


def measure_heldout(
    title: str,
    model: torch.nn.Module,
    gates: list[Gate],
    documents: list[list[int]],
    recipe: Recipe,
    draws: int = 1,
    layers: Layers | None = None,
) -> TextRows:
    """Teacher-forced, as the recipe says: evaluate.rows rows of train.sequence tokens a draw. layers: see `measure_rows`."""
    rows = draws * recipe.evaluate.rows
    with progress(f"{title}: text", rows) as bar:
        return measure_rows(
            model,
            gates,
            documents,
            recipe.train.sequence,
            rows,
            batch=recipe.train.micro_batch,
            on_batch=bar.update,
            layers=layers,
        )

"""remoe reroute: what cache-aware rerouting costs in perplexity and saves in loads, on held-out text."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from remoe_cli import console
from remoe_cli.apply import find_delta
from remoe_cli.cache import Replay, replay
from remoe_cli.cache.expert_cache import ADMISSIONS
from remoe_cli.cache.replay import prepare
from remoe_cli.cache.reroute import default_keep, default_strengths, METHODS, Rule
from remoe_cli.console import note, progress
from remoe_cli.decode import check_live
from remoe_cli.delta import put
from remoe_cli.environment import device_name, pick_device, versions
from remoe_cli.errors import command, DataError, instead, UsageError
from remoe_cli.evaluate import finite
from remoe_cli.families import family_of, find_gates, top_k_of
from remoe_cli.families.loader import compute_dtype, experts_on_disk, in_memory, load_resident
from remoe_cli.hub.resolve import fetch_config, resolve
from remoe_cli.measure.prompts import default_recipe, load_prompts
from remoe_cli.measure.rerouted import measure_rerouted, Rerouted
from remoe_cli.offload.store import one_expert_bytes
from remoe_cli.report import metrics
from remoe_cli.report.cells import BOOTSTRAP_SEED
from remoe_cli.report.figures import text_figures
from remoe_cli.report.renderers.grid import grid
from remoe_cli.report.rows import number
from remoe_cli.trace import check_texts
from remoe_cli.train.data import load_tokenizer

Again = Callable[..., str]  # the command as it was asked for, but for these options


class Asked(NamedTuple):
    """How to reroute. strengths: by default METHODS' own; keep: J, 0 to K, by default 2 or half of K where that is less."""

    method: str = "cache-prior"
    strengths: Sequence[float] | None = None
    keep: int | None = None
    policy: str = "lru"
    admission: str = "forced"


def reroute(
    model: str,
    capacity: int,
    asked: Asked = Asked(),  # noqa: B008  immutable
    *,
    delta: str | None = None,
    prompts: str | None = None,
    rows: int | None = None,
    tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """One row for the model as it is and one for each strength (docs/reroute.md). rows, tokens: of text, by default what
    the family's recipe says.

    Raises RemoeError for every mistake, most of them before anything is loaded.
    """

    def again(**changes: object) -> str:
        strength = None if asked.strengths is None else ",".join(f"{one:g}" for one in asked.strengths)
        own = {name: value for name in Asked._fields if (value := getattr(asked, name)) != Asked._field_defaults[name]}
        own.pop("strengths", None)
        given = {"cache": capacity, **own, "strength": strength, "delta": delta, "prompts": prompts, "rows": rows}
        given |= {"tokens": tokens, "device": device}
        return command("reroute", model, **{**given, **changes})

    if asked.method not in METHODS:
        said = f"--method is {', '.join(METHODS)}, not {asked.method!r}."
        raise UsageError(said, again(method=None, strength=None))
    if capacity < 1:
        raise UsageError(f"--cache is at least 1 slot a layer, not {capacity}.", again(cache=8))
    if asked.admission not in ADMISSIONS:
        raise UsageError(f"--admission is {' or '.join(ADMISSIONS)}, not {asked.admission!r}.", again(admission=None))
    with instead(again(policy=None)):
        check_live(asked.policy)
    with instead(again(device=None)):
        where = pick_device(device)
    check_texts(model, prompts, again)
    found = fetch_config(model)
    family = family_of(found.config, model)
    top_k = top_k_of(found.config)
    if asked.keep is not None and not 0 <= asked.keep <= top_k:
        reason = f"--keep is 0 to the {top_k} experts a token of this model, not {asked.keep}."
        raise UsageError(reason, again(keep=None))
    with instead(again(strength=None)):
        for strength in asked.strengths or ():
            Rule(asked.method, strength, 0)
    recipe = default_recipe(model, family.model_type)
    row_count, sequence = _size(rows, tokens, recipe.evaluate.rows, recipe.train.sequence, found.config, again)
    checkpoint = resolve(found)
    layers = experts_on_disk(checkpoint)
    n_experts = layers[0].n_experts
    with instead(again(strength=None)):
        rules = _rules(asked, top_k, n_experts)
    if capacity > n_experts:
        note(
            f"Note: --cache {capacity} is taken as {n_experts}: it holds all {n_experts} experts of a layer, so none leaves"
        )
        capacity = n_experts
    change = find_delta(delta) if delta is not None else None
    if change is not None and change.is_applied(checkpoint):
        change = None
    documents, source = load_prompts(prompts, recipe, load_tokenizer(checkpoint), again(prompts="demo"), delta)
    if change is not None and len(documents) > len(source.heldout):
        note("Note: the gates may have been trained on some of these texts; held-out ones say more")
    expert_bytes = one_expert_bytes(layers)
    dtype = compute_dtype(checkpoint, where, recipe.train.dtype)
    loaded = load_resident(checkpoint, dtype, where)
    if change is not None:
        put(loaded, in_memory(loaded, checkpoint, change.tensors))
    gates = find_gates(loaded)
    if seconds := prepare(asked.policy):
        note(f"Note: compiled the replay of {asked.policy} in {seconds:.1f} s, this once")
    stock: Rerouted | None = None
    shown = []
    for rule in rules:
        title = "as it is" if rule is None else f"{rule.method} {rule.strength:g}"
        with progress(title, row_count) as bar, instead(again(prompts="demo"), DataError):
            done = measure_rerouted(
                loaded, gates, documents, sequence, row_count, rule, capacity=capacity, policy=asked.policy,
                admission=asked.admission, batch=recipe.train.micro_batch, on_batch=bar.update,
            )  # fmt: skip
        stock = stock or done
        if rule is None and (found_rows := len(done.text.pairs_N)) < row_count:
            note(f"Note: the texts hold {found_rows} of {row_count} rows of {sequence} tokens")
            row_count = found_rows
        shown.append(_row(rule, done, stock, capacity, asked, expert_bytes))
    report = {
        "model": model, "commit": checkpoint.commit, "delta": delta, "method": asked.method,
        "keep": _keep(asked, gates[0].top_k), "capacity": capacity, "policy": asked.policy, "admission": asked.admission,
        "moe_layers": len(gates), "n_experts": gates[0].n_experts, "top_k": gates[0].top_k, "expert_bytes": expert_bytes,
        "data": source.source, "rows": len(stock.text.pairs_N) if stock else 0, "row_tokens": sequence,
        "requests": stock.trace.n_requests if stock else 0, "tokens": stock.trace.n_tokens if stock else 0,
        "device": where, "device_name": device_name(where), "dtype": str(dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(), "versions": versions(), "strengths": shown,
    }  # fmt: skip
    return finite(report)


def _keep(asked: Asked, top_k: int) -> int:
    return default_keep(top_k) if asked.keep is None else asked.keep


def _rules(asked: Asked, top_k: int, n_experts: int) -> list[Rule | None]:
    """None first: the model as it is."""
    strengths = default_strengths(asked.method, top_k, n_experts) if asked.strengths is None else asked.strengths
    rules = [Rule(asked.method, strength, _keep(asked, top_k)) for strength in dict.fromkeys(strengths)]
    for rule in rules:
        rule.check(top_k, n_experts)
    return [None, *rules]


def _size(
    rows: int | None, tokens: int | None, default_rows: int, sequence: int, config: dict, again: Again
) -> tuple[int, int]:
    """How many rows of how many tokens."""
    longest = config.get("max_position_embeddings")
    longest = longest if isinstance(longest, int) else 2**20
    rows = default_rows if rows is None else rows
    tokens = min(sequence, longest) if tokens is None else tokens
    if rows < 1:
        raise UsageError(f"--rows is at least 1, not {rows}.", again(rows=None))
    if not 2 <= tokens <= longest:
        reason = f"--tokens is 2 to {longest}, what the model was made for, not {tokens}."
        raise UsageError(reason, again(tokens=None))
    return rows, tokens


def _row(
    rule: Rule | None, done: Rerouted, stock: Rerouted, capacity: int, asked: Asked, expert_bytes: int
) -> dict[str, Any]:
    """The runner's own counts, and the simulator's of the trace that ran."""
    simulated, before = (replay(one.trace, asked.policy, capacity, admission=asked.admission) for one in (done, stock))
    counts = (simulated.hits, simulated.misses, simulated.evictions)
    text = text_figures(done.text, None if rule is None else stock.text)
    if len(done.text.pairs_N) < 2:  # one row says nothing of how rows differ
        text |= {key: None for key in text if key.endswith("_95")}
    many = done.trace.n_requests > 1
    hit_95 = metrics.bootstrap(simulated.request_hits, simulated.request_accesses, seed=BOOTSTRAP_SEED)
    return {
        "strength": None if rule is None else rule.strength,
        **text,
        "changed": done.changed / done.trace.experts.size,
        **done.counts._asdict(),
        "simulated": done.counts._replace(hits=counts[0], misses=counts[1], evictions=counts[2])._asdict(),
        "counts_match": done.counts == counts,
        "hit_ratio": simulated.hit_ratio,
        "hit_ratio_95": hit_95 if many else None,
        "misses_change": None if rule is None else simulated.misses / before.misses - 1,
        "misses_change_95": None if rule is None or not many else _misses_change(before, simulated),
        "mb_a_token": metrics.load_mb(simulated.misses, 0, expert_bytes, simulated.tokens),
    }


def _misses_change(before: Replay, after: Replay) -> metrics.Interval | None:
    return metrics.bootstrap_change(
        (before.request_misses, before.request_tokens), (after.request_misses, after.request_tokens), metrics.relative,
        seed=BOOTSTRAP_SEED,
    )  # fmt: skip


HEAD = (
    "strength",
    "perplexity",
    "change",
    "95 %",
    "EOR",
    "changed",
    "hit",
    "MB a token",
    "change",
    "misses",
    "simulated",
)
QUALITY = 6  # columns about what the model says; those about the cache follow


def summary(done: dict[str, Any], width: int | None = None) -> str:
    """The table for a person, in two blocks where `width` is too little for one; by default the terminal's, 120 without."""
    width = width or console.width()
    cells = [_cells(row) for row in done["strengths"]]
    lines = grid(HEAD, cells, width, align=str.rjust)
    if len(lines) > 1 + len(cells):
        about_cache = [(row[0], *row[QUALITY:]) for row in (HEAD, *cells)]
        lines = [
            *grid(HEAD[:QUALITY], [row[:QUALITY] for row in cells], width, align=str.rjust),
            "",
            *grid(about_cache[0], about_cache[1:], width, align=str.rjust),
        ]
    named = done["model"] + (f" with {done['delta']}" if done["delta"] else "")
    match = all(row["counts_match"] for row in done["strengths"])
    rows, requests = done["rows"], done["requests"]
    notes = (
        f"{named}: {done['method']} ({METHODS[done['method']].title}), top {done['keep']} kept; {done['moe_layers']} MoE "
        f"layers, top-{done['top_k']} of {done['n_experts']}, C = {done['capacity']}, {done['policy']}, {done['admission']}.",
        f"Teacher-forced: {done['tokens']:,} tokens of {done['data']} in {requests} document{'s' * (requests != 1)}, cold "
        f"cache each; {done['device_name']}, {done['dtype']}.",
        "95 %: bootstrap interval of the change of perplexity, paired over "
        + (f"the {rows} rows of text." if rows > 1 else "rows of text; one row gives none (n/a)."),
        "EOR: share of a token's experts that the token before used too. changed: share of the experts run that the router "
        "itself would not have chosen. hit: share of the experts run that were in the cache; each of the others is a miss and "
        "one load.",
        "simulated: misses of the trace that ran, replayed. Hits, misses and evictions "
        + ("are equal in every row." if match else "DIFFER: please report it."),
    )
    return "\n".join([*lines, "", *(textwrap.fill(one, width, break_on_hyphens=False) for one in notes)])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    stock = row["strength"] is None
    return (
        "as it is" if stock else f"{row['strength']:g}",
        number(row["perplexity"], 3),
        "" if stock else _percent(row["perplexity_change"], 2),
        _ends(row["perplexity_change_95"], stock),
        number(row["eor"], 3),
        f"{100 * row['changed']:.1f} %",
        number(row["hit_ratio"], 3),
        number(row["mb_a_token"], 3),
        "" if stock else _percent(row["misses_change"], 1),
        f"{row['misses']:,}",
        f"{row['simulated']['misses']:,}",
    )


def _percent(change: float | None, places: int) -> str:
    return "n/a" if change is None else f"{100 * change:+.{places}f} %"


def _ends(interval: Sequence[float] | None, stock: bool) -> str:
    if interval is None:
        return "" if stock else "n/a"
    return f"{100 * interval[0]:+.2f} to {100 * interval[1]:+.2f}"

"""remoe trace: record which experts a model uses on some texts, or import what another tool recorded; one trace file."""

import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from remoe_cli import __version__, atomic
from remoe_cli.console import note, progress
from remoe_cli.errors import command, FamilyError, instead, RunError, TraceError, UsageError
from remoe_cli.report import locality, metrics
from remoe_cli.routing import RoutingTrace, write
from remoe_cli.routing.imports import IMPORTS, OUT, read_foreign
from remoe_cli.routing.trace import FLOATS
from remoe_cli.sizes import show_size

TEXTS = "a file, a folder, a Hub data set, or demo"  # what --prompts takes
Again = Callable[..., str]  # the command as it was asked for, but for these options


class Asked(NamedTuple):
    """What to record. None: as the recipe of the model's family says. seed: 0 takes the texts in the order of `remoe eval`,
    another one in an order of its own."""

    greedy: bool = False
    requests: int | None = None
    prompt_tokens: int | None = None
    new_tokens: int | None = None
    probabilities: bool = False
    seed: int = 0
    guesses: bool = False
    hidden: bool = False


def record(
    model: str, out: Path, asked: Asked, *, delta: str | None, prompts: str | None, device: str | None
) -> dict[str, Any]:
    """Runs the model on the requests and writes the trace, prompts included; what is in it, as `facts`.

    Raises RemoeError for every mistake, most of them before anything is loaded; then no file is written.
    """

    def again(**changes: object) -> str:
        given = {"delta": delta, "prompts": prompts, **asked._asdict(), "device": device, "o": out}
        given["seed"] = asked.seed or None
        return command("trace", model, **{**given, **changes})

    _check(asked, again)
    _check_out(out, again)
    check_texts(model, prompts, again)
    note("Loading torch and transformers")
    from remoe_cli.apply import find_delta
    from remoe_cli.delta import heads_for, put
    from remoe_cli.environment import pick_device
    from remoe_cli.families import family_of, find_gates
    from remoe_cli.families.loader import compute_dtype, experts_on_disk, gate_disk_names, in_memory, load_resident
    from remoe_cli.hub.resolve import fetch_config, resolve
    from remoe_cli.measure.decode_traces import decode
    from remoe_cli.measure.prompts import default_recipe, load_prompts
    from remoe_cli.measure.requests import cut_prompts, cut_requests
    from remoe_cli.train.data import load_tokenizer

    with instead(again(device=None)):
        where = pick_device(device)
    found = fetch_config(model)
    recipe = default_recipe(model, family_of(found.config, model).model_type)
    settings = recipe.evaluate
    wanted = asked.requests or settings.requests
    prompt_tokens = asked.prompt_tokens or settings.prompt_tokens
    new_tokens = asked.new_tokens or settings.new_tokens
    _check_positions(model, found.config, prompt_tokens, new_tokens, again)
    change = find_delta(delta) if delta is not None else None
    checkpoint = resolve(found)
    applied = change is not None and change.is_applied(checkpoint)
    tokenizer = load_tokenizer(checkpoint)
    texts, source = load_prompts(prompts, recipe, tokenizer, again(prompts="demo"), delta)
    if change is not None and len(texts) > len(source.heldout):
        note("Note: the gates may have been trained on some of these texts; held-out ones say more")
    if asked.seed:
        Random(asked.seed).shuffle(texts)
    steps = new_tokens + 1  # as in eval, so that the requests are the same: the last token is never fed
    if asked.greedy:
        end = tokenizer.eos_token_id
        starts, forced = cut_prompts(texts, wanted, prompt_tokens, steps, end=end, other=again(prompts="demo")), None
    else:
        cut = cut_requests(
            texts, wanted, prompt_tokens, steps, other=again(prompts="demo"),
            shorter=lambda prompt, new: again(prompt_tokens=prompt, new_tokens=new),
        )  # fmt: skip
        starts, forced = list(cut.prompts_RP), cut.continuations_RS[:, :-1]
    if len(starts) < wanted:
        note(f"Note: the texts hold {len(starts)} of the {wanted} requests asked for")
    layers = experts_on_disk(checkpoint)
    tokens = sum(map(len, starts)) + len(starts) * new_tokens
    n_heads = len(change.heads) // len(layers) if change is not None else 0
    keep = asked.probabilities or n_heads > 0  # a policy that reads heads reads the router too
    scores = n_heads + keep
    scores += 2 * asked.guesses  # with the shared experts and without
    states = int(found.config.get("hidden_size", 0)) if asked.hidden else 0
    a_layer = 4 * layers[0].top_k + 2 * scores * layers[0].n_experts + 2 * states
    _check_room(out, tokens * len(layers) * a_layer, again)
    dtype = compute_dtype(checkpoint, where, recipe.train.dtype)
    loaded = load_resident(checkpoint, dtype, where)
    gates, heads = find_gates(loaded), None
    if change is not None:
        heads = heads_for(change, gate_disk_names(loaded, checkpoint), gates)
        if not applied:
            put(loaded, in_memory(loaded, checkpoint, change.tensors))
    provenance = {
        "model": checkpoint.id, "revision": checkpoint.commit, "delta": delta,
        "delta_recipe": change.recipe if change else None, "data": source.source, "data_sha256": source.sha256,
        "seed": asked.seed, "prompt_tokens": prompt_tokens, "new_tokens": new_tokens,
        "layers": [layer.layer for layer in layers], "expert_bytes": _expert_bytes(layers),
        "device": where, "dtype": str(dtype).removeprefix("torch."), "remoe": __version__,
    }  # fmt: skip
    begin = time.monotonic()
    with progress("greedy decode" if asked.greedy else "forced decode", tokens) as bar:

        def show(done: int) -> None:
            bar.update(done, f"  {done / max(time.monotonic() - begin, 1e-3):,.0f} tokens/s")

        decoded = decode(
            loaded, gates, starts, new_tokens, forced, prefill=True, probabilities=keep, guesses=asked.guesses,
            hidden=asked.hidden, heads=heads,
            provenance=provenance, on_tokens=show,
        )  # fmt: skip
    trace = decoded.trace
    if asked.greedy:
        trace = replace(trace, provenance={**trace.provenance, **_repetition(decoded.ids_RS.tolist())})
    return _written(trace, out, again)


def import_trace(file: Path, out: Path, *, format: str | None, n_experts: int | None) -> dict[str, Any]:
    """Writes a trace of another tool as one of remoe; what is in it, as `facts`. Raises TraceError, UsageError, RunError."""

    def again(**changes: object) -> str:
        return command("trace", "import", file, **{"format": format, "experts": n_experts, "o": out, **changes})

    if format is not None and format not in IMPORTS:
        raise UsageError(f"there is no format {format!r}; allowed: {', '.join(IMPORTS)}.", again(format=None))
    if n_experts is not None and n_experts < 1:
        raise UsageError(f"--experts is at least 1, not {n_experts}.", again(experts=None))
    _check_out(out, again)
    try:
        trace = read_foreign(file, format, n_experts)
    except TraceError as error:
        raise TraceError(error.message, error.hint.replace(OUT, shlex.join(["-o", str(out)]))) from None
    return _written(trace, out, again)


def facts(path: Path, trace: RoutingTrace, size: int) -> dict[str, Any]:
    """What a trace file of `size` bytes holds; eor: of its decode tokens, None where none has another before it."""
    decoded = trace.decode()
    overlap = locality.overlap(decoded)
    return {
        "trace": str(path), "bytes": size, "requests": trace.n_requests,
        "prefill_tokens": trace.n_tokens - decoded.n_tokens, "decode_tokens": decoded.n_tokens,
        "layers": trace.n_layers, "n_experts": trace.n_experts, "top_k": trace.top_k,
        "eor": metrics.ratio(float(overlap[0].sum()), float(overlap[1].sum())),
        "holds": ["ids", *(name for name in FLOATS if getattr(trace, name) is not None)],
        "provenance": trace.provenance,
    }  # fmt: skip


def summary(done: dict[str, Any]) -> str:
    """facts for a person, and the next command."""
    k, most = done["top_k"], done["n_experts"]
    sizes = ",".join(str(size) for size in sorted({min(size, most) for size in (k, k + 2, 2 * k)}))
    eor = "n/a" if done["eor"] is None else f"{done['eor']:.4f}"
    about = done["provenance"]
    lines = [
        f"{done['trace']}: {_several(done['requests'], 'request')}, {done['prefill_tokens']:,} prefill and {done['decode_tokens']:,} "
        f"decode tokens; {_several(done['layers'], 'MoE layer')}, top-{k} of {most}; {done['bytes']:,} bytes",
        f"Holds {', '.join(done['holds'])}; {about.get('kind')}, EOR {eor} (decode)",
    ]
    if about.get("distinct_4") is not None:
        lines.append(
            f"Greedy text: distinct-4 {about['distinct_4']:.3f}, repetition {about['repetition']:.3f} "
            "(a model that loops fakes reuse)"
        )
    if about.get("accounting"):
        rules = ", ".join(f"{key} {value}" for key, value in about["accounting"].items())
        lines.append(f"Its published figures were counted with: {rules}")
    if about.get("filled"):
        lines.append(
            f"MoE layer {', '.join(map(str, about['filled']))} served only the last token of the prompt; it stands in for the others"
        )
    lines.append(f"Next: {command('replay', done['trace'], cache=sizes, policy='all')}")
    return "\n".join(lines)


def _several(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"


def _written(trace: RoutingTrace, out: Path, again: Again) -> dict[str, Any]:
    done = facts(out, trace, 0)  # before the file is there: after it nothing is left to interrupt
    try:
        with instead(again(o=_elsewhere(out)), RunError):
            atomic.make_folder(out.parent)
            return {**done, "bytes": write(trace, out)}
    except KeyboardInterrupt:
        if out.exists():
            note(f"Note: {out} was whole before the interruption")
        raise


def check_texts(model: str, prompts: str | None, again: Again) -> None:
    """Raises UsageError for a model other than the demo, which has texts of its own, without texts."""
    if prompts is None and model != "demo":
        raise UsageError(f"name the texts to run {model} on: --prompts takes {TEXTS}.", again(prompts="demo"))


def _check(asked: Asked, again: Again) -> None:
    for option, value in (
        ("--requests", asked.requests),
        ("--prompt-tokens", asked.prompt_tokens),
        ("--new-tokens", asked.new_tokens),
    ):
        if value is not None and value < 1:
            raise UsageError(
                f"{option} is at least 1, not {value}.", again(**{option.strip("-").replace("-", "_"): None})
            )
    if asked.seed < 0:
        raise UsageError(f"--seed is at least 0, not {asked.seed}.", again(seed=None))


def _check_out(out: Path, again: Again) -> None:
    if out.is_dir():
        free = atomic.free_name(out / "t.trace")
        raise RunError(f"{out} is a folder; -o takes the name of a file.", again(o=free))
    if out.exists():
        raise RunError(f"{out} exists; nothing was written.", again(o=atomic.free_name(out)))
    with instead(again(o=_elsewhere(out))):
        atomic.check_writable(out.absolute().parent)


def _elsewhere(out: Path) -> Path:
    """Where it can be written instead: beside a file that was taken for a folder, else in the folder for scratch."""
    for part in out.parents:
        if part.is_file():
            return atomic.free_name(part.parent / out.name)
    return atomic.free_name(Path(tempfile.gettempdir()) / (out.name or "t.trace"))


def _check_room(out: Path, needed: int, again: Again) -> None:
    place = next(folder for folder in out.absolute().parents if folder.is_dir())
    free = shutil.disk_usage(place).free
    if needed > free:
        reason = f"the trace needs {show_size(needed)} and {place} has {show_size(free)} free."
        raise RunError(reason, again(o=_elsewhere(out)) + ", or fewer --requests")


def _check_positions(model: str, config: dict, prompt_tokens: int, new_tokens: int, again: Again) -> None:
    longest, tokens = config.get("max_position_embeddings"), prompt_tokens + new_tokens
    if isinstance(longest, int) and tokens > longest:
        half = max(1, longest // 2)
        raise UsageError(
            f"a request of {tokens} tokens is longer than the {longest} that {model} was made for.",
            again(prompt_tokens=half, new_tokens=max(1, longest - half)),
        )


def _expert_bytes(layers: Any) -> int | None:
    """None where experts differ in size: the replay then counts loads alone."""
    from remoe_cli.offload.store import one_expert_bytes

    try:
        return one_expert_bytes(layers)
    except FamilyError:
        return None


def _repetition(texts: list[list[int]]) -> dict[str, float | None]:
    """Means over the requests."""

    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    return {
        "distinct_4": mean([metrics.distinct_n(ids, 4) for ids in texts]),
        "repetition": mean([metrics.repetition_rate(ids) for ids in texts]),
    }

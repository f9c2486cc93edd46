"""remoe generate: one prompt goes on, shown as it comes; with --compare once by the base's gates and once by tuned ones."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from remoe_cli import memory
from remoe_cli import run as runs
from remoe_cli.console import data as print_data
from remoe_cli.console import note
from remoe_cli.decode import about, Change, ids_of, opened, Ready, ready, room_of, taken
from remoe_cli.delta import Delta
from remoe_cli.errors import command, UsageError
from remoe_cli.families.loader import compute_dtype, experts_on_disk
from remoe_cli.measure import decode_options
from remoe_cli.offload import budget, OffloadedDecoder
from remoe_cli.offload.past import Past
from remoe_cli.report.renderers.generate import compared, line, parting
from remoe_cli.sizes import show_size
from remoe_cli.talk.say import end_tokens, row_of, say
from remoe_cli.talk.screen import Screen

A = TypeVar("A", bound=decode_options.Asked)

_SHARE = 0.75  # of the free memory that a decoder takes where --cache does not say
_OF_DECODE = ("prompts", "requests", "context", "warm", "batch", "floor", "forced", "beside_base")
_WARM_UP = 2  # tokens of prompt, so that the first arm does not pay for first calls alone


@dataclass(frozen=True)
class Asked(decode_options.Asked):
    """The options of `remoe generate` as given. prompt: None where it came through a pipe."""

    cache: str | None = None
    tokens: str = "256"
    compare: bool = False

    @property
    def flexible(self) -> bool:
        return self.tokens == Asked.tokens

    def command(self, model: str, **changes: Any) -> str:
        given = self.given(**changes)
        prompt = given.pop("prompt", None)
        return command("generate", model, *([] if prompt is None else [prompt]), **given)


def generate(model: str, text: str, asked: Asked, *, shown: bool) -> dict[str, Any]:
    """What was said, with counts and times, as docs/generate.md lists it. text: the prompt. shown: whether the text goes to
    stdout as it comes, its figures to stderr, and a comparison to stdout after it. Raises RemoeError."""
    model, asked = of_run(model, asked)
    if asked.compare and asked.delta is None:
        raise UsageError(
            "--compare sets tuned gates beside the base's: it needs a --delta, or a run in place of the model.",
            asked.command(model, delta="DELTA"),
        )
    found = single(model, asked)
    if asked.compare and found.applied and found.change is not None:
        raise UsageError(
            f"{model} holds the tuned gates already, so --compare has no base to show.",
            asked.command(_base(found.change)),
        )
    ids, n_new = ids_of(found.tokenizer, text, asked, model), found.plan.tokens[0]
    room = room_of(found.checkpoint.config, found.plan, asked, model)
    if room is not None:
        longest = room + (1 if asked.flexible else n_new)
        if len(ids) > room:
            raise UsageError(
                f"{len(ids)} tokens of prompt and {longest - room} new ones are more than the {longest} that {model} was made for.",
                asked.command(model, tokens=longest - len(ids))
                if len(ids) < longest
                else asked.command(model, prompt="a shorter prompt"),
            )
        n_new = min(n_new, longest - len(ids))
    found, notes = with_slots(found, len(ids) + n_new)
    ends = end_tokens(found.checkpoint, found.tokenizer)
    with opened(model, asked, found, len(ids) + n_new) as (decoder, tuned):
        notes += taken(decoder, found.plan)
        for sentence in notes:
            note(f"Note: {sentence}")
        arms: dict[str, Change] = {"base": ({}, None)} if asked.compare or asked.delta is None else {}
        if asked.delta is not None:
            arms[asked.delta] = tuned
        if asked.compare:
            decoder.decode(ids[:_WARM_UP], 2)
        rows: list[dict[str, Any]] = []
        for name, gates in arms.items():
            decoder.apply_gates(*gates)
            configure(decoder, asked, found)
            if shown and asked.compare:
                print_data("[base]" if not rows else f"\n[tuned: {name}]")
            with Screen() if shown else nullcontext() as screen:
                said = say(decoder, found.tokenizer, Past(), ids, n_new, found.plan.sampling, ends=ends, screen=screen)
            rows.append({"gates": name, **row_of(decoder, said)})
            if shown and not asked.compare:
                note(line(rows[-1]))
        parts = parting(*rows) if asked.compare else None
        facts = about(decoder, found.plan, model, asked, [ids], "one prompt")
    facts["requested"] = {name: of for name, of in facts["requested"].items() if name not in _OF_DECODE}
    if shown and parts is not None:
        print_data(f"\n{compared(rows, parts)}")
    return {**facts, "notes": notes, "rows": rows, "parts": parts}


def of_run(model: str, asked: A) -> tuple[str, A]:
    """A run's folder, or its name, stands for its base with its delta. Raises RunError or UsageError."""
    if not any((folder / "run.json").is_file() for folder in (Path(model), runs.ROOT / model)):
        return model, asked
    if asked.delta is not None:
        raise UsageError(f"{model} is a run, which brings its own delta.", asked.command(model, delta=None))
    run = runs.find(model)
    return _base(Delta.load(run.delta)), replace(asked, delta=str(run.folder))


def _base(delta: Delta) -> str:
    return delta.base + (f"@{delta.commit}" if delta.commit else "")


def single(model: str, asked: decode_options.Asked) -> Ready:
    """As `ready`, but for lists of settings, which only `remoe decode` takes. Raises RemoeError."""
    for name in ("cache", "tokens", "throttle"):
        if "," in str(getattr(asked, name)):
            raise UsageError(
                f"--{name} is one value here: remoe decode takes several.", asked.command(model, **{name: None})
            )
    return ready(model, asked)


def with_slots(found: Ready, tokens: int) -> tuple[Ready, list[str]]:
    """Without --cache as many slots a layer as three quarters of the free memory hold, and a note that says so. tokens: of the
    longest request."""
    if found.plan.capacities:
        return found, []
    layers = experts_on_disk(found.checkpoint)
    room = memory.gpu(found.device) if found.device.startswith("cuda") else memory.available()
    dtype = compute_dtype(found.checkpoint, found.device)
    fit = budget.slots_within(found.checkpoint, layers, dtype, int(_SHARE * room.nbytes), tokens)
    capacity, n_experts = max(layers[0].top_k, fit), layers[0].n_experts
    told = (
        f"--cache {capacity} of {n_experts} experts a layer, by the {show_size(room.nbytes)} that {room.limit} has free"
    )
    return found._replace(plan=replace(found.plan, capacities=[capacity])), [told]


def configure(decoder: OffloadedDecoder, asked: decode_options.Asked, found: Ready) -> None:
    """The cache that was asked for, empty."""
    decoder.configure(
        found.plan.capacities[0], asked.policy, admission=asked.admission, reroute=found.rule,
        settings=replace(decoder.settings, throttle=found.plan.throttles[0]),
    )  # fmt: skip

"""The command `remoe chat`. Heavy imports stay inside, so that --help is quick."""

from typing import Annotated, Optional

import typer

from remoe_cli.cli.decode import Guess, Io, Pack, Ram, Readers, Reroute, Threads
from remoe_cli.cli.generate import Admission, Cache, Device, Policy, Seed, Temperature, Throttle, TopK, TopP, WithDelta

_TURNS = "Turns"


def chat(
    model: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(
            help="Hub id (with @revision), local folder, `demo`, or a run: its base with its delta.",
            show_default="the latest run",
        ),
    ] = None,
    delta: WithDelta = None,
    cache: Cache = None,
    system: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TEXT", help="What the conversation begins with.", rich_help_panel=_TURNS),
    ] = None,
    template: Annotated[
        str,
        typer.Option(
            help="auto: the tokenizer's chat template; raw: lines that begin with User: and Assistant:.",
            rich_help_panel=_TURNS,
        ),
    ] = "auto",
    context: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N",
            help="Tokens of the turns that an answer is given; the oldest are forgotten.",
            show_default="4096, or what the model was made for",
            rich_help_panel=_TURNS,
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="N", help="Tokens of an answer at most.", rich_help_panel=_TURNS)
    ] = "512",
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    seed: Seed = None,
    policy: Policy = "lru",
    admission: Admission = "forced",
    reroute: Reroute = None,
    ram: Ram = None,
    guess: Guess = 0,
    throttle: Throttle = None,
    readers: Readers = 2,
    io: Io = "direct",
    pack: Pack = None,
    threads: Threads = None,
    device: Device = None,
) -> None:
    """Talk with a model whose experts are left on disk; each line of stdin is a turn, answered as it is made.

    /quit or the end of input ends it, /reset forgets the turns, /stats tells hits, MB and tokens a second; Ctrl-C ends an answer.
    """
    from remoe_cli.console import note

    note("Loading torch and transformers")
    from remoe_cli import chat as verb

    asked = verb.Asked(
        cache, delta=delta, system=system, template=template, context=context, tokens=tokens, temperature=temperature,
        top_p=top_p, top_k=top_k, seed=seed, policy=policy, admission=admission, reroute=reroute, ram=ram, guess=guess,
        throttle=throttle, readers=readers, io=io, pack=pack, threads=threads, device=device,
    )  # fmt: skip
    verb.chat(model, asked)

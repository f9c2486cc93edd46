"""The command `remoe generate`, and the options that `remoe chat` shares with it. Heavy imports stay inside, so that --help is quick."""

import json
import sys
from typing import Annotated, Optional

import typer

from remoe_cli.cli.decode import Guess, Io, Pack, Ram, Readers, Reroute, Threads
from remoe_cli.errors import command, DataError, UsageError

_CHOICE, _CACHE, _FILES, _RUN = "Next token", "Expert cache", "Reading experts", "Measuring"

Model = Annotated[
    str, typer.Argument(help="Hub id (with @revision), local folder, `demo`, or a run: its base with its delta.")
]
WithDelta = Annotated[Optional[str], typer.Option(help="Delta folder, run folder or Hub id to decode with.")]  # noqa: UP045
Cache = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="C",
        help="Expert slots a layer; by default as many as three quarters of the free memory hold.",
        rich_help_panel=_CACHE,
    ),
]
Temperature = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(help="Draw tokens; 0 is greedy.", show_default="greedy", rich_help_panel=_CHOICE),
]
TopP = Annotated[
    Optional[float],  # noqa: UP045
    typer.Option(help="Draw from the likeliest that sum to this probability.", rich_help_panel=_CHOICE),
]
TopK = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Draw from so many of the likeliest.", rich_help_panel=_CHOICE),
]
Seed = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(help="Of the draws.", show_default="0", rich_help_panel=_CHOICE),
]
Policy = Annotated[str, typer.Option(help="Cache policy, NAME or NAME:PARAMETER.", rich_help_panel=_CACHE)]
Admission = Annotated[str, typer.Option(help="forced or bypass.", rich_help_panel=_CACHE)]
Throttle = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="RATE", help="Experts come in no faster, such as 1GB/s: emulates a slower link.", rich_help_panel=_FILES
    ),
]
Device = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(help="cpu, cuda or cuda:N; a GPU is used where there is one.", rich_help_panel=_RUN),
]


def generate(
    model: Model,
    prompt: Annotated[Optional[str], typer.Argument(help="Text to continue; by default what stdin says.")] = None,  # noqa: UP045
    delta: WithDelta = None,
    cache: Cache = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="By the base's gates, then by the delta's; says where the texts part.")
    ] = False,
    tokens: Annotated[
        str,
        typer.Option(
            metavar="N", help="New tokens at most; an end token ends the text before.", rich_help_panel=_CHOICE
        ),
    ] = "256",
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
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Machine-readable result on stdout, in place of the text.", rich_help_panel=_RUN),
    ] = False,
) -> None:
    """Continue a prompt with the experts left on disk; the text comes as it is made, with its cache hits, MB and tokens a second.

    The same text as that of remoe decode, up to the first end token.
    """
    text = _piped(model) if prompt is None else prompt
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note

    note("Loading torch and transformers")
    from remoe_cli import generate as verb

    asked = verb.Asked(
        cache, delta=delta, prompt=prompt, compare=compare, tokens=tokens, temperature=temperature, top_p=top_p, top_k=top_k,
        seed=seed, policy=policy, admission=admission, reroute=reroute, ram=ram, guess=guess, throttle=throttle, readers=readers,
        io=io, pack=pack, threads=threads, device=device,
    )  # fmt: skip
    done = verb.generate(model, text, asked, shown=not as_json)
    if as_json:
        print_data(json.dumps(done))


def _piped(model: str) -> str:
    hint = command("generate", model, "Once upon a time")
    text = b"" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.buffer.read()
    try:
        found = text.decode().removesuffix("\n")  # which echo adds
    except UnicodeDecodeError:
        raise DataError("the prompt on stdin is not UTF-8 text.", hint) from None
    if not found:
        raise UsageError("there is no prompt, neither on the command line nor through a pipe.", hint)
    return found

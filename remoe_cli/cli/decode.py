"""The command `remoe decode`, and the options that `remoe eval` shares with it. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Optional

import typer

_TEXTS, _CHOICE, _CACHE, _FILES, _RUN = "Prompts", "Next token", "Expert cache", "Reading experts", "Measuring"

Ram = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="SIZE", help="A second tier in memory, between files and slots, such as 8GB.", rich_help_panel=_FILES
    ),
]
InPlace = Annotated[
    bool,
    typer.Option(
        "--in-place",
        help="Compute a missing expert that --ram holds on the CPU, where measured times say that this is quicker than to bring it.",
        rich_help_panel=_FILES,
    ),
]
Guess = Annotated[
    int,
    typer.Option(
        metavar="N", help="Experts of the next layer read ahead of its router's choice, 0 to K.", rich_help_panel=_FILES
    ),
]
Readers = Annotated[int, typer.Option(metavar="N", help="Threads that read files.", rich_help_panel=_FILES)]
Io = Annotated[
    str,
    typer.Option(help="direct: past the page cache, where it can be; buffered: through it.", rich_help_panel=_FILES),
]
Pack = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option(metavar="DIR", help="Read experts from what `remoe pack` wrote.", rich_help_panel=_FILES),
]
Experts = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="FORM",
        help="What --pack must hold: stored, int8 or int4; anything else is refused.",
        rich_help_panel=_FILES,
    ),
]
Floor = Annotated[
    bool,
    typer.Option(
        "--floor", help="Load the same experts again, without computing: the floor of the time.", rich_help_panel=_RUN
    ),
]
Reroute = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option(
        metavar="METHOD:STRENGTH",
        help="Bend each new token's choice of experts towards those in the cache, such as cache-prior:0.1 (see remoe reroute). It changes what is said.",
        rich_help_panel=_CACHE,
    ),
]
Threads = Annotated[Optional[int], typer.Option(help="Compute threads.", rich_help_panel=_RUN)]  # noqa: UP045


def decode(
    model: Annotated[str, typer.Argument(help="Hub id (with @revision), local folder, or `demo`.")],
    cache: Annotated[
        str,
        typer.Option(
            metavar="C[,C...]",
            help="Expert slots a layer; at least the model's experts a token.",
            rich_help_panel=_CACHE,
        ),
    ],
    delta: Annotated[Optional[str], typer.Option(help="Delta folder, run folder or Hub id to decode with.")] = None,  # noqa: UP045
    prompt: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TEXT", help="Text to continue.", show_default="a line of code", rich_help_panel=_TEXTS),
    ] = None,
    prompts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="TEXTS", help="Many texts to continue: as --data of finetune, or `demo`.", rich_help_panel=_TEXTS
        ),
    ] = None,
    requests: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N", help="Texts of --prompts at most; by default as the family's recipe.", rich_help_panel=_TEXTS
        ),
    ] = None,
    context: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            metavar="N", help="Prompts of exactly N tokens: cut, or joined with the next ones.", rich_help_panel=_TEXTS
        ),
    ] = None,
    tokens: Annotated[
        str, typer.Option(metavar="N[,N...]", help="New tokens of each prompt.", rich_help_panel=_CHOICE)
    ] = "32",
    temperature: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Draw tokens; 0 is greedy.", show_default="greedy", rich_help_panel=_CHOICE),
    ] = None,
    top_p: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(help="Draw from the likeliest that sum to this probability.", rich_help_panel=_CHOICE),
    ] = None,
    top_k: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Draw from so many of the likeliest.", rich_help_panel=_CHOICE),
    ] = None,
    seed: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Of the draws.", show_default="0", rich_help_panel=_CHOICE),
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Cache policy, NAME or NAME:PARAMETER, and +PREFETCHER.", rich_help_panel=_CACHE)
    ] = "lru",
    admission: Annotated[str, typer.Option(help="forced or bypass.", rich_help_panel=_CACHE)] = "forced",
    warm: Annotated[
        str,
        typer.Option(
            help="cold: a fresh cache a prompt, which the prompt goes past; batch: the prompt goes through it, as one step a layer; "
            "carry: one cache for all prompts.",
            rich_help_panel=_CACHE,
        ),
    ] = "cold",
    sessions: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Prompts that take turns, token by token, in one cache; with --warm carry.",
            rich_help_panel=_CACHE,
        ),
    ] = 1,
    reroute: Reroute = None,
    batch: Annotated[
        str, typer.Option(metavar="B[,B...]", help="Prompts decoded together.", rich_help_panel=_TEXTS)
    ] = "1",
    ram: Ram = None,
    in_place: InPlace = False,
    guess: Guess = 0,
    throttle: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="RATE[,RATE...]",
            help="Experts come in no faster, such as 1GB/s: emulates a slower link.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    readers: Readers = 2,
    io: Io = "direct",
    pack: Pack = None,
    experts: Experts = None,
    heavy: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="SHARE",
            help="With a small --pack: of what a token misses, the heaviest experts that make up so much of its routing weight come as the checkpoint stores them.",
            rich_help_panel=_FILES,
        ),
    ] = None,
    predictor: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option(metavar="FILE", help="What `remoe predictor train` wrote, for +promoe.", rich_help_panel=_CACHE),
    ] = None,
    floor: Floor = False,
    forced: Annotated[
        bool,
        typer.Option(
            "--forced", help="Go on with the texts' own tokens, for their perplexity.", rich_help_panel=_CHOICE
        ),
    ] = False,
    beside_base: Annotated[
        bool,
        typer.Option(
            "--beside-base",
            help="Beside each row one of the base's gates and LRU with as many slots in all, staging included.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    threads: Threads = None,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda or cuda:N; a GPU is used where there is one.", rich_help_panel=_RUN),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable result on stdout.", rich_help_panel=_RUN)
    ] = False,
) -> None:
    """Continue prompts with the experts left on disk, C of them a layer in memory; counts and times every load.

    Several values of --cache, --batch, --tokens or --throttle, with commas between them, make one table of every combination.
    """
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note, width
    from remoe_cli.report.renderers.decode import summary, WIDTH

    note("Loading torch and transformers")
    from remoe_cli import decode as verb
    from remoe_cli.measure.decode_options import Asked

    asked = Asked(
        cache, delta=delta, prompt=prompt, prompts=prompts, requests=requests, context=context, tokens=tokens,
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, policy=policy, admission=admission, warm=warm, ram=ram,
        guess=guess, in_place=in_place, batch=batch, sessions=sessions, throttle=throttle, readers=readers, io=io, pack=pack, experts=experts, heavy=heavy, floor=floor, threads=threads,
        device=device, reroute=reroute, forced=forced, beside_base=beside_base,
        predictor=predictor,
    )  # fmt: skip
    done = verb.decode(model, asked)
    print_data(json.dumps(done) if as_json else summary(done, width(WIDTH)))

"""The command `remoe reroute`. Heavy imports stay inside, so that --help is quick."""

import json
from typing import Annotated, Optional

import typer

from remoe_cli.errors import command, UsageError


def reroute(
    model: Annotated[str, typer.Argument(help="Hub id (with @revision), local folder, or `demo`.")],
    cache: Annotated[int, typer.Option(help="Expert slots a layer.")],
    method: Annotated[str, typer.Option(help="cache-prior, max-rank or threshold.")] = "cache-prior",
    strength: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            metavar="X,Y,...",
            help="cache-prior: bonus of residents in mean logit ranges, from 0 (off); max-rank: M, from K (off) to E; threshold: "
            "probability, from 0 (off) to 1.",
        ),
    ] = None,
    keep: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(help="Heaviest experts that always stay, 0 to K; by default 2, or half of K where that is less."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Cache policy, NAME or NAME:PARAMETER.")] = "lru",
    admission: Annotated[str, typer.Option(help="forced or bypass.")] = "forced",
    delta: Annotated[Optional[str], typer.Option(help="Delta folder, run folder or Hub id, to reroute with.")] = None,  # noqa: UP045
    prompts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TEXTS", help="As --data of finetune; `demo` has its own held-out texts."),
    ] = None,
    rows: Annotated[Optional[int], typer.Option(help="Rows of text; by default as the family's recipe.")] = None,  # noqa: UP045
    tokens: Annotated[Optional[int], typer.Option(help="Tokens a row; by default as the family's recipe.")] = None,  # noqa: UP045
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda or cuda:N; a GPU is used where there is one."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")] = False,
) -> None:
    """Prefer experts that are in the cache: what that costs in perplexity, and what it saves in loads.

    Rerouting changes what the model says. The first row is the model as it is; all rows run the same held-out text.
    """
    from remoe_cli.console import data as print_data
    from remoe_cli.console import note

    given = {"cache": cache, "method": method, "keep": keep, "delta": delta, "prompts": prompts, "rows": rows}
    strengths = None if strength is None else _numbers(strength, command("reroute", model, **given, tokens=tokens))
    note("Loading torch and transformers")
    from remoe_cli import reroute as verb

    asked = verb.Asked(method, strengths, keep, policy, admission)
    done = verb.reroute(model, cache, asked, delta=delta, prompts=prompts, rows=rows, tokens=tokens, device=device)
    print_data(json.dumps(done) if as_json else verb.summary(done))


def _numbers(text: str, again: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--strength takes numbers such as .2 or 0,.1,.2, not {text!r}.", again) from None

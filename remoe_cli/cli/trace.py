"""The command `remoe trace`: records by itself, imports as a subcommand. Heavy imports stay inside, so that --help is quick."""

import json
from pathlib import Path
from typing import Annotated, Any, Optional

import typer
from typer.core import TyperGroup

RECORD = "record"


class RecordsByDefault(TyperGroup):
    """`remoe trace MODEL ...` is `remoe trace record MODEL ...`: a first word that names no subcommand is the model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in (*self.commands, *self.get_help_option_names(ctx)):
            args = [RECORD, *args]
        return super().parse_args(ctx, args)


trace = typer.Typer(
    cls=RecordsByDefault,
    no_args_is_help=True,
    subcommand_metavar="MODEL -o FILE [OPTIONS] | COMMAND",
    help="Record which experts a model uses, or import what another tool recorded.\n\n"
    "`remoe trace MODEL -o FILE` records; `remoe trace record --help` lists its options. `remoe replay FILE` then counts "
    "hits and loads for any cache size and policy, without the model.",
)

Out = Annotated[Path, typer.Option("--out", "-o", help="Trace file to write; must not exist yet.")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable result on stdout.")]


@trace.command(RECORD)
def record(
    model: Annotated[str, typer.Argument(help="Hub id (with @revision), local folder, or `demo`.")],
    out: Out,
    delta: Annotated[Optional[str], typer.Option(help="Delta folder, run folder or Hub id to record with.")] = None,  # noqa: UP045
    prompts: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="TEXTS", help="As --data of finetune; `demo` has its own held-out texts."),
    ] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy/--forced", help="The model's own choices, or the text as it goes on.")
    ] = False,
    requests: Annotated[Optional[int], typer.Option(help="At most; by default as the family's recipe.")] = None,  # noqa: UP045
    prompt_tokens: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            help="Of each request, prefilled; --greedy takes shorter texts too where long ones run out. As the recipe."
        ),
    ] = None,
    new_tokens: Annotated[Optional[int], typer.Option(help="Decode steps of each request, as the recipe.")] = None,  # noqa: UP045
    probabilities: Annotated[
        bool,
        typer.Option(
            "--probabilities",
            help="Record each router's probabilities too, which some policies need; with heads they always are.",
        ),
    ] = False,
    guesses: Annotated[
        bool, typer.Option("--guesses", help="Record what each next layer's gate says of a layer's hidden state.")
    ] = False,
    hidden: Annotated[
        bool, typer.Option("--hidden", help="Record hidden states, the inputs of the gates; large.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Another one draws other texts; 0 takes those of `remoe eval`.")] = 0,
    device: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="cpu, cuda or cuda:N; a GPU is used where there is one."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run MODEL on texts and write which experts each token used, with weights, in prefill and decode."""
    from remoe_cli import trace as verb
    from remoe_cli.console import data as print_data

    asked = verb.Asked(greedy, requests, prompt_tokens, new_tokens, probabilities, seed, guesses, hidden)
    done = verb.record(model, out, asked, delta=delta, prompts=prompts, device=device)
    print_data(json.dumps(done) if as_json else verb.summary(done))


@trace.command("import")
def import_trace(
    file: Annotated[Path, typer.Argument(help="Trace of another tool.")],
    out: Out,
    format: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(help="route-csv, esft-npz or cacheable-npz; told from the content where it can be."),
    ] = None,
    experts: Annotated[Optional[int], typer.Option(help="Routed experts a layer, where FILE does not say.")] = None,  # noqa: UP045
    as_json: AsJson = False,
) -> None:
    """Write the trace of another tool as one of remoe, with the rules that its published figures were counted by."""
    from remoe_cli import trace as verb
    from remoe_cli.console import data as print_data

    done = verb.import_trace(file, out, format=format, n_experts=experts)
    print_data(json.dumps(done) if as_json else verb.summary(done))

"""Every command: options -> one verb -> print. Heavy imports stay inside the commands, so that --help is quick."""

import typer

from remoe_cli.cli.apply import apply
from remoe_cli.cli.chat import chat
from remoe_cli.cli.decode import decode
from remoe_cli.cli.delta import diff, inspect, merge
from remoe_cli.cli.doctor import doctor
from remoe_cli.cli.eval import evaluate
from remoe_cli.cli.finetune import finetune
from remoe_cli.cli.generate import generate
from remoe_cli.cli.pack import pack
from remoe_cli.cli.plan import plan
from remoe_cli.cli.predictor import predictor
from remoe_cli.cli.push import pull, push
from remoe_cli.cli.replay import replay
from remoe_cli.cli.report import report
from remoe_cli.cli.reroute import reroute
from remoe_cli.cli.root import Root, root
from remoe_cli.cli.runs import recipes, runs
from remoe_cli.cli.sweep import sweep
from remoe_cli.cli.trace import trace

app = typer.Typer(
    cls=Root,
    help="Make Mixture-of-Experts models cacheable by tuning only their router gates; measure the gain on your own machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start: remoe finetune demo && remoe eval --cache 8,12 && remoe push --to out",
)

app.callback()(root)
app.command()(finetune)
app.command("eval")(evaluate)
app.command()(report)
app.command()(push)
app.command()(pull)
app.command()(apply)
app.command()(inspect)
app.command()(diff)
app.command()(merge)
app.command()(decode)
app.command()(generate)
app.command()(chat)
app.command()(pack)
app.command()(plan)
app.add_typer(trace, name="trace")
app.command()(doctor)
app.command()(replay)
app.add_typer(predictor, name="predictor")
app.command()(reroute)
app.command()(sweep)
app.command()(recipes)
app.add_typer(runs, name="runs")

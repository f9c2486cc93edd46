"""remoe predictor train: the networks of ProMoE, from a trace with hidden states."""

from pathlib import Path
from typing import Any, NamedTuple

from remoe_cli import atomic
from remoe_cli.cache.prefetch.base import MOST_AHEAD
from remoe_cli.cache.prefetch.predictor import FORMAT, Predictor
from remoe_cli.console import progress
from remoe_cli.errors import command, RunError, UsageError
from remoe_cli.report.replay_options import recording
from remoe_cli.routing import read
from remoe_cli.sizes import show_size

PARAMETERS = 2_000_000  # a layer, as ProMoE's


class Asked(NamedTuple):
    """width: of the networks, None: as wide as PARAMETERS allow, but not wider than four times the hidden states."""

    ahead: int = 1
    width: int | None = None
    epochs: int = 10
    seed: int = 0


def train(path: Path, out: Path, asked: Asked) -> dict[str, Any]:
    """Trains and writes a predictor; what it is, and what it foretells of held-out tokens.

    Raises TraceError, UsageError or RunError before anything is trained.
    """

    def again(**changes: object) -> str:
        given = {**asked._asdict(), "o": out, **changes}
        return command("predictor", "train", given.pop("trace", path), **given)

    for name, least, most in (
        ("ahead", 1, MOST_AHEAD),
        ("width", 1, 1 << 16),
        ("epochs", 1, 10_000),
        ("seed", 0, 1 << 31),
    ):
        value = getattr(asked, name)
        if value is not None and not least <= value <= most:
            raise UsageError(f"--{name} is {least} to {most}, not {value}.", again(**{name: None}))
    if out.exists():
        raise RunError(f"{out} exists; nothing was written.", again(o=atomic.free_name(out)))
    atomic.check_writable(out.absolute().parent)
    trace = read(path)
    if trace.hidden is None:
        fresh = atomic.free_name(path)
        first = recording(trace, fresh, "--hidden") or command("trace", "demo", hidden=True, o=fresh)
        raise UsageError(f"{path} has no hidden states to train on; remoe trace --hidden records them.", first)
    if asked.ahead > trace.n_layers:
        raise UsageError(
            f"--ahead {asked.ahead}: the trace has {trace.n_layers} MoE layers.", again(ahead=trace.n_layers)
        )
    if trace.n_tokens < 20:
        raise UsageError(
            f"{path} has {trace.n_tokens} tokens; 20 are the fewest to train on.", again(trace="longer.trace")
        )
    from remoe_cli.train.foretelling import train as fit

    hidden = trace.hidden.shape[-1]
    width = asked.width or max(1, min(4 * hidden, PARAMETERS // (hidden + trace.n_experts)))
    with progress("Training", asked.epochs) as bar:
        done = fit(
            trace, asked.ahead, width, asked.epochs, asked.seed,
            lambda epoch, loss: bar.update(epoch, f"  loss {loss:.4f}"),
        )  # fmt: skip
    about = trace.provenance
    facts = {
        "format": FORMAT, "model": about.get("model"), "revision": about.get("revision"), "delta": about.get("delta"),
        "data_sha256": about.get("data_sha256"), "trace_seed": about.get("seed"), "ahead": asked.ahead,
        "n_layers": trace.n_layers, "n_experts": trace.n_experts, "hidden": hidden, "width": width,
        "epochs": asked.epochs, "seed": asked.seed,
    }  # fmt: skip
    made = Predictor(facts, done.weights)
    made.write(out)
    return {
        "predictor": str(out), **facts, "parameters": made.held_bytes // 4, "bytes": made.held_bytes, "pairs": done.pairs,
        "held_out": done.held_out, "recall": done.recall, "recall_mean": sum(done.recall) / len(done.recall),
        "recall_of_token_before": done.before,
    }  # fmt: skip


def summary(done: dict[str, Any]) -> str:
    """For a person, and the next command."""
    word = f"lru,lru+promoe:6:{done['ahead']}"
    return "\n".join(
        [
            f"{done['predictor']}: {done['n_layers']} networks of width {done['width']}, {done['parameters']:,} parameters, "
            f"{show_size(done['bytes'])}; {done['ahead']} layers ahead",
            f"Recall of the K experts on {done['held_out']:,} held-out tokens: {done['recall_mean']:.3f} "
            f"(layers {min(done['recall']):.3f} to {max(done['recall']):.3f}); of the token before: {done['recall_of_token_before']:.3f}",
            f"Next: {command('replay', 'OTHER.trace', cache='8', policy=word, predictor=done['predictor'])}",
        ]
    )

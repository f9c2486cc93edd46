"""What `remoe generate` and `remoe chat` say of a text: the line below it while it comes, the line after it, and two arms compared."""

from collections.abc import Callable, Sequence
from io import StringIO
from typing import Any

from rich.console import Console
from rich.table import Table

from remoe_cli.report.metrics import ratio
from remoe_cli.report.rows import megabytes, number, percent

Row = dict[str, Any]
_WIDTH = 40
_GOES_ON = 48  # characters of each text that are shown from where they part


def so_far(tokens: int, seconds: float, hits: int, misses: int, nbytes: int) -> str:
    """While a text comes. seconds: since its first token; hits, misses and bytes: of the tokens after it."""
    parts = [f"{tokens} token{'s' * (tokens != 1)}"]
    if tokens > 1:
        parts.append(_rate(ratio(tokens - 1, seconds)))
        parts.append(f"hit {number(ratio(hits, hits + misses), 3)}")
        parts.append(f"{megabytes(nbytes / 1e6 / (tokens - 1))} MB a token")
    return ", ".join(parts)


def line(row: Row) -> str:
    """After it: what the text took."""
    adjusted = f" ({number(row['adjusted_hit_ratio'], 3)} adjusted)" if row["proactive"] else ""
    parts = [f"{row['tokens']} token{'s' * (row['tokens'] != 1)} ({row['ended']})"]
    if row["steps"]:
        parts += [_rate(row["tokens_a_second"]), f"hit {number(row['hit_ratio'], 3)}{adjusted}"]
        parts += [f"{megabytes(row['mb_a_token'])} MB a token"]
    parts += [f"first after {row['ttft_ms']['mean'] / 1e3:.2f} s", f"C = {row['capacity']}"]
    limit = f"; limited by {row['limit']['by']}" if row["limit"] else ""
    return ", ".join(parts) + limit


def parting(base: Row, tuned: Row) -> Row:
    """Where two texts part. tokens, characters: that they share from the beginning on; base, tuned: the first characters from
    there on, None where nothing is said any more; alike: whether they never part."""
    tokens = _shared(base["ids"], tuned["ids"])
    characters = _shared(base["text"], tuned["text"])
    rests = (row["text"][characters : characters + _GOES_ON] or None for row in (base, tuned))
    return {
        "alike": base["ids"] == tuned["ids"], "tokens": tokens, "characters": characters, **dict(zip(("base", "tuned"), rests)),
    }  # fmt: skip


def compared(rows: list[Row], parts: Row) -> str:
    """Both arms' figures side by side, 40 columns wide, and where their texts part."""
    view = Table(box=None, pad_edge=False, show_edge=False)
    view.add_column("", no_wrap=True)
    for arm in ("base", "tuned"):
        view.add_column(arm, justify="right", no_wrap=True)
    for name, show in _COMPARED.items():
        view.add_row(name, *map(show, rows))
    out = Console(file=StringIO(), width=_WIDTH, highlight=False, no_color=True)
    out.print(view)
    table = [one.rstrip() for one in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    return "\n".join([*table, "", _parted(parts)])


_COMPARED: dict[str, Callable[[Row], str]] = {
    "hit": lambda row: number(row["hit_ratio"], 3),
    "MB a token": lambda row: megabytes(row["mb_a_token"]),
    "tokens/s": lambda row: number(row["tokens_a_second"], 1),
    "waited": lambda row: percent(row["limit"]["wait_share"] if row["limit"] else None),
    "tokens": lambda row: str(row["tokens"]),
    "first after": lambda row: f"{row['ttft_ms']['mean'] / 1e3:.2f} s",
}


def _shared(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Places from the beginning on at which both hold the same."""
    return next((n for n, (one, other) in enumerate(zip(a, b)) if one != other), min(len(a), len(b)))


def _parted(parts: Row) -> str:
    if parts["alike"]:
        return f"Both say the same: {parts['tokens']} tokens."
    shared = f"The first {parts['tokens']} tokens are the same" if parts["tokens"] else "They part at the first token"
    goes_on = (f"{arm} {'ends' if parts[arm] is None else 'goes on ' + repr(parts[arm])}" for arm in ("base", "tuned"))
    return f"{shared}; {', '.join(goes_on)}."


def _rate(tokens_a_second: float | None) -> str:
    return "" if tokens_a_second is None else f"{tokens_a_second:.1f} tokens/s"


def session(rows: list[Row], n_experts: int, held: int, context: int) -> str:
    """All answers of a conversation so far. held: tokens in the attention cache."""
    if not rows:
        return "Nothing was said yet."
    names = ("tokens", "steps", "hits", "accesses", "bytes")
    tokens, steps, hits, accesses, nbytes = (sum(row[name] for row in rows) for name in names)
    seconds = sum(row["steps"] * row["tpot_ms"]["mean"] / 1e3 for row in rows if row["steps"])
    read, whole = (sum(row[name] for row in rows) for name in ("read_tokens", "prompt_tokens"))
    answers = f"{len(rows)} answer{'s' * (len(rows) != 1)}, {tokens} tokens"
    figures = [] if not steps else [
        _rate(ratio(steps, seconds)), f"hit {number(ratio(hits, accesses), 3)}", f"{megabytes(nbytes / 1e6 / steps)} MB a token",
    ]  # fmt: skip
    kept = f"C = {rows[-1]['capacity']} of {n_experts} experts a layer, {rows[-1]['policy']}"
    return (
        f"{', '.join([answers, *figures])}; {kept}\n"
        f"{read:,} of {whole:,} prompt tokens were read, the others were held; {held:,} of {context:,} are held now"
    )

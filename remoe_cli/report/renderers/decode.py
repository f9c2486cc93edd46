"""What `remoe decode` did, for a person: texts and figures of one setting, or one table of a sweep."""

from collections.abc import Callable
from io import StringIO
from typing import Any

from rich.console import Console

from remoe_cli.report.renderers.grid import grid
from remoe_cli.report.rows import megabytes, number, percent
from remoe_cli.sizes import show_size

Row = dict[str, Any]
WIDTH = 200  # in a file; a figure that is cut to fit is no figure


def summary(done: dict[str, Any], width: int = WIDTH) -> str:
    if len(done["rows"]) > 1:
        return sweep(done, width)
    row, conditions = done["rows"][0], done["conditions"]
    lines = [*_texts(row["texts"]), "", _cache(row, done["requested"]["cache"]), _loads(row, conditions)]
    if row.get("in_place") is not None:
        lines.append(_in_place(row["in_place"], row["misses"]))
    if others := _others(done):
        lines.append(f"with {', '.join(others)}")
    if row["perplexity"] is not None:
        lines.append(f"perplexity {number(row['perplexity'], 3)} of the texts' own tokens")
    if row["split_ms"] is not None:
        lines.append(f"a step: {_split(row)}; limited by {row['limit']['by']}")
    lines.append(
        f"ttft {_ms(row, 'ttft_ms', 'mean', 1)}, tpot {_ms(row, 'tpot_ms', 'mean', 2)}, itl p95 {_ms(row, 'itl_ms', 'p95', 2)} "
        f"on {machine(conditions)}"
    )
    if row["floor"] is not None:
        lines.append(_floor(row["floor"]))
    return "\n".join(lines)


def sweep(done: dict[str, Any], width: int = WIDTH) -> str:
    """One row a combination; settings that do not vary stand below."""
    rows, conditions = done["rows"], done["conditions"]
    varied = {name: show for name, show in {**_SETTINGS, **_RUNS}.items() if len({row[_key(name)] for row in rows}) > 1}
    left_out = {name for name, key in _WHERE.items() if not any(row.get(key) for row in rows)}
    figures = {name: show for name, show in _FIGURES.items() if name not in left_out}
    columns = {**varied, **figures, **({"of floor": _of_floor} if rows[0]["floor"] is not None else {})}
    out = Console(file=StringIO(), width=width, highlight=False)
    cells = [[show(row) for show in columns.values()] for row in rows]
    for line in grid([*columns], cells, width, left=len(varied), align=str.rjust):
        out.print(line, markup=False)
    fixed = [f"{name} {show(rows[0])}" for name, show in _SETTINGS.items() if name not in varied]
    prompts = conditions["prompt_tokens"]
    lengths = f"{min(prompts)}" if min(prompts) == max(prompts) else f"{min(prompts)} to {max(prompts)}"
    others = [words for words in _others(done) if "reroute" not in varied or not words.startswith("--reroute")]
    alike = [rows[0][name] for name in ("policy", "admission") if name not in varied]
    about = [", ".join(part) for part in (fixed, alike) if part]
    for line in (
        "",
        f"{'; '.join(about)}; {len(prompts)} prompt{'s' * (len(prompts) != 1)} of {lengths} tokens.",
        *([f"With {', '.join(others)}."] if others else []),
        f"On {machine(conditions)}; io {_io(conditions)}. Times in ms; itl is the time of one step, all rows of a batch.",
    ):
        out.print(line, markup=False)
    return out.file.getvalue()  # type: ignore[attr-defined]


def machine(conditions: dict[str, Any]) -> str:
    return f"{conditions['device_name']}, {conditions['dtype']}, {conditions['threads']} thread(s)"


def rate(bytes_a_second: float | None) -> str:
    return "n/a" if bytes_a_second is None else f"{show_size(bytes_a_second)}/s"


def _others(done: dict[str, Any]) -> list[str]:
    """Settings of all rows that are not as by default."""
    row, asked, sampling = done["rows"][0], done["requested"], done["conditions"]["sampling"]
    drawn = sampling and ", ".join(f"{name} {value}" for name, value in sampling.items())
    return [
        *([f"--ram {show_size(row['ram'])}"] if row["ram"] else []),
        *(["--in-place"] if row.get("in_place") is not None else []),
        *([f"--guess {row['guess']}"] if row["guess"] else []),
        *([f"--warm {row['warm']}"] if row["warm"] != "cold" else []),
        *([f"--readers {row['readers']}"] if row["readers"] != 2 else []),
        *([f"--reroute {row['reroute']}"] if row["reroute"] else []),
        *([f"--pack {asked['pack']}"] if asked["pack"] else []),
        *([f"tokens drawn ({drawn})"] if drawn else []),
    ]


def _texts(texts: list[str]) -> list[str]:
    return texts if len(texts) == 1 else [f"[{at}] {text}" for at, text in enumerate(texts, 1)]


def _cache(row: Row, asked: str) -> str:
    most = max(map(int, asked.split(",")))
    slots = f"C = {row['capacity']}" + (f" (all there are; {most} asked for)" if most > row["capacity"] else "")
    together = f", {row['batch']} together" if row["batch"] > 1 else ""
    if its := row.get("sessions"):
        hits = [one["hit_ratio"] for one in its if one["hit_ratio"] is not None]
        together = f", {len(its)} sessions in turn" + (f" (hit {min(hits):.3f} to {max(hits):.3f})" if hits else "")
    hit, ahead = number(row["hit_ratio"], 3), f", {row['rerouted']:,} rerouted" if row["rerouted"] else ""
    if row.get("light"):
        ahead += f", {row['light']:,} of them in fewer bits"
    if row["proactive"]:
        hit += f" ({number(row['adjusted_hit_ratio'], 3)} adjusted)"
        ahead = f", {row['proactive']:,} loaded ahead{ahead}"
    return (
        f"{slots}, {row['policy']}, {row['admission']}{together}: hit {hit}, {row['misses']:,} misses{ahead}, "
        f"{megabytes(row['mb_a_token'])} MB a token"
    )


def _loads(row: Row, conditions: dict[str, Any]) -> str:
    asked, read = show_size(row["bytes"]), show_size(row["read_bytes"])
    at = "" if row["ram_loads"] else f" at {rate(row['bandwidth'])}"
    parts = [f"{row['reads']:,} loads, {asked}; {read} read{at}"]
    if row["ram_loads"]:
        parts.append(f"{row['ram_loads']:,} loads from RAM")
    if row["guess"]:
        parts.append(f"{row['guesses']:,} guesses, {row['guessed']:,} of them needed")
    if row["throttle"]:
        parts.append(f"throttled to {rate(row['throttle'])}")
    return f"{', '.join(parts)} (io {_io(conditions)})"


def _in_place(its: dict[str, Any], misses: int) -> str:
    if not its["computed"]:
        return f"in place: none of {misses:,} misses; {its['in_ram']:,} lay in RAM, and bringing these is quicker"
    won, verb = its["won_ms"], "won" if its["won_ms"] >= 0 else "lost"
    return (
        f"in place: {its['computed']:,} of {misses:,} misses ({its['in_ram']:,} lay in RAM), {its['spared']:,} of them never brought; "
        f"{its['ms']:.1f} ms in all, {abs(won):.1f} ms {verb} by measured costs"
    )


def _io(conditions: dict[str, Any]) -> str:
    return conditions["io"] + (f": {conditions['io_reason']}" if conditions["io_reason"] else "")


def _split(row: Row) -> str:
    split = row["split_ms"]
    return f"{sum(split.values()):.2f} ms = " + " + ".join(f"{name} {ms:.2f}" for name, ms in split.items())


def _floor(floor: dict[str, Any]) -> str:
    alone = "n/a" if floor["step_ms"] is None else f"{floor['step_ms']['mean']:.2f} ms"
    return f"floor: {alone} a step for the loads alone, at {rate(floor['bandwidth'])}; they fill {percent(floor['share'])} of a step"


def _ms(row: Row, name: str, of: str, places: int) -> str:
    return "n/a" if row[name] is None else f"{row[name][of]:.{places}f} ms"


def _time(name: str, of: str, places: int = 2) -> Callable[[Row], str]:
    return lambda row: number(row[name][of] if row[name] else None, places)


def _of_floor(row: Row) -> str:
    return percent(row["floor"]["share"])


def _key(name: str) -> str:
    return _KEYS.get(name, name)


_KEYS = {"throttle": "throttle", "batch": "batch", "tokens": "new_tokens", "C": "capacity"}
_SETTINGS: dict[str, Callable[[Row], str]] = {
    "throttle": lambda row: "none" if row["throttle"] is None else rate(row["throttle"]),
    "batch": lambda row: str(row["batch"]),
    "tokens": lambda row: str(row["new_tokens"]),
    "C": lambda row: str(row["capacity"]),
}


def _word(name: str) -> Callable[[Row], str]:
    return lambda row: str(row[name] or "")


# what else may vary, where a row stands beside another
_RUNS = {name: _word(name) for name in ("gates", "policy", "admission", "reroute")}
# columns that are shown where some row has something under this key
_WHERE = {
    "adjusted": "proactive", "D": "proactive", "P": "proactive", "rerouted": "rerouted", "perplexity": "perplexity",
    "of base": "bytes_of_base", "change": "perplexity_change",
}  # fmt: skip
_FIGURES: dict[str, Callable[[Row], str]] = {
    "MB a token": lambda row: megabytes(row["mb_a_token"]),
    "of base": lambda row: percent(row.get("bytes_of_base", 1)),
    "perplexity": lambda row: number(row["perplexity"], 3),
    "change": lambda row: f"{100 * row['perplexity_change']:+.2f} %" if "perplexity_change" in row else "",
    "rerouted": lambda row: f"{row['rerouted']:,}",
    "hit": lambda row: percent(row["hit_ratio"]),
    "adjusted": lambda row: percent(row["adjusted_hit_ratio"]),
    "D": lambda row: f"{row['misses'] - row['guessed']:,}",
    "P": lambda row: f"{row['proactive'] + row['guesses']:,}",
    "ttft": _time("ttft_ms", "p50", 1),
    "tpot": _time("tpot_ms", "p50"),
    "itl p50": _time("itl_ms", "p50"),
    "p95": _time("itl_ms", "p95"),
    "p99": _time("itl_ms", "p99"),
    "wait": lambda row: percent(row["limit"]["wait_share"] if row["limit"] else None),
    "limit": lambda row: row["limit"]["by"] if row["limit"] else "n/a",
}

"""What `remoe sweep` found, for a person: the arms with their concentration, then every cell, best of each cache size marked."""

from collections.abc import Callable, Sequence
from io import StringIO
from itertools import chain
from typing import Any

from rich.console import Console

from remoe_cli.report.renderers.grid import grid
from remoe_cli.report.rows import megabytes, number, percent

WIDTH = 200  # in a file; a figure that is cut to fit is no figure
_MOST = 40  # rows
Row = dict[str, Any]


def summary(done: dict[str, Any], width: int = WIDTH) -> str:
    out = Console(file=StringIO(), width=width, highlight=False)
    tables = [_table(_ARMS, done["arms"], width), [""], _table(_cell_columns(done), _shown(done["cells"]), width)]
    for line in [*chain(*tables), "", *_lines(done)]:
        out.print(line, markup=False)
    return out.file.getvalue()  # type: ignore[attr-defined]


def _shown(cells: Sequence[Row]) -> list[Row]:
    """By cache size; of very many those that matter: the frontier, the best, and each arm with plain LRU."""
    order = sorted(cells, key=lambda cell: cell["capacity"])
    if len(order) <= _MOST:
        return order
    return [cell for cell in order if cell["best"] or cell["frontier"] or _is_plain(cell)]


def _is_plain(cell: Row) -> bool:
    return (cell["policy"], cell["admission"], cell["bonus"]) == ("lru", "forced", 0)


def _table(columns: dict[str, Callable[[Row], str]], rows: Sequence[Row], width: int) -> list[str]:
    names = [*columns]
    left = names.index("perplexity")  # what a row is comes before its figures
    return grid(names, [[show(row) for show in columns.values()] for row in rows], width, left)


def _cell_columns(done: dict[str, Any]) -> dict[str, Callable[[Row], str]]:
    """Settings that do not vary are left out."""
    cells = done["cells"]
    varied = {key for key in ("capacity", "policy", "admission", "bonus") if len({cell[key] for cell in cells}) > 1}
    settings: dict[str, tuple[str, Callable[[Row], str]]] = {
        "capacity": ("C", lambda row: str(row["capacity"])),
        "policy": ("policy", lambda row: row["policy"]),
        "admission": ("admission", lambda row: row["admission"]),
        "bonus": ("bonus", lambda row: f"{row['bonus']:g}"),
    }
    proactive = any(cell["proactive"] for cell in cells)
    return {
        "": lambda row: row["arm"],
        **{title: show for key, (title, show) in settings.items() if key in varied},
        "perplexity": lambda row: _change(row["perplexity_change"], 2),
        "hit": lambda row: number(row["hit_ratio"], 3),
        **({"AdjHit": lambda row: number(row["adjusted_hit_ratio"], 3)} if proactive else {}),
        "loads": lambda row: number(row["loads_a_token"], 2),
        "MB a token": lambda row: megabytes(row["mb_a_token"]),
        "against base + LRU": lambda row: _change(row["load_change"], 1),
        " ": _mark,
    }


_ARMS: dict[str, Callable[[Row], str]] = {
    "arm": lambda row: row["name"],
    "perplexity": lambda row: number(row["perplexity"], 3),
    "change": lambda row: "" if row["name"] == "base" else _change(row["perplexity_change"], 2),
    "95 %": lambda row: _ends(row["perplexity_change_95"]),
    "EOR": lambda row: number(row["eor"], 3),
    "effective experts": lambda row: number(row["concentration"]["effective_experts"], 1),
    "top-8 mass": lambda row: percent(row["concentration"]["top_8_mass"]),
    "max frequency": lambda row: percent(row["concentration"]["max_frequency"]),
    "entropy": lambda row: number(row["concentration"]["entropy"], 3),
    "2 / 4 / 8 ranks": lambda row: " / ".join(number(one, 2) for one in row["parallel_load"].values()),
}


def _mark(row: Row) -> str:
    return " ".join(
        word
        for word, holds in (("best", row["best"]), ("frontier", row["frontier"]), ("over", row["within"] is False))
        if holds
    )


def _lines(done: dict[str, Any]) -> list[str]:
    limit, conditions = done["limit"], done["conditions"]
    allowed = "" if limit is None else f" at most {_change(limit, 2)} perplexity, "
    fixed = [
        f"{title} {value}"
        for key, title in (("capacity", "C ="), ("policy", "policy"), ("admission", "admission"), ("bonus", "bonus"))
        if len({str(cell[key]) for cell in done["cells"]}) == 1
        for value in {f"{cell[key]:g}" if key == "bonus" else str(cell[key]) for cell in done["cells"]}
    ]
    hidden = len(done["cells"]) - len(_shown(done["cells"]))
    return [
        *([f"{hidden} more cells are in {done['folder']}/sweep.json."] if hidden else []),
        f"best: least MB a token of its C{',' if allowed else ''}{allowed.rstrip(', ')}; frontier: nothing of its C costs less and loads "
        "less; over: beyond the limit.",
        *([f"{', '.join(fixed)}."] if fixed else []),
        f"Teacher-forced: {conditions['tokens']:,} held-out tokens of {conditions['data']} in {conditions['requests']} documents, cold "
        f"cache each, equal memory; {conditions['device_name']}, {conditions['dtype']}.",
        "Concentration: mean over MoE layers; ranks: load of the busiest over the mean rank.",
        *(f"Note: {one}" for one in done["notes"]),
    ]


def _change(value: float | None, places: int) -> str:
    return "n/a" if value is None else f"{100 * value:+.{places}f} %"


def _ends(interval: Sequence[float] | None) -> str:
    return "" if interval is None else f"{100 * interval[0]:+.2f} to {100 * interval[1]:+.2f}"

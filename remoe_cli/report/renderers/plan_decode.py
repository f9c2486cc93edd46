"""What `remoe plan --for decode` found, for a person: one table of cache sizes, and what its figures rest on."""

from typing import Any

from remoe_cli.report.known_misses import ANY
from remoe_cli.report.renderers.grid import grid
from remoe_cli.sizes import show_size


def summary(found: dict[str, Any], width: int = 120) -> str:
    """With the next command. width: columns for the table."""
    pinned = found["model"].partition("@")[0] + (f"@{found['commit'][:8]}" if found["commit"] else "")
    lines = [
        f"{pinned}: {found['moe_layers']} MoE layers of {found['n_experts']} experts, {found['top_k']} a token",
        f"An expert {show_size(found['expert_bytes'])}, all {show_size(found['experts_bytes'])}; "
        f"outside the experts {show_size(found['outside_bytes'])}; computed in {found['dtype']}",
        "",
        *_table(found, width),
        "",
        *_told(found),
        *_gains(found),
        *_deltas(found),
    ]
    return "\n".join([*lines, *([f"Next: {found['next']}"] if found["next"] else [])])


def _table(found: dict[str, Any], width: int) -> list[str]:
    heads = ["C", "memory", "hit", "MB a token", "tpot ms", "tokens/s", "most in"]
    rows = []
    for row in found["rows"]:
        fast, slow = row["tpot_ms"]
        rows.append([
            str(row["capacity"]),
            show_size(row["memory"]),
            _range(*(f"{hit:.2f}" for hit in reversed(row["hit"]))),
            _range(*(_figures(size) for size in row["mb_a_token"])),
            _range(_figures(fast), _figures(slow)),
            _range(_figures(1e3 / slow), _figures(1e3 / fast)),
            ", ".join(_fits(room) for room in found["memory"] if room["capacity"] == row["capacity"]),
        ])  # fmt: skip
    return grid(heads, rows, width, align=str.rjust)


def _fits(room: dict[str, Any]) -> str:
    return show_size(room["bytes"]) + ("" if room["asked"] else " (free)")


def _range(first: str, last: str) -> str:
    return first if first == last else f"{first}-{last}"


def _rates(stretches: list[float]) -> str:
    return _range(*(f"{stretches[end] / 1e9:.2f}" for end in (0, -1))) + " GB/s"


def _figures(value: float) -> str:
    """Two significant figures, three from 100 on: no more is known."""
    return f"{float(f'{value:.3g}'):,.0f}" if value >= 100 else f"{value:.2g}"


def _told(found: dict[str, Any]) -> list[str]:
    """What the figures rest on."""
    measured, near = found["measured"], found["known"]
    short = [show_size(room["bytes"]) for room in found["memory"] if room["capacity"] is None]
    lengths = sorted(row["request_tokens"] for row in near["rows"])
    layer = _range(*(f"{1e3 * measured['layer_s'][end]:.2g}" for end in (-1, 0)))
    link = f", memory to device {show_size(measured['link'])}/s" if measured["link"] else ""
    models = dict.fromkeys(row["model"] for row in near["rows"])
    lines = [
        "C: experts kept a layer (--cache). Ranges: of the traces' hits and this machine's rates, together",
        *([f"Too little for the experts of one token: {', '.join(short)}"] if short else []),
        f"On {found['device']}, {show_size(found['free'])} free; requests of up to {found['tokens']:,} tokens",
        f"Measured here: disk {_rates(measured['disk'])} ({measured['io']}){link},",
        f"  weights {_rates(measured['weights'])} for one token, {layer} ms a layer beside them",
        f"Hits from traces of {near['of']}: {', '.join(models)}",
        *(f"  {text}" for text in dict.fromkeys(f"{row['text']} ({row['source']})" for row in near["rows"])),
        "Assumed: routing as local as there, LRU from a cold cache a request (of "
        f"{_range(*(f'{lengths[i]:,}' for i in (0, -1)))} tokens there);",
        "  the disk stays as fast; only the routed experts' arithmetic can hide loads",
    ]
    if near["of"] == ANY:
        lines.append("  No trace of this family is known, so the range is that of all: record one with remoe trace")
    if any(room["bytes"] > found["free"] for room in found["memory"]):
        lines.append(f"Here only {show_size(found['free'])} are free, less than was asked about")
    if found["disk"]["needed"]:
        needed, free = (show_size(found["disk"][key]) for key in ("needed", "free"))
        lines.append(f"To be downloaded to {found['disk']['folder']}: {needed} ({free} free)")
    if found["absent"]:
        lines.append(f"From config.json alone ({found['absent']}): files are taken to hold what it names")
    return lines


def _gains(found: dict[str, Any]) -> list[str]:
    lines = []
    for gain in found["known"]["gains"]:
        least, most = sorted(-change for change in gain["misses"].values())[:: len(gain["misses"]) - 1]
        sizes = _range(*(list(gain["misses"])[i] for i in (0, -1)))
        lines.append(
            f"Tuned gates had {_range(f'{100 * least:.0f}', f'{100 * most:.0f}')} % fewer misses at C = {sizes}: {gain['model']} ({gain['source']})"
        )
    return lines


def _deltas(found: dict[str, Any]) -> list[str]:
    deltas = found["deltas"]["found"]
    if deltas is None:
        return [f"Deltas on the Hub: not asked ({found['deltas']['why']})"]
    if not deltas:
        return ["Deltas on the Hub: none is known; remoe finetune makes one"]
    return ["Deltas on the Hub:", *(f"  {_delta(one)}" for one in deltas)]


def _delta(one: dict[str, Any]) -> str:
    report = one["report"]
    parts = [
        *(["of another revision"] if one["same_commit"] is False else []),
        *([f"misses {100 * report['misses_change']:+.1f} %" + (f" at C = {report['cache']}" if "cache" in report else "")]
          if "misses_change" in report else []),
        *([f"perplexity {100 * report['perplexity_change']:+.2f} %"] if "perplexity_change" in report else []),
    ]  # fmt: skip
    return f"{one['id']}: {', '.join(parts) or 'it says nothing of its figures'}"

"""What `remoe plan --for finetune` found, for a person: one table of the modes, and what its figures rest on."""

from typing import Any

from remoe_cli.report.renderers.grid import grid
from remoe_cli.sizes import show_size


def summary(found: dict[str, Any], width: int = 120) -> str:
    """With the next command. width: columns for the table."""
    pinned = found["model"].partition("@")[0] + (f"@{found['commit'][:8]}" if found["commit"] else "")
    lines = [
        f"{pinned}: {show_size(found['weights'])} in {found['dtype']}, {found['layers']} layers of up to {show_size(found['largest_layer'])}; "
        f"{found['gate_parameters']:,} gate parameters",
        f"Recipe {found['recipe']}, scope {found['scope']}: {found['steps']:,} steps of {found['tokens_a_step']:,} tokens, "
        f"rows of {found['sequence']:,}, {found['micro_batch']} at a time",
        "",
        *_table(found, width),
        "",
        *(
            f"{_title(mode)}: {', '.join(f'{name} {show_size(size)}' for name, size in {**mode['on_device'], **mode['in_host']}.items())}"
            for mode in found["modes"]
            if not mode["why"]
        ),
        *(f"{_title(mode)}: {mode['why']}" for mode in found["modes"] if mode["why"]),
        "",
        *_told(found),
    ]
    return "\n".join([*lines, *([f"Next: {found['next']}"] if found["next"] else [])])


def _title(mode: dict[str, Any]) -> str:
    return f"{mode['mode']} on {mode['devices']}" if "devices" in mode else mode["mode"]


def _table(found: dict[str, Any], width: int) -> list[str]:
    apart = found["host_free"] is not None
    head = [
        "",
        "device memory" if apart else "memory",
        "host memory",
        "read a step",
        "a step, at least",
        f"{found['steps']:,} steps",
        "fits",
    ]
    rows: list[list[str]] = []
    for mode in found["modes"]:
        if mode["why"]:
            rows.append([_title(mode), "", "", "", "", "", "no"])
            continue
        seconds = mode["seconds_a_step"]
        slowest = max(seconds, key=lambda what: seconds[what]) if seconds else ""
        rows.append([
            _title(mode),
            show_size(mode["device"]),
            show_size(mode["host"]) if apart else "",
            show_size(mode["read_a_step"]) if mode["read_a_step"] else "",
            f"{seconds[slowest]:.3g} s ({slowest})" if seconds else "?",
            _duration(3600 * mode["hours"]) if seconds else "?",
            _fit(mode),
        ])  # fmt: skip
    columns = [i for i in range(len(head)) if not i or any(row[i] for row in rows)]
    return grid([head[i] for i in columns], [[row[i] for i in columns] for row in rows], width)


def _fit(mode: dict[str, Any]) -> str:
    if mode["fits"]:
        return "yes"
    return f"with {' '.join(mode['with'])}" if mode["with"] else "no"


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _told(found: dict[str, Any]) -> list[str]:
    """What the figures rest on."""
    measured, host = found["measured"], found["host_free"]
    free = f"{show_size(found['device_free'])} of memory" if host is None else (
        f"{show_size(found['device_free'])} on the device, {show_size(host)} of host memory"
    )  # fmt: skip
    rates_told = [f"disk {show_size(measured['disk'])}/s ({measured['io']})"]
    rates_told += [f"memory to device {show_size(measured['link'])}/s"] if measured["link"] else []
    rates_told += [f"{measured['flops'] / 1e9:,.0f} GFLOP/s in the experts' products"] if measured["flops"] else []
    assumed = ["reads, copies and arithmetic overlap", "all arithmetic runs at one rate"]
    if measured["flops"] is None:
        assumed[1:] = [f"{show_size(found['link_assumed'])}/s to the device", "arithmetic takes no time"]
    lines = [
        f"Planned for {found['device']}: {free}",
        f"Measured here: {', '.join(rates_told)}",
        f"Assumed: {'; '.join(assumed)}. So times are the least; measuring before and after comes on top.",
    ]
    if found["disk"]["needed"]:
        lines.append(
            f"To be downloaded to {found['disk']['folder']}: {show_size(found['disk']['needed'])} ({show_size(found['disk']['free'])} free)"
        )
    if found["absent"]:
        lines.append(f"From config.json alone ({found['absent']}): files are taken to hold what it names")
    return lines

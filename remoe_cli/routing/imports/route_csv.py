"""Route CSV (route_trace v1) of BigMoeOnEdge: one row for each expert a token used, plain or gzip.

Shape letters: L MoE layers, T tokens, K experts a token.
"""

import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from remoe_cli.errors import TraceError
from remoe_cli.routing.imports.refuse import again, bad, check_experts
from remoe_cli.routing.trace import RoutingTrace

COLUMNS = "turn,phase,step,layer,slot,expert,weight"  # the first ones; what the real cache did follows
PREFILL, DECODE = 0, 1
MOST_WEIGHT = float(np.finfo(np.float16).max)
_WIDTH = COLUMNS.count(",") + 1


class _Used(NamedTuple):
    """What one token used in one layer, and the line of its first row."""

    experts: list[int]
    weights: list[float]
    line: int


def read(path: Path, n_experts: int | None = None) -> RoutingTrace:
    """A turn is a request; phase 0 is its prompt, phase 1 its decoded tokens; slots are in descending weight.

    The last layers of a prompt may have been computed for its last token alone (llama.cpp leaves out what no one reads).
    There the other tokens are given that token's experts: the batch asks for the same distinct experts, in the same order.
    provenance["filled"] lists such layers.

    Accounting of the published curves: one cache over all layers with a budget in bytes (expert_bytes, by layer); the
    prompt is one batch a layer with its ids token by token, one lookup for each distinct expert, duplicates only promote,
    eviction after the batch and never of its own entries; decode tokens in listed order; the cache is never reset.
    Source: github.com/Helldez/BigMoeOnEdge, docs/bench-data. Raises TraceError with the line.
    """
    facts: dict[str, str] = {}
    layer_bytes: dict[int, int] = {}
    used: dict[tuple[int, int, int, int], _Used] = {}
    header = False
    for number, line in _lines(path):
        if line.startswith("#"):
            if number == 1 and line.split()[1:] != ["route_trace", "v1"]:
                raise _bad(path, f"it begins with {line!r}, not with # route_trace v1")
            found = dict(re.findall(r"(\w+)=(\S+)", line))
            if "layer" in found and found.get("expert_bytes", "").isdigit() and found["layer"].isdigit():
                layer_bytes[int(found["layer"])] = int(found["expert_bytes"])
            else:
                facts.update(found)
        elif not header:
            if not line.startswith(COLUMNS):
                raise _bad(path, f"line {number}: the columns are {line!r}, not {COLUMNS},...")
            header, columns = True, line.count(",") + 1
        else:
            _row(path, number, line, columns, used)
    if not used:
        raise _bad(path, "it has no row")
    return _trace(path, n_experts, facts, layer_bytes, used)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
        text = (gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw).decode()
    except OSError as error:
        raise _bad(path, f"it cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise _bad(path, "it is no text, and a route CSV is (plain or gzip)") from None
    except (EOFError, zlib.error) as error:
        raise _bad(path, f"it is truncated or damaged ({error})") from None
    return ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1) if line.strip())


def _row(path: Path, number: int, line: str, columns: int, used: dict[tuple[int, int, int, int], _Used]) -> None:
    fields = line.split(",")
    if len(fields) != columns:
        raise _bad(path, f"line {number} has {len(fields)} of {columns} columns: the file is truncated or damaged")
    turn, phase, step, layer, slot, expert = (
        _whole(path, number, *field) for field in zip(COLUMNS.split(","), fields[: _WIDTH - 1])
    )
    weight = _weight(path, number, fields[_WIDTH - 1])
    if phase not in (PREFILL, DECODE):
        raise _bad(path, f"line {number}: phase {phase} is neither {PREFILL} nor {DECODE}")
    # of one turn the prompt's keys come before those of decoding, as in a trace
    token = used.setdefault((turn, phase, step, layer), _Used([], [], number))
    if slot != len(token.experts):
        raise _bad(path, f"line {number}: slot {slot} where {len(token.experts)} should follow")
    token.experts.append(expert)
    token.weights.append(weight)


def _whole(path: Path, number: int, column: str, text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise _bad(path, f"line {number}: {column} is {text[:20]!r}, not a whole number")
    return int(text)


def _weight(path: Path, number: int, text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not 0 <= weight <= MOST_WEIGHT:
        raise _bad(path, f"line {number}: weight is {text[:20]!r}, not a number from 0 to {MOST_WEIGHT:g}")
    return weight


def _trace(
    path: Path,
    n_experts: int | None,
    facts: dict[str, str],
    layer_bytes: dict[int, int],
    used: dict[tuple[int, int, int, int], _Used],
) -> RoutingTrace:
    top_k = len(next(iter(used.values())).experts)
    for token in used.values():
        if len(token.experts) != top_k:
            raise _bad(
                path, f"line {token.line}: a token uses {len(token.experts)} experts, those before {top_k} (mixed K)"
            )
    layers = sorted({layer for *_, layer in used})
    tokens = sorted({key[:3] for key in used})
    filled = _fill(path, used, tokens, layers)
    of_tokens = [[used[(*token, layer)] for layer in layers] for token in tokens]
    turns = [turn for turn, *_ in tokens]
    borders = [0, *(i for i in range(1, len(turns)) if turns[i] != turns[i - 1]), len(turns)]
    experts = np.array([[token.experts for token in row] for row in of_tokens])
    own = int(said) if (said := facts.get("n_expert", "")).isdecimal() else None
    check_experts(path, experts, n_experts, own)
    if n_experts is None and own is None:
        enough = max(128, 1 << int(experts.max()).bit_length())
        raise bad(path, "it does not say n_expert, the experts of a layer", again(path, experts=enough))
    provenance = {
        "model": facts.get("model", "").rpartition("/")[2],
        "kind": "imported",
        "format": "route-csv",
        "source": path.name,
        "layers": layers,
        "filled": filled,
        "accounting": {"pool": "bytes", "warm": "batch", "touch_order": "listed", "reset": "never"},
    }
    if layer_bytes:
        missing = [layer for layer in layers if layer not in layer_bytes]
        if missing:
            raise _bad(path, f"it gives no expert_bytes for layer {missing[0]}")
        provenance["expert_bytes"] = [layer_bytes[layer] for layer in layers]
    try:
        return RoutingTrace(
            experts=experts,
            borders=np.array(borders),
            prefill=np.array([phase == PREFILL for _, phase, _ in tokens]),
            n_experts=n_experts or own or 0,
            weights=np.array([[token.weights for token in row] for row in of_tokens]),
            provenance=provenance,
        )
    except ValueError as error:
        raise _bad(path, str(error)) from None


def _fill(
    path: Path,
    used: dict[tuple[int, int, int, int], _Used],
    tokens: list[tuple[int, int, int]],
    layers: list[int],
) -> list[int]:
    """Gives prompt tokens that a layer left out the experts of the prompt's last token there; the layers concerned."""
    last = {turn: step for turn, phase, step in tokens if phase == PREFILL}
    filled = set()
    for turn, phase, step in tokens:
        for layer in layers:
            if (turn, phase, step, layer) in used:
                continue
            stand_in = used.get((turn, PREFILL, last.get(turn, -1), layer))
            if phase != PREFILL or stand_in is None:
                where = f"turn {turn}, phase {phase}, step {step}, layer {layer}"
                raise _bad(path, f"{where} has no row: the file is truncated or damaged")
            used[turn, phase, step, layer] = stand_in
            filled.add(layer)
    return sorted(filled)


def _bad(path: Path, why: str) -> TraceError:
    return bad(path, f"{why}; fetch it again", "git clone https://github.com/Helldez/BigMoeOnEdge")

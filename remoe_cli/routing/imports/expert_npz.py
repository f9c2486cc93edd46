"""npz files of experts [L, T, K]: the ESFT score files as the shared traces keep them, and cacheable-by-design's.

Shape letters: L MoE layers, T tokens, K experts a token, E routed experts.
"""

import json
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from remoe_cli.errors import TraceError
from remoe_cli.routing.imports.refuse import again, bad, check_experts
from remoe_cli.routing.trace import RoutingTrace

ESFT, CACHEABLE = "deepseek-ai/ESFT", "Shriniwas410/cacheable-by-design"
ESFT_EXPERTS = 64  # DeepSeek-V2-Lite, whose routing these files hold, is not named in them

# what numpy and zipfile raise for a file that is not what its name says; RuntimeError: encrypted, or an unknown method
_DAMAGED = (ValueError, OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)


@contextmanager
def _of(repository: str) -> Iterator[None]:
    """Where a damaged file can be fetched again."""
    try:
        yield
    except TraceError as error:
        raise TraceError(error.message, error.hint or f"git clone https://github.com/{repository}") from None


@_of(ESFT)
def read_esft(path: Path, n_experts: int | None = None) -> RoutingTrace:
    """Keys experts [L, T, K] (ids ascending inside a token), weights [L, T, K] (not renormalised), sample_lengths [R],
    layers [L]. Source: github.com/deepseek-ai/ESFT, results/expert_scores.

    Accounting of the goldens: a fresh cache each sample, step-atomic, touch order as listed. Every token was routed
    teacher-forced, so none is prefill. Raises TraceError.
    """
    found = _load(path, ("experts", "sample_lengths"))
    lengths = _integers(path, found, "sample_lengths", 1)
    experts = _integers(path, found, "experts", 3).transpose(1, 0, 2)
    provenance = {
        "model": "deepseek-ai/DeepSeek-V2-Lite",
        "kind": "imported",
        "format": "esft-npz",
        "source": path.name,
        "phase": "teacher-forced text",
        "accounting": {"touch_order": "listed", "step": "atomic", "reset": "request"},
    }
    if "layers" in found:
        provenance["layers"] = _integers(path, found, "layers", 1).tolist()
    check_experts(path, experts, n_experts, ESFT_EXPERTS)
    if n_experts is None and experts.size and experts.max() >= ESFT_EXPERTS:
        why = f"it names expert {experts.max()}, and without --experts it is taken to have {ESFT_EXPERTS} a layer"
        raise bad(path, why, again(path, experts=1 << int(experts.max()).bit_length()))
    weights = found.get("weights")
    if weights is not None and weights.shape != found["experts"].shape:
        raise _bad(path, f"weights is {list(weights.shape)}, experts {list(found['experts'].shape)}")
    if weights is not None and (weights.dtype.kind != "f" or not ((weights >= 0) & np.isfinite(weights)).all()):
        raise _bad(path, "weights holds values that are no finite numbers from 0 on")
    weights = None if weights is None else weights.transpose(1, 0, 2)
    borders = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    return _trace(path, experts, borders, n_experts or ESFT_EXPERTS, weights, provenance)


@_of(CACHEABLE)
def read_cacheable(path: Path, n_experts: int | None = None) -> RoutingTrace:
    """Keys experts [L, T, K] and meta, a JSON text with model, num_experts and source. No weights.
    Source: github.com/Shriniwas410/cacheable-by-design, routing-lab/traces and runs.

    Accounting of the published columns: one cache a layer over the whole file, so one request; one expert after the
    other in listed order, without protection (sequential). Slots are a fraction of E. Raises TraceError.
    """
    found = _load(path, ("experts", "meta"))
    try:
        meta = json.loads(str(found["meta"]))
        own = int(meta["num_experts"]) if n_experts is None or "num_experts" in meta else None
        model, source = str(meta.get("model")), str(meta.get("source"))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise bad(path, f"its meta does not give num_experts ({error!r})", again(path, experts=128)) from None
    experts = _integers(path, found, "experts", 3).transpose(1, 0, 2)
    check_experts(path, experts, n_experts, own)
    provenance = {
        "model": model,
        "kind": "imported",
        "format": "cacheable-npz",
        "source": f"{path.parent.name}/{path.name}: {source}",
        "phase": "teacher-forced text",
        "accounting": {"touch_order": "listed", "step": "sequential", "reset": "never"},
    }
    return _trace(path, experts, np.array([0, len(experts)]), n_experts or own or 0, None, provenance)


@_of(ESFT)
def keys(path: Path) -> set[str]:
    """Names of the arrays. Raises TraceError for no whole npz."""
    return set(_open(path).files)


def _trace(
    path: Path,
    experts: np.ndarray,
    borders: np.ndarray,
    n_experts: int,
    weights: np.ndarray | None,
    provenance: dict[str, Any],
) -> RoutingTrace:
    empty = np.flatnonzero(np.diff(borders) == 0)
    if len(empty):
        raise _bad(path, f"request {empty[0]} is empty")
    try:
        return RoutingTrace(experts, borders, np.zeros(len(experts), dtype=bool), n_experts, weights, provenance)
    except ValueError as error:
        raise _bad(path, str(error)) from None


def _load(path: Path, needed: tuple[str, ...]) -> dict[str, np.ndarray]:
    file = _open(path)
    missing = [key for key in needed if key not in file.files]
    if missing:
        raise _bad(path, f"it has no array {missing[0]!r} (arrays: {', '.join(file.files)})")
    try:
        return {key: file[key] for key in file.files}
    except _DAMAGED as error:
        raise _bad(path, f"it is damaged ({error})") from None


def _open(path: Path) -> Any:
    try:
        file = np.load(path, allow_pickle=False)
    except _DAMAGED as error:
        raise _bad(path, f"it is no whole npz ({error})") from None
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise _bad(path, "it is no npz")
    return file


def _integers(path: Path, found: dict[str, np.ndarray], key: str, dimensions: int) -> np.ndarray:
    array = found[key]
    if array.ndim != dimensions or array.dtype.kind not in "iu":
        why = (
            f"{key} is {array.dtype} {list(array.shape)}, not integers of {dimensions} dimension{'s'[: dimensions - 1]}"
        )
        raise _bad(path, why)
    return array


def _bad(path: Path, why: str) -> TraceError:
    return bad(path, f"{why}; fetch it again", hint="")

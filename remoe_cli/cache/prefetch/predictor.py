"""The predictor file of `remoe predictor train`: a network of one hidden layer for each layer that is foretold.

Shape letters: L MoE layers, H hidden, W width of the network, E routed experts.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remoe_cli import atomic
from remoe_cli.errors import CacheError, command

FORMAT = 1
SHAPES = {"into": 3, "into_bias": 2, "out": 3, "out_bias": 2}  # dimensions
FACTS = ("format", "model", "revision", "ahead", "n_layers", "n_experts", "hidden", "width")


class Predictor:
    """facts: FACTS, and how it was trained. weights: into [L, H, W], into_bias [L, W], out [L, W, E], out_bias [L, E], float32; those of
    layer l take the hidden state of layer l - ahead, in the first layers that of the last ones at the token before."""

    def __init__(self, facts: Mapping[str, Any], weights: Mapping[str, np.ndarray], path: Path | None = None) -> None:
        self.facts, self.path = dict(facts), path
        self._weights = {name: np.ascontiguousarray(weights[name], np.float32) for name in SHAPES}

    @property
    def held_bytes(self) -> int:
        return sum(one.nbytes for one in self._weights.values())

    def probabilities(self, layer: int, hidden_H: np.ndarray) -> np.ndarray:
        """[E], a softmax."""
        own = {name: one[layer] for name, one in self._weights.items()}
        inner_W = np.maximum(hidden_H.astype(np.float32) @ own["into"] + own["into_bias"], 0)
        logits_E = (inner_W @ own["out"] + own["out_bias"]).astype(np.float64)
        found = np.exp(logits_E - logits_E.max())
        return found / found.sum()

    def write(self, path: Path) -> None:
        """Under its name once it is whole."""
        with atomic.new_file(path) as stream:
            facts = np.frombuffer(json.dumps(self.facts, sort_keys=True).encode(), np.uint8)
            np.savez(stream, **{"facts": facts, **self._weights})  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: Path) -> Predictor:
        """Raises CacheError for a file that is none."""
        hint = command("predictor", "train", "t.trace", o=atomic.free_name(path))
        try:
            with np.load(path, allow_pickle=False) as found:
                facts = json.loads(found["facts"].tobytes())
                weights = {name: found[name] for name in SHAPES}
        except FileNotFoundError:
            raise CacheError(f"there is no predictor {path}.", hint) from None
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
            raise CacheError(f"{path} is no predictor of remoe, or damaged.", hint) from None
        if facts.get("format") != FORMAT or {*FACTS} - {*facts}:
            raise CacheError(f"{path} is a predictor of another version of remoe.", hint)
        L, H, W, E = (facts[name] for name in ("n_layers", "hidden", "width", "n_experts"))
        if [weights[name].shape for name in SHAPES] != [(L, H, W), (L, W), (L, W, E), (L, E)]:
            raise CacheError(f"{path} is damaged: its weights have not the shapes that it says.", hint)
        return cls(facts, weights, path)

    def misfit(self, ahead: int, n_layers: int, n_experts: int, hidden: int, model: Any, revision: Any) -> str | None:
        """Why it can't serve this model, None where it can. model, revision: None where they are not known."""
        own = self.facts
        if None not in (own["model"], model) and (own["model"], own["revision"]) != (model, revision):
            return f"the predictor was trained on {own['model']} ({own['revision']}), not on {model} ({revision})"
        if (own["n_layers"], own["n_experts"], own["hidden"]) != (n_layers, n_experts, hidden):
            return (
                f"the predictor was trained for {own['n_layers']} layers of {own['n_experts']} experts and {own['hidden']} hidden, "
                f"and the model has {n_layers} of {n_experts} and {hidden}"
            )
        if own["ahead"] != ahead:
            return f"the predictor looks {own['ahead']} layers ahead, and promoe was asked for {ahead}"
        return None

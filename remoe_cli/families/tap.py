"""The only hooks on routers: what each gate saw and chose in one forward pass.

Shape letters: N tokens (B*T flattened, padding included), D hidden size, E routed experts, K experts a token.
"""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

from remoe_cli.errors import FamilyError
from remoe_cli.families.base import Gate
from remoe_cli.families.scores import Score, SOFTMAX

if TYPE_CHECKING:
    import torch


class Routed(NamedTuple):
    """One layer's pass, as the router itself computed it (graph kept): the indices are the model's own. hidden: the gate's own
    input; score: the family's."""

    hidden_ND: torch.Tensor
    logits_NE: torch.Tensor
    weight_NK: torch.Tensor
    choice_NK: torch.Tensor
    score: Score = SOFTMAX

    @property
    def probabilities_NE(self) -> torch.Tensor:
        """P, fp32."""
        return self.score.probabilities(self.logits_NE)


class RouterTap:
    """`with RouterTap(gates) as tap: model(ids); routed = tap.take()`.

    Records the first pass after `start` (entering starts it) and nothing after `take`, so that the second pass of
    gradient checkpointing is not taken for a new one.
    """

    def __init__(self, gates: list[Gate]) -> None:
        self._gates = gates
        self._seen: dict[int, Routed] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        self._open = False
        self._handles: list = []

    def __enter__(self) -> RouterTap:
        for gate in self._gates:
            self._handles.append(gate.input.register_forward_pre_hook(self._input(gate.layer)))
            self._handles.append(gate.router.register_forward_hook(self._hook(gate)))
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def start(self) -> None:
        """Forgets what was recorded and records the next pass."""
        self._seen.clear()
        self._hidden.clear()
        self._open = True

    def take(self) -> list[Routed]:
        """One Routed a gate, in layer order; stops recording. Raises FamilyError when a router was not reached."""
        self._open = False
        missing = [gate.layer for gate in self._gates if gate.layer not in self._seen]
        if missing:
            raise FamilyError(
                f"the routers of layers {missing} recorded nothing in this pass: the model does not call them as modules.",
                "pip install -U transformers",
            )
        routed = [self._seen[gate.layer] for gate in self._gates]
        self._seen.clear()
        self._hidden.clear()
        return routed

    def _input(self, layer: int):
        def record(_module, inputs) -> None:
            if self._open and layer not in self._hidden:
                self._hidden[layer] = inputs[0].reshape(-1, inputs[0].shape[-1])

        return record

    def _hook(self, gate: Gate):
        def record(_module, _inputs, outputs) -> None:
            if self._open and gate.layer not in self._seen:
                self._seen[gate.layer] = Routed(self._hidden[gate.layer], *gate.read(outputs), gate.score)

        return record

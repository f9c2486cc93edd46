"""The only hooks on routers: what each gate saw and chose in one forward pass.

Shape letters: N tokens (B*T flattened, padding included), D hidden size, E routed experts, K experts a token.
"""

from __future__ import annotations

from typing import NamedTuple, TYPE_CHECKING

from remoe_cli.errors import FamilyError
from remoe_cli.families.base import Gate

if TYPE_CHECKING:
    import torch


class Routed(NamedTuple):
    """One layer's pass, as the router itself computed it (graph kept): the indices are the model's own."""

    hidden_ND: torch.Tensor
    logits_NE: torch.Tensor
    weight_NK: torch.Tensor
    choice_NK: torch.Tensor


class RouterTap:
    """`with RouterTap(gates) as tap: model(ids); routed = tap.take()`.

    Records the first pass after `start` (entering starts it) and nothing after `take`, so that the second pass of
    gradient checkpointing is not taken for a new one.
    """

    def __init__(self, gates: list[Gate]) -> None:
        self._gates = gates
        self._seen: dict[int, Routed] = {}
        self._open = False
        self._handles: list = []

    def __enter__(self) -> RouterTap:
        for gate in self._gates:
            hook = self._hook(gate.layer)
            self._handles.append(gate.router.register_forward_hook(hook))
        self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def start(self) -> None:
        """Forgets what was recorded and records the next pass."""
        self._seen.clear()
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
        return routed

    def _hook(self, layer: int):
        def record(_module, inputs, outputs) -> None:
            if self._open and layer not in self._seen:
                logits_NE, weight_NK, choice_NK = outputs
                hidden_ND = inputs[0].reshape(-1, inputs[0].shape[-1])
                self._seen[layer] = Routed(hidden_ND, logits_NE, weight_NK, choice_NK)

        return record


def probabilities(logits_NE: torch.Tensor) -> torch.Tensor:
    """P [N, E] in fp32: softmax over the routed experts, shared ones left out (ReMoE, section 3)."""
    return logits_NE.float().softmax(-1)

"""Master gates: the fp32 copies that the optimiser sees.

A bf16 gate has steps of 2^-8 of its value; at lr 5e-5 nearly every update is below half a step and would be lost.
"""

import torch
from torch import Tensor

from remoe_cli.families.spread import assign, is_spread, whole


class Masters:
    """In-memory parameters of any dtype, and an fp32 (fp64 for fp64 models) master of each, by parameter name."""

    def __init__(self, parameters: dict[str, Tensor], shares: int = 1) -> None:
        """shares: of spread parameters, of how many processes' gradients theirs are the mean."""
        self._parameters, self._shares = parameters, shares
        self.tensors = {
            name: whole(parameter).to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
            for name, parameter in parameters.items()
        }

    def clear(self) -> None:
        """Zero gradients, on masters and parameters."""
        for name, master in self.tensors.items():
            master.grad = torch.zeros_like(master)
            self._parameters[name].grad = None

    def accumulate(self) -> None:
        """Moves the gradients of one backward pass from the parameters to the masters, where they add up in fp32."""
        for name, parameter in self._parameters.items():
            grad, self._parameters[name].grad = parameter.grad, None
            sum_so_far = self.tensors[name].grad
            if grad is not None and sum_so_far is not None:
                sum_so_far += whole(grad) * self._shares if is_spread(grad) else grad

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the masters into the model's parameters."""
        for name, master in self.tensors.items():
            assign(self._parameters[name], master)

    def own_gradients(self) -> list[Tensor]:
        """Those of this process alone; what is spread has all processes' already."""
        return [
            master.grad
            for name, master in self.tensors.items()
            if master.grad is not None and not is_spread(self._parameters[name])
        ]

    def snapshot(self) -> dict[str, Tensor]:
        return {name: master.detach().clone() for name, master in self.tensors.items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Puts a snapshot back, in the masters and in the model."""
        self.clear()
        for name, master in self.tensors.items():
            master.copy_(snapshot[name])
        self.write()

"""Master gates: the fp32 copies that the optimiser sees.

A bf16 gate has steps of 2^-8 of its value; at lr 5e-5 nearly every update is below half a step and would be lost.
"""

import torch
from torch import Tensor


class Masters:
    """In-memory parameters of any dtype, and an fp32 (fp64 for fp64 models) master of each, by parameter name."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._parameters = parameters
        self.tensors = {
            name: parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32), copy=True)
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
                sum_so_far += grad

    @torch.no_grad()
    def write(self) -> None:
        """Rounds the masters into the model's parameters."""
        for name, master in self.tensors.items():
            self._parameters[name].copy_(master)

    def gradients(self) -> list[Tensor]:
        return [master.grad for master in self.tensors.values() if master.grad is not None]

    def snapshot(self) -> dict[str, Tensor]:
        return {name: master.detach().clone() for name, master in self.tensors.items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """Puts a snapshot back, in the masters and in the model."""
        self.clear()
        for name, master in self.tensors.items():
            master.copy_(snapshot[name])
        self.write()

"""A row, made: what the tests of one family share and none of them changes."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from conformance.rows import Row, ROWS
from remoe_cli.delta import Delta, put
from remoe_cli.families import find_gates, Gate
from remoe_cli.families.loader import gate_disk_names, kept_cache, load_resident
from remoe_cli.hub.checkpoint import Checkpoint

PROMPT = [5, 17, 80, 3, 99, 41, 64, 12]
IDS = torch.tensor([PROMPT, PROMPT[::-1]])


def decoded_logits(model, prompt: list[int], ids: list[int]) -> torch.Tensor:
    """[len(ids), V]: of a resident model after the prompt, and after each of these tokens but the last."""
    with torch.inference_mode():
        out = model(torch.tensor([prompt]), use_cache=True)
        logits = [out.logits[0, -1]]
        for token in ids[:-1]:
            out = model(torch.tensor([[token]]), use_cache=True, **kept_cache(out))
            logits.append(out.logits[0, -1])
    return torch.stack(logits)


@dataclass
class Built:
    """A row, made: its checkpoint of several shards, fp32."""

    model_type: str
    checkpoint: Checkpoint

    @property
    def row(self) -> Row:
        return ROWS[self.model_type]

    @cached_property
    def model(self):
        return load_resident(self.checkpoint, torch.float32, "cpu")

    @cached_property
    def gates(self) -> list[Gate]:
        return find_gates(self.model)

    @cached_property
    def disk_names(self) -> dict[str, str]:
        return gate_disk_names(self.model, self.checkpoint)

    @cached_property
    def tuned(self) -> dict[str, torch.Tensor]:
        """In-memory name -> gate or selection bias, moved."""
        generator = torch.Generator().manual_seed(1)
        stock = {name: self.checkpoint.read(disk) for name, disk in self.disk_names.items()}
        return {name: gate + 0.5 * torch.randn(gate.shape, generator=generator) for name, gate in stock.items()}

    @cached_property
    def tuned_logits(self) -> torch.Tensor:
        """[2, T, V] of IDS, of a model loaded anew: a deep copy of gemma4 computes other last bits."""
        model = load_resident(self.checkpoint, torch.float32, "cpu")
        put(model, self.tuned)
        with torch.no_grad():
            return model(IDS).logits

    @cached_property
    def delta(self) -> Path:
        """The folder of the delta that makes this checkpoint the tuned model."""
        return self.delta_of({*self.tuned}, self.checkpoint.folder.parent / "delta")

    def delta_of(self, names: set[str], folder: Path) -> Path:
        """A delta of some of the tuned tensors, by their in-memory names."""
        on_disk = {self.disk_names[name]: self.tuned[name] for name in names}
        Delta.of(self.checkpoint, on_disk, "remoe", {}).save(folder)
        return folder

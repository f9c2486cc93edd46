"""Several processes that train together, as `torchrun` or `accelerate launch` start them: one a device.

Every process reads the same texts and takes every world-th micro-batch of a step; gradients of the gates, which each of them holds
whole, are added up, so that all gates stay alike. The first process writes files and speaks; the others work in a scratch folder.
"""

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from remoe_cli import console
from remoe_cli.errors import TrainingError, UsageError
from remoe_cli.run import Run
from remoe_cli.train.packing import Batch

if TYPE_CHECKING:
    from remoe_cli.recipe import Train

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)  # for the slowest process of a step; one that died is noticed at once


@dataclass
class Ranks:
    """rank: this process' number of `world`; scratch: a folder of a process that writes nothing else, None of the first one."""

    rank: int = 0
    world: int = 1
    scratch: Path | None = None
    _before: Any = field(default=None, repr=False)

    @classmethod
    def join(cls, device: str) -> "Ranks":
        """As the environment says; alone where it says nothing. Raises UsageError where the others can't be reached."""
        world = int(os.environ.get("WORLD_SIZE", "1"))
        if world < 2:
            return cls()
        backend = "nccl" if device.startswith("cuda") else "gloo"
        cls(0, world).device(device)  # NCCL's first collectives already take the current device
        try:
            torch.distributed.init_process_group(backend, timeout=PATIENCE)
        except (ValueError, RuntimeError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"the other {world - 1} processes can't be reached: {reason}.",
                "torchrun --nproc-per-node N -m remoe_cli finetune MODEL",
            ) from None
        ranks = cls(torch.distributed.get_rank(), world)
        ranks._before = signal.signal(signal.SIGTERM, _ended)
        if not ranks.main:
            ranks.scratch = Path(tempfile.mkdtemp(prefix="remoe-rank-"))
            atexit.register(shutil.rmtree, ranks.scratch, ignore_errors=True)
            console.mute()
        return ranks

    @property
    def main(self) -> bool:
        return self.rank == 0

    def follow(self, old: Run | None) -> tuple[Path, Run | None]:
        """Where a process works that writes nothing of the run: on a copy of the one that goes on."""
        assert self.scratch is not None
        out = self.scratch / "run"
        if old is not None:
            shutil.copytree(old.folder, out)
        return out, old and Run(out)

    def device(self, wanted: str) -> str:
        """This process' own: of several GPUs the one that LOCAL_RANK names."""
        if self.world < 2 or wanted != "cuda":
            return wanted
        torch.cuda.set_device(index := int(os.environ.get("LOCAL_RANK", "0")))
        return f"cuda:{index}"

    def share(self, micro: Sequence[Batch]) -> list[Batch]:
        """Of a step's micro-batches every world-th; each process gets as many, empty ones at the end of the texts."""
        lacking = -len(micro) % self.world
        filled = [*micro, *[_empty(micro[0])] * lacking] if micro else []
        return filled[self.rank :: self.world]

    def total(self, tensors: Iterable[Tensor]) -> None:
        """Each becomes its sum over all processes, in place. Raises TrainingError where one of them has ended."""
        if self.world < 2:
            return
        every = list(tensors)
        for dtype in dict.fromkeys(tensor.dtype for tensor in every):
            alike = [tensor for tensor in every if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in alike])
            try:
                torch.distributed.all_reduce(flat)
            except RuntimeError:
                raise lost() from None
            for tensor, part in zip(alike, flat.split([tensor.numel() for tensor in alike]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def save_undisturbed(self) -> None:
        """What was trained is being saved: whoever started the processes may tell this one to end, and waits before it kills."""
        if self.world > 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

    def agree(self, value: T) -> T:
        """The first process' value, in all of them."""
        if self.world < 2:
            return value
        held = [value]
        try:
            torch.distributed.broadcast_object_list(held)
        except RuntimeError:
            raise lost() from None
        return held[0]

    def leave(self) -> None:
        """Ends the group, without waiting for processes that died."""
        if self.world < 2:
            return
        signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


ALONE = Ranks()


def check_share(settings: "Train", world: int, parallel: str = "fsdp", quantised: bool = False) -> None:
    """Raises UsageError where a step's micro-batches can't be shared out evenly, or the model can't be as `parallel` says."""
    if parallel == "ep" and (world < 2 or quantised):
        lacking = "experts that are not stored quantised" if quantised else "several processes"
        raise UsageError(
            f"--parallel ep needs {lacking}.",
            "the same command with --parallel fsdp"
            if quantised
            else "torchrun --nproc-per-node N -m remoe_cli finetune MODEL",
        )
    if settings.accumulation % world:
        fewer, more = settings.accumulation // world * world, -(-settings.accumulation // world) * world
        allowed = f"{more}" if fewer < 1 else f"{fewer} or {more}"
        raise UsageError(
            f"train.accumulation is {settings.accumulation}, which {world} processes can't share evenly.",
            f"the same command with --set train.accumulation={allowed}",
        )


def lost() -> TrainingError:
    """What to say when a collective fails, whatever the library says of it."""
    return TrainingError("another process of this run has ended", "the same command with --resume")


def is_lost(error: BaseException) -> bool:
    """Whether an error of torch means that another process is gone."""
    words = str(error)
    known = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "NCCL", "gloo")
    return isinstance(error, RuntimeError) and any(word in words for word in known)


def _ended(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise TrainingError("this process was told to end, as another one of the run did", "the same command with --resume")


def _empty(like: Batch) -> Batch:
    return like._replace(
        ids_BT=torch.zeros_like(like.ids_BT), document_BT=torch.full_like(like.document_BT, -1),
        learned_BT=None if like.learned_BT is None else torch.zeros_like(like.learned_BT),
    )  # fmt: skip

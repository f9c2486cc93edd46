"""Held-out requests: a prompt and its true continuation, cut from documents that are long enough."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from remoe_cli.errors import DataError


class Requests(NamedTuple):
    prompts_RP: torch.Tensor
    continuations_RS: torch.Tensor


def cut_requests(documents: Sequence[Sequence[int]], requests: int, prompt: int, steps: int) -> Requests:
    """The first prompt+steps tokens of each document, then their next stretch, and so on until there are `requests`.

    Fewer when the texts run out. Raises DataError when no document is long enough.
    """
    length, begin = prompt + steps, 0
    found: list[list[int]] = []
    while len(found) < requests:
        stretch = [list(d[begin : begin + length]) for d in documents if len(d) >= begin + length]
        if not stretch:
            break
        found += stretch
        begin += length
    if not found:
        longest = max((len(d) for d in documents), default=0)
        raise DataError(
            f"no held-out document has {prompt} + {steps} tokens to decode (the longest has {longest}).",
            f"the same command with --set evaluate.prompt_tokens={max(1, longest // 2)} --set evaluate.new_tokens={max(1, longest // 2)}",
        )
    ids = torch.tensor(found[:requests])
    return Requests(ids[:, :prompt], ids[:, prompt:])

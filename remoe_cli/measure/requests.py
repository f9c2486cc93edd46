"""Held-out requests: a prompt and its true continuation, cut from documents that are long enough."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import torch

from remoe_cli.errors import DataError
from remoe_cli.train.packing import stretches

SHORTEST = 3  # a prompt of one token, one that is fed, and one that it is to predict


class Requests(NamedTuple):
    prompts_RP: torch.Tensor
    continuations_RS: torch.Tensor


def cut_requests(documents: Sequence[Sequence[int]], requests: int, prompt: int, steps: int) -> Requests:
    """The first `requests` stretches of prompt + steps tokens; fewer when the texts run out.

    Raises DataError when no document is long enough.
    """
    length = prompt + steps
    whole = (stretch for stretch in stretches(documents, length) if len(stretch) == length)
    found = list(islice(whole, requests))
    if not found:
        longest = max(map(len, documents), default=0)
        reason = f"no held-out document has the {prompt} + {steps} tokens of a request (the longest has {longest})."
        if longest < SHORTEST:
            raise DataError(reason, "the same command with longer texts")
        half = longest // 2
        hint = f"--set evaluate.prompt_tokens={half} --set evaluate.new_tokens={longest - half - 1}"
        raise DataError(reason, f"the same command with {hint}")
    ids = torch.tensor(found)
    return Requests(ids[:, :prompt], ids[:, prompt:])

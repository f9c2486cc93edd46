"""Held-out requests: a prompt and its true continuation, cut from documents that are long enough."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch

from remoe_cli.errors import DataError

SHORTEST = 3  # a prompt of one token, one that is fed, and one that it is to predict


class Requests(NamedTuple):
    prompts_RP: torch.Tensor
    continuations_RS: torch.Tensor


def stretches(documents: Sequence[Sequence[int]], length: int) -> Iterator[list[int]]:
    """The first `length` tokens of each document, then the next of each, and so on: a few long documents cannot crowd out
    the others. The last stretch of a document may be shorter."""
    for begin in range(0, max(map(len, documents), default=0), length):
        for document in documents:
            if len(document) > begin:
                yield list(document[begin : begin + length])


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

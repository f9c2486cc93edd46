"""Held-out requests: a prompt and its true continuation, cut from documents that are long enough; or prompts alone."""

from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import NamedTuple

import torch

from remoe_cli.errors import DataError
from remoe_cli.train.packing import stretches

SHORTEST = 3  # a prompt of one token, one that is fed, and one that it is to predict
OTHER_TEXTS = "the same command with longer texts"


def _in_recipe(prompt: int, new: int) -> str:
    return f"the same command with --set evaluate.prompt_tokens={prompt} --set evaluate.new_tokens={new}"


class Requests(NamedTuple):
    prompts_RP: torch.Tensor
    continuations_RS: torch.Tensor


def cut_requests(
    documents: Sequence[Sequence[int]],
    requests: int,
    prompt: int,
    steps: int,
    *,
    shorter: Callable[[int, int], str] = _in_recipe,
    other: str = OTHER_TEXTS,
) -> Requests:
    """The first `requests` stretches of prompt + steps tokens; fewer when the texts run out.

    shorter, other: the command with a prompt and new tokens that would do, and with other texts. Raises DataError when no
    document is long enough.
    """
    length = prompt + steps
    whole = (stretch for stretch in stretches(documents, length) if len(stretch) == length)
    found = list(islice(whole, requests))
    if not found:
        longest = max(map(len, documents), default=0)
        reason = f"no held-out document has the {prompt} + {steps} tokens of a request (the longest has {longest})."
        if longest < SHORTEST:
            raise DataError(reason, other)
        half = longest // 2
        raise DataError(reason, shorter(half, longest - half - 1))
    ids = torch.tensor(found)
    return Requests(ids[:, :prompt], ids[:, prompt:])


def cut_prompts(
    documents: Sequence[Sequence[int]],
    requests: int,
    prompt: int,
    steps: int,
    *,
    end: int | None = None,
    other: str = OTHER_TEXTS,
) -> list[torch.Tensor]:
    """The prompts of `cut_requests`, then, where they are too few, the first tokens of documents that are shorter than a
    request: [P] ids each, at most `prompt`. end: the token at a text's end, which no such prompt ends with.

    Raises DataError when no document holds another token.
    """
    length = prompt + steps
    whole = (stretch[:prompt] for stretch in stretches(documents, length) if len(stretch) == length)
    short = (_without(end, document)[:prompt] for document in documents if len(document) < length)
    found = list(islice(chain(whole, (ids for ids in short if ids)), requests))
    if not found:
        raise DataError("the texts hold no token to start from.", other)
    return [torch.tensor(ids) for ids in found]


def _without(end: int | None, document: Sequence[int]) -> list[int]:
    ids = list(document)
    return ids[:-1] if ids and ids[-1] == end else ids

"""`--data self`: continuations that the base itself writes, since a gate is used on those and not on the corpus.

Teacher-forced gains shrink in generation (objectives on true text see routing that decoding never visits). The prompts
are stretches of the training texts; the held-out texts stay true ones.
"""

import json
import random
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TYPE_CHECKING

import torch

from remoe_cli import atomic
from remoe_cli.console import progress
from remoe_cli.errors import DataError
from remoe_cli.recipe import Data
from remoe_cli.train.packing import Document, stretches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCH = 64


def own_documents(
    model: "PreTrainedModel", tokenizer: Any, texts: Any, data: Data, seed: int, path: Path
) -> list[Document]:
    """data.own_samples documents of data.own_prompt_tokens prompt tokens and up to data.own_tokens sampled ones
    (temperature 1, the whole distribution, up to the end token). learned: the sampled tokens, when data.labels is
    "answers". Written to `path` whole, and read from there the next time. With data.own_beside, as many stretches of the
    given texts as that, of the same length, are mixed in, in an order drawn by the seed. Raises DataError when no text is
    long enough for a prompt.
    """
    if not path.is_file():
        prompts = _prompts(texts, data)
        ids, end = [], tokenizer.eos_token_id
        torch.manual_seed(seed)
        with progress("sample from the base", len(prompts)) as bar:
            for begin in range(0, len(prompts), BATCH):
                part = torch.tensor(prompts[begin : begin + BATCH], device=model.device)
                ids += [_cut(row, part.shape[1], end) for row in _sample(model, part, data.own_tokens, end).tolist()]
                bar.update(len(ids))
        lines = [json.dumps({"ids": one, "prompt": data.own_prompt_tokens}) for one in ids]
        atomic.write(path, "\n".join(lines) + "\n")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    own = [Document(row["ids"], _learned(row) if data.labels == "answers" else None) for row in rows]
    if data.own_beside:
        own += _beside(texts, data)
        random.Random(seed).shuffle(own)
    return own


def _beside(texts: Any, data: Data) -> list[Document]:
    documents = [document.ids for document in islice(texts, data.own_beside)]
    found = stretches(documents, data.own_prompt_tokens + data.own_tokens)
    return [Document(ids) for ids in islice(found, data.own_beside)]


def _prompts(texts: Any, data: Data) -> list[list[int]]:
    """From all documents alike: their first tokens, then those one sample further on."""
    documents = [document.ids for document in islice(texts, data.own_samples)]
    length = data.own_prompt_tokens
    starts = (row[:length] for row in stretches(documents, length + data.own_tokens) if len(row) >= length)
    found = list(islice(starts, data.own_samples))
    if not found:
        raise DataError(
            f"no training text has the {length} tokens of a prompt.",
            "the same command with --set data.own_prompt_tokens=4",
        )
    return found


@torch.no_grad()
def _sample(model: "PreTrainedModel", prompts_RP: torch.Tensor, tokens: int, end: int | None) -> torch.Tensor:
    """[R, P + up to `tokens`] ids; after a row's end token come more of it."""
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=True, temperature=1.0, top_k=0, top_p=1.0, repetition_penalty=1.0, max_new_tokens=tokens,
        eos_token_id=end, pad_token_id=end if end is not None else 0,
    )  # fmt: skip
    return model.generate(prompts_RP, attention_mask=torch.ones_like(prompts_RP), generation_config=settings)


def _cut(ids: Sequence[int], prompt: int, end: int | None) -> list[int]:
    """Up to the first end token after the prompt, which stays."""
    new = list(ids[prompt:])
    if end in new:
        new = new[: new.index(end) + 1]
    return [*ids[:prompt], *new]


def _learned(row: dict[str, Any]) -> list[bool]:
    return [place >= row["prompt"] for place in range(len(row["ids"]))]

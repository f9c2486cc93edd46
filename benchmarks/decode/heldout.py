"""Requests from the demo's held-out text: `python -m decode.heldout N PROMPT NEW` prints a JSON list."""

from __future__ import annotations

import json
import sys

from remoe_cli import demo
from remoe_cli import recipe as recipes
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.measure.requests import cut_requests
from remoe_cli.train.data import load_documents, load_tokenizer


def main() -> None:
    n, prompt, new = map(int, sys.argv[1:])
    recipe = recipes.load("remoe", "demo")
    tokenizer = load_tokenizer(Checkpoint.open(demo.PATH, "demo"))
    documents = load_documents(recipe.data, tokenizer, seed=recipe.train.seed).heldout
    found = cut_requests(documents, 8 * n, prompt, new)
    step = max(1, len(found.prompts_RP) // n)
    pairs = zip(found.prompts_RP[::step].tolist(), found.continuations_RS[::step].tolist())
    print(json.dumps([{"prompt": one, "forced": rest} for one, rest in pairs][:n]))


if __name__ == "__main__":
    main()

"""Loading texts with a small real tokenizer, for the tests of data."""

import json

from tiny_tokenizers import wrapped

from remoe_cli.recipe import Data
from remoe_cli.train.data import load_documents

TOKENIZER = wrapped()


def text(ids, tokenizer=TOKENIZER):
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def load(source, tokenizer=TOKENIZER, seed=0, **data):
    return load_documents(Data(source=str(source), **data), tokenizer, seed=seed)


def trained_on(got, tokenizer=TOKENIZER):
    """The documents to train on, as text, in their order."""
    return [text(document.ids, tokenizer) for document in got.train]

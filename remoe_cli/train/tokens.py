"""The checkpoint's tokenizer, checked at load: text survives it, and the model embeds all that it says."""

import unicodedata
from pathlib import Path
from typing import Any

from remoe_cli.errors import CheckpointError, DataError
from remoe_cli.hub.checkpoint import Checkpoint

# What a broken tokenizer loses first (transformers#44779, #45488: spaces).
_SAMPLES = ("hello world", "two  spaces", "one line\nand another", "你好 世界")
_UPGRADE = "pip install -U transformers tokenizers"


def load_tokenizer(checkpoint: Checkpoint) -> Any:
    """The checkpoint's tokenizer (no remote code), after `check`.

    Where transformers' class for it loses text, tokenizer.json is taken as it is. Raises CheckpointError when there is
    none, DataError when text does not survive either way.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = Path(checkpoint.folder)
    if not any(
        file.name.startswith(("tokenizer", "vocab", "spiece")) or file.suffix in (".model", ".tiktoken")
        for file in folder.iterdir()
    ):
        raise CheckpointError(
            f"{folder} holds no tokenizer file.", f"copy the tokenizer's files beside {folder}/config.json"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        check(tokenizer)
        return tokenizer
    except DataError:
        if not (folder / "tokenizer.json").is_file():
            raise
    except Exception as error:  # tokenizer classes fail in their own ways, down to bare Exception from Rust
        if not (folder / "tokenizer.json").is_file():
            reason = f"{folder} has no tokenizer that transformers can load ({type(error).__name__}: {error})."
            raise CheckpointError(reason, f"ls {folder}") from error
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    except Exception as error:
        reason = f"{folder}/tokenizer.json cannot be read ({type(error).__name__}: {error})."
        raise CheckpointError(reason, _UPGRADE) from error
    check(tokenizer)
    return tokenizer


def check(tokenizer: Any) -> list[str]:
    """Round trips of English, a double space, a newline and Chinese; returns what is normalised, one note each.

    Raises DataError when words or the spaces between them do not survive.
    """
    notes = []
    for sample in _SAMPLES:
        ids = tokenizer(sample, add_special_tokens=False)["input_ids"]
        back = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if back == sample or back == f" {sample}":  # sentencepiece puts a space first
            continue
        if back.split() == sample.split():
            notes.append(f"the tokenizer reads {sample!r} as {back!r}")
        elif tokenizer.unk_token_id is not None and tokenizer.unk_token_id in ids:
            notes.append(f"the tokenizer has no token for parts of {sample!r}")
        elif _folded(back).split() == _folded(sample).split():
            notes.append(f"the tokenizer reads {sample!r} as {back!r}")
        else:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} turns {sample!r} into {back!r}: it loses text.", _UPGRADE
            )
    return notes


def check_vocabulary(tokenizer: Any, vocab_size: int, name: str) -> None:
    """Raises CheckpointError when the tokenizer has ids for which the model `name` has no embedding."""
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocab_size:
        raise CheckpointError(
            f"the tokenizer of {name} has ids up to {highest}, and the model embeds only those below {vocab_size}.",
            f"grep vocab_size {tokenizer.name_or_path}/config.json",
        )


def about_positions(sequence: int, config: Any, name: str) -> str | None:
    """A note when rows of `sequence` tokens are longer than what the model `name` was made for; config: its own."""
    most = getattr(config, "max_position_embeddings", None)
    if most is None or sequence <= most:
        return None
    return f"train.sequence {sequence} is longer than the {most} positions that {name} was made for"


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()

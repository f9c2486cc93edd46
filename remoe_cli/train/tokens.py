"""From text to token ids: a tokenizer that is checked at load, one BOS, one EOS."""

import unicodedata
from pathlib import Path
from typing import Any

from remoe_cli.errors import CheckpointError, DataError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.train.rows import Turn

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


class Encoder:
    """Texts and turns to ids, each document with one BOS (if the tokenizer adds one) and one EOS (if it has one)."""

    def __init__(self, tokenizer: Any, format: str) -> None:
        """format: "prefix" ("User: ...\\nAssistant: ..."), "chat" (the chat template) or "raw" (turns joined).

        Raises DataError for "chat" without a template.
        """
        self._tokenizer, self._format = tokenizer, format
        if format == "chat" and not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; data.format may be prefix or raw.",
                "the same command with --set data.format=prefix",
            )
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        self._bos = begin if begin is not None and tokenizer("a")["input_ids"][:1] == [begin] else None
        self._eos = end

    def __call__(self, said: str | list[Turn]) -> list[int]:
        """Token ids of one document; [] when it says nothing. Raises ValueError when the template refuses the turns."""
        text = self._text(said)
        if not text.strip():
            return []
        ids = list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        return self._closed(self._opened(ids))

    def _text(self, said: str | list[Turn]) -> str:
        if isinstance(said, str):
            if self._format == "chat":
                raise ValueError("plain text has no turns for a chat template")
            return said
        if not said:
            return ""
        if self._format == "chat":
            turns = [{"role": turn.role, "content": turn.text} for turn in said]
            try:
                return self._tokenizer.apply_chat_template(turns, tokenize=False)
            except Exception as error:  # a template may raise what it likes
                raise ValueError(f"the chat template refuses the turns ({error})") from error
        if self._format == "prefix":
            return "\n".join(f"{turn.role.capitalize()}: {turn.text}" for turn in said)
        return "\n\n".join(turn.text for turn in said)

    def _opened(self, ids: list[int]) -> list[int]:
        if self._bos is None:
            return ids
        start = 0
        while start < len(ids) and ids[start] == self._bos:
            start += 1
        return [self._bos, *ids[start:]]

    def _closed(self, ids: list[int]) -> list[int]:
        if self._eos is None:
            return ids
        last = max((i for i, token in enumerate(ids) if token == self._eos), default=-1)
        if last >= 0 and not self._tokenizer.decode(ids[last + 1 :]).strip():  # a template's EOS and newline
            ids = ids[:last]
        return [*ids, self._eos]


def _folded(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()

"""Texts and turns to documents: one BOS, one EOS, and which tokens belong to an answer."""

import re
from typing import Any

from remoe_cli.errors import DataError
from remoe_cli.train.packing import Document
from remoe_cli.train.rows import Said, Turn

_MARK = "remoe-answer-{}-is-here"
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # of characters


class Encoder:
    """Texts and turns to ids, each document with one BOS (if the tokenizer adds one) and one EOS (if it has one)."""

    def __init__(self, tokenizer: Any, format: str, labels: str = "all") -> None:
        """format: "prefix" ("User: ...\\nAssistant: ..."), "chat" (the chat template) or "raw" (turns joined).

        labels: "all" tokens are learned, or of conversations the "answers": every token with a character of what the
        assistant says, and the end token behind it; or what the template marks as {% generation %}. Plain text is
        learned whole. Raises DataError for "chat" without a template, and for "answers" where the tokenizer does not
        say which characters a token holds.
        """
        self._tokenizer, self._format, self._answers_only = tokenizer, format, labels == "answers"
        if format == "chat" and not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; data.format may be prefix or raw.",
                "the same command with --set data.format=prefix",
            )
        if self._answers_only and not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} does not say which characters a token holds, so "
                "data.labels=answers cannot be told from the rest.",
                "the same command with --set data.labels=all",
            )
        marked = format == "chat" and _GENERATION.search(str(tokenizer.chat_template)) is not None
        self._template_marks = marked and self._answers_only
        begin = tokenizer.bos_token_id
        self._bos = begin if begin is not None and tokenizer("a")["input_ids"][:1] == [begin] else None
        self._eos = tokenizer.eos_token_id
        special = [re.escape(token.content) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._end = re.compile(rf"\s*(?:{'|'.join([*special, '$'])})")

    def __call__(self, said: Said) -> Document:
        """One document, without ids when it says nothing. Raises ValueError when the template refuses the turns, or
        rewrites the answers, so that they cannot be found in its text."""
        masked = self._answers_only and not isinstance(said, str)
        if self._template_marks and said and not isinstance(said, str):
            ids, learned = self._marked_by_template(said)
        else:
            text, answers = self._rendered(said, masked)
            ids, learned = self._tokenised(text, answers) if text.strip() else ([], [])
        if not ids:
            return Document([])
        ids, learned = self._closed(*self._opened(ids, learned))
        return Document(ids, learned if masked else None)

    def _rendered(self, said: Said, masked: bool) -> tuple[str, list[Span] | None]:
        """The document as text, and where in it the answers lie (None: no matter)."""
        if isinstance(said, str):
            if self._format == "chat":
                raise ValueError("plain text has no turns for a chat template")
            return said, None
        if self._format == "chat" and said:
            text = self._by_template(said)
            return text, self._answers_in(text, said) if masked else None
        text, answers = "", []
        for turn in said:
            if self._format == "prefix":
                text += ("\n" if text else "") + f"{turn.role.capitalize()}: "
            elif text:
                text += "\n\n"
            if _is_answer(turn):
                answers.append((len(text), len(text) + len(turn.text)))
            text += turn.text
        return text, answers if masked else None

    def _by_template(self, said: list[Turn], **options: Any) -> Any:
        turns = [{"role": turn.role, "content": turn.text} for turn in said]
        try:
            return self._tokenizer.apply_chat_template(turns, **{"tokenize": False, **options})
        except Exception as error:  # a template may raise what it likes
            raise ValueError(f"the chat template refuses the turns ({error})") from error

    def _marked_by_template(self, said: list[Turn]) -> tuple[list[int], list[bool]]:
        options = {"return_assistant_tokens_mask": True, "return_dict": True, "tokenizer_kwargs": {"verbose": False}}
        found = self._by_template(said, tokenize=True, **options)
        return list(found["input_ids"]), [bool(flag) for flag in found["assistant_masks"]]

    def _answers_in(self, text: str, said: list[Turn]) -> list[Span]:
        """Where the template put the answers, found by rendering marks in their place; it may trim them."""
        marked = [turn._replace(text=_MARK.format(n)) if _is_answer(turn) else turn for n, turn in enumerate(said)]
        around = re.split(_MARK.format(r"\d+"), self._by_template(marked))
        for trim in (str, str.strip, str.lstrip, str.rstrip):
            answers = [trim(turn.text) for turn in said if _is_answer(turn)]
            if len(around) != len(answers) + 1:
                break
            rebuilt, spans = around[0], []
            for answer, after in zip(answers, around[1:], strict=True):
                spans.append((len(rebuilt), len(rebuilt) + len(answer)))
                rebuilt += answer + after
            if rebuilt == text:
                return spans
        raise ValueError("the chat template rewrites the answers, so that data.labels=answers cannot find them")

    def _tokenised(self, text: str, answers: list[Span] | None) -> tuple[list[int], list[bool]]:
        masked = answers is not None
        found = self._tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=masked)
        ids = list(found["input_ids"])
        if answers is None:
            return ids, [True] * len(ids)
        inside = bytearray(len(text) + 1)
        for begin, end in answers:
            behind = self._end.match(text, end)
            last = behind.end() if behind else end
            inside[begin:last] = b"\1" * (last - begin)
        return ids, [any(inside[begin : max(end, begin + 1)]) for begin, end in found["offset_mapping"]]

    def _opened(self, ids: list[int], learned: list[bool]) -> tuple[list[int], list[bool]]:
        if self._bos is None:
            return ids, learned
        start = 0
        while start < len(ids) and ids[start] == self._bos:
            start += 1
        return [self._bos, *ids[start:]], [False, *learned[start:]]

    def _closed(self, ids: list[int], learned: list[bool]) -> tuple[list[int], list[bool]]:
        if self._eos is None:
            return ids, learned
        last = max((i for i, token in enumerate(ids) if token == self._eos), default=-1)
        if last >= 0 and not self._tokenizer.decode(ids[last + 1 :]).strip():  # a template's EOS and newline
            return ids[: last + 1], learned[: last + 1]
        return [*ids, self._eos], [*learned, learned[-1]]


def _is_answer(turn: Turn) -> bool:
    return turn.role == "assistant" and turn.text.strip() != ""

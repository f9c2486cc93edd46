"""Token ids to text as they come: no character is shown before all of it is there, nor what may begin a stop text."""

from collections.abc import Sequence
from typing import Any

_UNFINISHED = "\ufffd"  # what a decoder makes of bytes that are no character, or not yet


class Pieces:
    """The text of one answer, piece by piece: together what the tokenizer makes of all ids at once, special tokens left out.

    stops: texts of which the first to come ends the answer, `stopped` from then on; nothing of it or behind it is given. An id is
    decoded together with the few before it, since what a token says depends on them (spaces, bytes of one character).
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids: list[
            int
        ] = []  # those whose text is out and which the next ones are decoded with, and those not yet out
        self._n_out = 0
        self._held = ""
        self.text, self.stopped = "", False

    def add(self, token: int) -> str:
        self._ids.append(token)
        before, now = self._decoded(self._ids[: self._n_out]), self._decoded(self._ids)
        if now.endswith(_UNFINISHED) or len(now) <= len(before):
            return ""
        self._ids, self._n_out = self._ids[self._n_out :], len(self._ids) - self._n_out
        return self._given(now[len(before) :], last=False)

    def end(self) -> str:
        """What was held back."""
        before, now = self._decoded(self._ids[: self._n_out]), self._decoded(self._ids)
        self._ids, self._n_out = [], 0
        return self._given(now[len(before) :], last=True)

    def _decoded(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _given(self, piece: str, last: bool) -> str:
        if self.stopped:
            return ""
        whole = self._held + piece
        found = [at for stop in self._stops if (at := whole.find(stop)) >= 0]
        self.stopped = bool(found)
        keep = min(found) if found else len(whole) if last else len(whole) - self._beginning(whole)
        given, self._held = whole[:keep], "" if found else whole[keep:]
        self.text += given
        return given

    def _beginning(self, text: str) -> int:
        """Characters at its end that may begin a stop text."""
        lengths = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        return max(lengths, default=0)

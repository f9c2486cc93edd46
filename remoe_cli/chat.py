"""remoe chat: a conversation, turn by turn, with the experts left on disk; what was read and loaded for one turn serves the next."""

import re
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from remoe_cli import run as runs
from remoe_cli.console import note
from remoe_cli.decode import opened, room_of, taken
from remoe_cli.errors import command, DataError
from remoe_cli.generate import configure, of_run, single, with_slots
from remoe_cli.measure import decode_options
from remoe_cli.offload import OffloadedDecoder
from remoe_cli.offload.past import Past
from remoe_cli.offload.sampling import Sampling
from remoe_cli.report.renderers.generate import line, session
from remoe_cli.talk.say import end_tokens, row_of, say
from remoe_cli.talk.screen import Screen
from remoe_cli.talk.turns import Template, Turn

CONTEXT = 4096  # tokens, where --context does not say and the model has room for them
_COMMAND = re.compile(r"/[a-z]+")
_COMMANDS = "/quit or Ctrl-D ends, /reset forgets the turns, /stats tells the figures; Ctrl-C ends an answer"


@dataclass(frozen=True)
class Asked(decode_options.Asked):
    """The options of `remoe chat` as given. tokens: of an answer; context: of the turns that it is given."""

    cache: str | None = None
    tokens: str = "512"
    warm: str = "carry"
    system: str | None = None
    template: str = "auto"

    @property
    def flexible(self) -> bool:
        return self.tokens == Asked.tokens

    def command(self, model: str, **changes: Any) -> str:
        return command("chat", model, **self.given(**changes))


def chat(model: str | None, asked: Asked) -> None:
    """Answers what stdin says, line by line, until it ends. model: None for the latest run. Raises RemoeError."""
    model, asked = of_run(str(runs.find(None).folder) if model is None else model, asked)
    found = single(model, asked)

    def again(**changes: Any) -> str:
        return asked.command(model, **changes)

    template = Template(found.tokenizer, asked.template, model, again)
    n_new, room = found.plan.tokens[0], room_of(found.checkpoint.config, found.plan, asked, model)
    if asked.flexible and room is not None:
        n_new = min(n_new, room + 1 - asked.context if asked.context else room // 2 + 1)
        room += 1 - n_new
    context = asked.context or min(CONTEXT, room or CONTEXT)
    found, notes = with_slots(found, context + n_new)
    with opened(model, asked, found, context + n_new) as (decoder, tuned):
        decoder.apply_gates(*tuned)
        configure(decoder, asked, found)
        for sentence in [*notes, *taken(decoder, found.plan)]:
            note(f"Note: {sentence}")
        talk = _Talk(
            decoder, found.tokenizer, template, end_tokens(found.checkpoint, found.tokenizer), context, n_new,
            found.plan.sampling, [Turn("system", asked.system)] if asked.system else [],
        )  # fmt: skip
        talk.check()
        if sys.stdin.isatty():
            note(_COMMANDS)
        with _ctrl_c() as ctrl_c:
            for text in _lines(ctrl_c):
                if _COMMAND.fullmatch(text):
                    if not talk.obey(text):
                        break
                elif text:
                    talk.answer(text, ctrl_c)
        if talk.rows:
            note(talk.figures())


class _CtrlC:
    """What Ctrl-C does. At the prompt of a terminal it clears the line. While an answer comes the first one ends it, after the
    token that is being made, or at once where there is none yet. Another one then ends the conversation."""

    def __init__(self) -> None:
        self.pressed = 0
        self.told = False  # a token of this answer

    def begin(self) -> None:
        self.pressed, self.told = 0, False

    def ends_answer(self) -> bool:
        self.told = True
        return self.pressed > 0

    def press(self, *_: object) -> None:
        self.pressed += 1
        if self.pressed > 1 or not self.told:
            raise KeyboardInterrupt


@contextmanager
def _ctrl_c() -> Iterator[_CtrlC]:
    found = _CtrlC()
    before = signal.signal(signal.SIGINT, found.press)
    try:
        yield found
    finally:
        signal.signal(signal.SIGINT, before)


def _lines(ctrl_c: _CtrlC) -> Iterator[str]:
    """What is typed, or comes through a pipe, without blanks around it. Raises DataError for what is not UTF-8."""
    number, terminal = 0, sys.stdin.isatty()
    if terminal:
        with suppress(ImportError):
            import readline  # noqa: F401  lines can be edited and had again
    while True:
        number += 1
        try:
            text = _typed() if terminal else sys.stdin.buffer.readline().decode()
            text.encode()
        except EOFError:
            return
        except UnicodeError:
            if not terminal:
                raise DataError(f"line {number} on stdin is not UTF-8 text.", "iconv -t UTF-8") from None
            note("That is not UTF-8 text.")
            continue
        except KeyboardInterrupt:
            if not terminal or ctrl_c.pressed > 1:
                raise
            note("\n/quit or Ctrl-D ends the conversation, and so does Ctrl-C again")
            continue
        if not text and not terminal:
            return
        ctrl_c.begin()
        yield text.strip()
        ctrl_c.begin()


def _typed() -> str:
    """One line; raises EOFError at the end."""
    if sys.stdout.isatty():
        return input("> ")
    sys.stderr.write("> ")
    sys.stderr.flush()
    if not (text := sys.stdin.readline()):
        raise EOFError
    return text


class _Talk:
    """One conversation. system: the turns that it begins with and never loses."""

    def __init__(
        self,
        decoder: OffloadedDecoder,
        tokenizer: Any,
        template: Template,
        ends: frozenset[int],
        context: int,
        n_new: int,
        sampling: Sampling | None,
        system: list[Turn],
    ) -> None:
        self._decoder, self._tokenizer, self._template, self._ends = decoder, tokenizer, template, ends
        self._context, self._n_new, self._sampling, self._system = context, n_new, sampling, system
        self.rows: list[dict[str, Any]] = []
        self._forget()

    def _forget(self) -> None:
        self._turns, self._past, self._n_answers = list[Turn](), Past(), 0

    def check(self) -> None:
        """Raises DataError where no turn could ever be answered."""
        self._template.ids([*self._system, Turn("user", "?")])

    def obey(self, order: str) -> bool:
        """Whether the conversation goes on."""
        if order == "/quit":
            return False
        if order == "/reset":
            self._forget()
            note("The turns are forgotten; the experts stay in the cache.")
        elif order == "/stats":
            note(self.figures())
        else:
            note(_COMMANDS if order == "/help" else f"There is no {order}: {_COMMANDS}")
        return True

    def figures(self) -> str:
        return session(self.rows, self._decoder.n_experts, len(self._past.ids), self._context)

    def answer(self, text: str, ctrl_c: _CtrlC) -> None:
        """Says the answer to a turn; one that is too long, or that Ctrl-C ended before a word was said, is forgotten."""
        before = list(self._turns)
        self._turns.append(Turn("user", text))
        ids = self._fitting()
        if len(ids) > self._context:
            note(f"That takes {len(ids)} tokens, more than --context {self._context}: say less.")
            self._turns = before
            return
        rest = self._past.rest(ids)
        sampling = self._sampling and replace(self._sampling, seed=(self._sampling.seed + self._n_answers) % 2**63)
        try:
            with Screen() as screen:
                said = say(
                    self._decoder, self._tokenizer, self._past, rest, self._n_new, sampling, ends=self._ends,
                    stops=self._template.stops, screen=screen, stop=ctrl_c.ends_answer,
                )  # fmt: skip
        except KeyboardInterrupt:
            if ctrl_c.pressed > 1:
                raise
            note("Ended before the first word; that turn is forgotten.")
            self._turns = before
            return
        self._turns.append(Turn("assistant", said.text))
        self._n_answers += 1
        self.rows.append({**row_of(self._decoder, said), "prompt_tokens": len(ids), "read_tokens": len(rest)})
        note(line(self.rows[-1]))

    def _fitting(self) -> list[int]:
        """The turns' ids. Where they are too many, the oldest turns are forgotten until half of the context is free, so that
        this is not to be done again at every turn."""
        ids, n_before = self._template.ids([*self._system, *self._turns]), len(self._turns)
        if len(ids) > self._context:
            while len(ids) > self._context // 2 and len(self._turns) > 1:
                del self._turns[:2]
                ids = self._template.ids([*self._system, *self._turns])
            if gone := n_before - len(self._turns):
                note(
                    f"Note: the {gone} oldest turns are forgotten: all together take more than --context {self._context}"
                )
        return ids

"""The turns of a conversation as a model reads them: by its tokenizer's chat template, or as lines with roles."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from remoe_cli.errors import DataError, UsageError

TEMPLATES = ("auto", "raw")
_ROLES = {"system": "System", "user": "User", "assistant": "Assistant"}

Role = Literal["system", "user", "assistant"]


class Turn(NamedTuple):
    role: Role
    text: str


class Template:
    """kind: "auto" is the tokenizer's own chat template; "raw" writes `User: ...`, a line a turn, and lets the model go on behind
    `Assistant:`. again: the command with other options.

    stops: texts that end an answer beside the end tokens. Raises UsageError for another kind, DataError for "auto" where the
    tokenizer has no template.
    """

    def __init__(self, tokenizer: Any, kind: str, model: str, again: Callable[..., str]) -> None:
        if kind not in TEMPLATES:
            raise UsageError(f"--template is {' or '.join(TEMPLATES)}, not {kind!r}.", again(template=None))
        if kind == "auto" and not tokenizer.chat_template:
            raise DataError(
                f"the tokenizer of {model} has no chat template, so this is no model for conversations; raw writes turns as text.",
                again(template="raw"),
            )
        self._tokenizer, self._raw, self._again = tokenizer, kind == "raw", again
        self.stops = tuple(f"\n{name}:" for name in _ROLES.values()) if self._raw else ()

    def ids(self, turns: Sequence[Turn]) -> list[int]:
        """Up to where the answer begins. Raises DataError where the template refuses the turns."""
        if self._raw:
            # an answer begins with a blank of its own
            lines = [f"{_ROLES[turn.role]}:{' ' * (turn.role != 'assistant')}{turn.text}" for turn in turns]
            return list(self._tokenizer("\n".join([*lines, f"{_ROLES['assistant']}:"])).input_ids)
        said = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            found = self._tokenizer.apply_chat_template(said, add_generation_prompt=True, return_dict=True)
        except Exception as error:  # a template may raise what it likes
            without = {"system": None} if turns[0].role == "system" else {"template": "raw"}
            raise DataError(f"the chat template refuses the turns: {error}.", self._again(**without)) from error
        return list(found["input_ids"])

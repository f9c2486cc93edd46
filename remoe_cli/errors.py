"""Every mistake a user can make, as one small tree. Each error carries the next command to run."""

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_LONGEST = 2000  # characters; names in a damaged file may have any number


class RemoeError(Exception):
    """message: what was wrong and what is allowed, in one line. hint: the next command to run."""

    exit_code = 1

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = _shown(" ".join(message.split()))
        self.hint = _shown(hint)

    def __str__(self) -> str:
        return f"{self.message}{'' if self.message.endswith(('.', '!', '?', ':')) else '.'} Try: {self.hint}"


class UsageError(RemoeError):
    """An option or argument that cannot be used as given."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe that is missing, or holds an unknown key or a value out of range."""


class RunError(RemoeError):
    """No run, an unfinished run, or a folder that cannot be written."""


class CheckpointError(RemoeError):
    """A model folder that is incomplete or damaged."""


class FamilyError(RemoeError):
    """A model that remoe cannot tune: dense, unknown, or in an unsupported layout."""


class DeltaError(RemoeError):
    """Not a delta, or a delta of another base."""


class DataError(RemoeError):
    """Texts that cannot be used: empty, without a text field, not UTF-8."""


class TraceError(RemoeError):
    """Not a routing trace, a damaged one, one of another version, or a foreign one that cannot be imported."""


class HubError(RemoeError):
    """The Hub refused or was not reached."""


class CacheError(RemoeError):
    """A cache size or policy that cannot serve this model."""


class MemoryShortError(CacheError):
    """Too little memory. changes: options with which it fits, None for one that is to go; where: what else has to be;
    tokens: how many fit, of all requests that are decoded together, where these are what takes too much, else 0."""

    def __init__(
        self, message: str, hint: str, changes: Mapping[str, Any] | None = None, where: str = "", tokens: int = 0
    ) -> None:
        super().__init__(message, hint)
        self.changes, self.where, self.tokens = changes, where, tokens


class TrainingError(RemoeError):
    """Training stopped by itself: a loss that is not finite."""


def _shown(text: str) -> str:
    """With a mark for what cannot be printed, such as a terminal's control characters, and for what is cut off."""
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    return "".join(one if one.isprintable() else "\ufffd" for one in shown)


def command(*words: object, **options: object) -> str:
    """`remoe WORDS --option VALUE ...`, quoted for a shell. Options that are None or False are left out, True stands
    alone; one letter takes one dash."""
    parts = ["remoe", *map(str, words)]
    for name, value in options.items():
        if value is None or value is False:
            continue
        parts.append(f"-{name}" if len(name) == 1 else f"--{name.replace('_', '-')}")
        parts += [] if value is True else [str(value)]
    return shlex.join(parts)


@contextmanager
def instead(hint: str, of: type[RemoeError] = RemoeError) -> Iterator[None]:
    """Errors of that kind in the block keep their message and get this next command."""
    try:
        yield
    except of as error:
        raise type(error)(error.message, hint) from None

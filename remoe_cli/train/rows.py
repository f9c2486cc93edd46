"""What a row of a data set says: plain text or turns of a conversation, whatever its fields are called."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question")
ANSWERS = ("completion", "response", "output", "answer")
TEXTS = ("text", "content")
READABLE = "text, messages, conversations, prompt + completion or response, instruction + output, question + answer"

# ShareGPT and its kin write other words for the three roles of a chat template.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}


class Turn(NamedTuple):
    """role: "system", "user", "assistant", or what else the data set says."""

    role: str
    text: str


class Shape(NamedTuple):
    """Which fields hold what. kind: "text", "turns" or "pair"."""

    kind: str
    fields: tuple[str, ...]

    def __str__(self) -> str:
        return " + ".join(self.fields)


def detect(fields: Iterable[str], format: str) -> Shape | None:
    """The shape that a row with these fields has; None when there is no text in it.

    With several candidates a conversation wins over a pair and a pair over text; for the format "raw" text wins.
    """
    present = set(fields)
    found = [Shape("turns", (name,)) for name in CONVERSATIONS if name in present]
    pair = [next((name for name in names if name in present), None) for names in (PROMPTS, ANSWERS)]
    if pair[0] and pair[1]:
        found.append(Shape("pair", (pair[0], pair[1])))
    texts = [Shape("text", (name,)) for name in TEXTS if name in present]
    ordered = [*texts, *found] if format == "raw" else [*found, *texts]
    return ordered[0] if ordered else None


def read(row: Mapping[str, Any], shape: Shape) -> str | list[Turn]:
    """Text as it is, or turns; "" or [] when the row is empty. Raises ValueError when a field holds something else."""
    if shape.kind == "text":
        return _text(row.get(shape.fields[0]), shape.fields[0])
    if shape.kind == "turns":
        return _turns(row.get(shape.fields[0]), shape.fields[0])
    prompt, answer = (row.get(name) for name in shape.fields)
    if isinstance(prompt, list) or isinstance(answer, list):  # the conversational form of prompt + completion
        return _turns(prompt, shape.fields[0]) + _turns(answer, shape.fields[1])
    asked, answered = _text(prompt, shape.fields[0]), _text(answer, shape.fields[1])
    if not asked.strip() or not answered.strip():
        return []
    if more := _text(row.get("input"), "input").strip():
        asked = f"{asked}\n\n{more}"
    system = _text(row.get("system_prompt") or row.get("system"), "system").strip()
    return [*([Turn("system", system)] if system else []), Turn("user", asked), Turn("assistant", answered)]


def _turns(value: Any, field: str) -> list[Turn]:
    """value: a list of turns, or one list a key (how `datasets` gives a Sequence of structs)."""
    if value is None:
        return []
    if isinstance(value, Mapping) and value and all(isinstance(column, list) for column in value.values()):
        value = [dict(zip(value, items, strict=True)) for items in zip(*value.values(), strict=True)]
    if not isinstance(value, list):
        raise ValueError(f"the field {field!r} holds no list of turns")
    turns = []
    for item in value:
        role = item.get("role", item.get("from")) if isinstance(item, Mapping) else None
        if role is None:
            raise ValueError(f"a turn of {field!r} has neither role + content nor from + value")
        role = str(role).lower()
        said = item["content"] if "content" in item else item.get("value")
        turns.append(Turn(_ROLES.get(role, role), _text(said, field)))
    return turns if any(turn.text.strip() for turn in turns) else []


def _text(value: Any, field: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if isinstance(value, list):  # content in parts, of which only those with text count
        return "".join(str(part.get("text") or "") for part in value if isinstance(part, Mapping))
    raise ValueError(f"the field {field!r} holds {type(value).__name__}, not text")

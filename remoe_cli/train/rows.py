"""What a row of a data set says: plain text or turns of a conversation, whatever its fields are called."""

from collections.abc import Mapping
from typing import Any, NamedTuple

CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input")
ANSWERS = ("completion", "response", "output", "answer", "solution", "answerKey")
CONTINUATION = ("prompt", "canonical_solution")  # code and how it goes on: one text, no roles
TEXTS = ("text", "content")
QUESTIONS = ("turns", *PROMPTS)
READABLE = (
    "text, messages, conversations, turns, prompt (alone, or + completion or response), instruction + output, "
    "question + answer"
)

# ShareGPT and its kin write other words for the three roles of a chat template.
_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant"}

Row = Mapping[str, Any]


class Turn(NamedTuple):
    """role: "system", "user", "assistant", or what else the data set says."""

    role: str
    text: str


Said = str | list[Turn]


class Shape(NamedTuple):
    """Which fields hold what. kind: "text", "continuation", "turns", "pair" or "questions"."""

    kind: str
    fields: tuple[str, ...]

    def __str__(self) -> str:
        first, last = self.fields[0], self.fields[-1]
        return {
            "text": f"{first} as plain text",
            "continuation": f"{first} and {last} joined as plain text",
            "turns": f"{first} as turns",
            "pair": f"{first} as user, {last} as assistant",
            "questions": f"{first} as user, without answers",
        }[self.kind]

    @property
    def plain(self) -> bool:
        """No turns in it."""
        return self.kind in ("text", "continuation")


def detect(row: Row, format: str) -> Shape | None:
    """The shape of a row with these fields; None when there is no text in it.

    With several candidates a conversation wins over a pair, a pair over text, text over questions alone; for the format
    "raw" text wins.
    """
    pair = [next((name for name in names if name in row), None) for names in (PROMPTS, ANSWERS)]
    texts = [Shape("text", (name,)) for name in TEXTS if name in row]
    found = [Shape("turns", (name,)) for name in CONVERSATIONS if name in row]
    if pair[0] and pair[1]:
        found.append(Shape("pair", (pair[0], pair[1])))
    if all(name in row for name in CONTINUATION):
        found.append(Shape("continuation", CONTINUATION))
    questions = [Shape("questions", (name,)) for name in QUESTIONS if name in row]
    ordered = [*texts, *found, *questions] if format == "raw" else [*found, *texts, *questions]
    return ordered[0] if ordered else None


def read(row: Row, shape: Shape) -> Said:
    """Text as it is, or turns; "" or [] when the row is empty. Raises ValueError when a field holds something else."""
    values = [row.get(name) for name in shape.fields]
    if shape.plain:
        return "".join(_text(value, name) for value, name in zip(values, shape.fields, strict=True))
    if shape.kind == "turns":
        return _turns(values[0], shape.fields[0])
    if shape.kind == "questions":
        return _questions(values[0], shape.fields[0])
    prompt, answer = values
    if isinstance(prompt, list) or isinstance(answer, list):  # the conversational form of prompt + completion
        return _turns(prompt, shape.fields[0]) + _turns(answer, shape.fields[1])
    return _pair(row, shape)


def _pair(row: Row, shape: Shape) -> list[Turn]:
    asking, answering = shape.fields
    asked, answer, choices = _text(row.get(asking), asking), row.get(answering), _choices(row.get("choices"))
    if choices:
        lettered = [f"{letter}. {choice}" for letter, choice in choices]
        asked = "\n".join([asked, *lettered])
        if type(answer) is int and 0 <= answer < len(lettered):
            answer = lettered[answer]
    answered = _text(answer, answering)
    if not asked.strip() or not answered.strip():
        return []
    more = _text(row.get("input"), "input").strip()
    if more and asking != "input":
        asked = f"{asked}\n\n{more}"
    system = _text(row.get("system_prompt") or row.get("system"), "system").strip()
    return [*([Turn("system", system)] if system else []), Turn("user", asked), Turn("assistant", answered)]


def _choices(value: Any) -> list[tuple[str, str]]:
    """Letter and text of each; value: texts, or labels and texts side by side. [] where it is neither."""
    if isinstance(value, Mapping):
        letters, texts = value.get("label"), value.get("text")
    else:
        letters, texts = [chr(ord("A") + i) for i in range(26)], value
    if not (isinstance(letters, list) and isinstance(texts, list) and all(isinstance(text, str) for text in texts)):
        return []
    return list(zip(map(str, letters), texts))


def _questions(value: Any, field: str) -> list[Turn]:
    """value: one question, a list of them, or turns."""
    asked = [value] if isinstance(value, str) else value
    if isinstance(asked, list) and all(isinstance(one, str) for one in asked):
        return [Turn("user", one) for one in asked if one.strip()]
    return _turns(value, field)


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

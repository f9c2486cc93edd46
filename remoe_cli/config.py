"""Defaults of options from a file and from the environment: command line > REMOE_* > file > the command's own default.

The file is TOML, one table a command, its keys are the long names of options: `[eval]`, `cache = "6,12"`. The variable of the same
option is REMOE_EVAL_CACHE. A repeatable option takes a list, or in a variable words as a shell would split them.
"""

import difflib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from remoe_cli.errors import command, UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

NAME = "REMOE_CONFIG"
_YES, _NO = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
Words = tuple[str, ...]  # a command's words after `remoe`; () are the options of remoe itself
Kind = Literal["flag", "list", "value"]
Value = bool | str | list[str]


class Default(NamedTuple):
    """Of one option: value as the command line would give it; source: the variable, or the file and table, for a person."""

    words: Words
    option: str
    value: Value
    source: str


def place(environment: Mapping[str, str] = os.environ) -> Path:
    """$REMOE_CONFIG, else remoe/config.toml in the user's folder of settings; it need not be there."""
    if named := environment.get(NAME):
        return Path(named)
    return Path(environment.get("XDG_CONFIG_HOME") or Path.home() / ".config", "remoe/config.toml")


def defaults(
    commands: Mapping[Words, Mapping[str, Kind]], environment: Mapping[str, str] = os.environ
) -> list[Default]:
    """What the file and then the environment say of these commands' options, at most one Default an option.

    Raises UsageError for a file that $REMOE_CONFIG names and that is not there, one that is no TOML, a name that is no
    command's or option's (the nearest is given), and a value of another kind than the option's.
    """
    path = place(environment)
    found = {(one.words, one.option): one for one in _of_table(_read(path, environment), (), commands, path)}
    found |= {(one.words, one.option): one for one in _of_environment(commands, environment)}
    return list(found.values())


def variable(words: Words, option: str) -> str:
    """REMOE_TRACE_IMPORT_FORMAT for --format of `remoe trace import`."""
    return "_".join(["REMOE", *words, option]).upper().replace("-", "_")


def _read(path: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        if not environment.get(NAME):
            return {}
        raise UsageError(f"{NAME} names {path}, and there is no such file.", f"unset {NAME}") from None
    except OSError as error:
        raise UsageError(f"the settings {path} cannot be read ({error.strerror}).", f"ls -l {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"the settings {path} are not TOML: {error}.", _mend(path)) from None


def _of_table(
    table: Mapping[str, Any], words: Words, commands: Mapping[Words, Mapping[str, Kind]], path: Path
) -> Iterator[Default]:
    options = commands.get(words, {})
    below = {known[len(words)] for known in commands if len(known) > len(words) and known[: len(words)] == words}
    for key, value in table.items():
        shown = f"[{'.'.join(words)}] {key}" if words else key
        if isinstance(value, dict) and key in below:
            yield from _of_table(value, (*words, key), commands, path)
        elif key in options:
            yield Default(
                words, key, _valued(value, options[key], f"{path}: {shown}", _mend(path)), f"{shown} in {path}"
            )
        else:
            what = f"option of remoe {' '.join(words)}".rstrip() + (" or command" if below else "")
            near = _nearest(key, [*options, *below])
            raise UsageError(f"{path}: {shown} is no {what}{near}", command(*words, help=True))


def _of_environment(commands: Mapping[Words, Mapping[str, Kind]], environment: Mapping[str, str]) -> Iterator[Default]:
    known = {variable(words, name): (words, name) for words, options in commands.items() for name in options}
    verbs = tuple(variable(words[:1], "") for words in commands if words)
    for name, text in environment.items():
        if name in known and text:
            words, option = known[name]
            hint = f"unset {name}"
            yield Default(words, option, _valued(text, commands[words][option], name, hint, written=True), name)
        elif name.startswith(verbs) and name not in known:
            raise UsageError(f"the variable {name} belongs to no option{_nearest(name, list(known))}", f"unset {name}")


def _valued(value: Any, kind: Kind, where: str, hint: str, *, written: bool = False) -> Value:
    """The value in the form of the command line. written: it is the text of a variable."""
    if kind == "flag":
        word = str(value).lower()
        if isinstance(value, bool) or (written and word in (*_YES, *_NO)):
            return word in _YES
        raise UsageError(f"{where} is true or false, not {value!r}.", hint)
    if kind == "list":
        if written:
            try:
                return shlex.split(value)
            except ValueError as error:
                raise UsageError(f"{where} cannot be split into words: {error}.", hint) from None
        if isinstance(value, list) and not any(isinstance(one, (dict, list, bool)) for one in value):
            return [str(one) for one in value]
        raise UsageError(f'{where} is a list, such as ["A", "B"], not {value!r}.', hint)
    if isinstance(value, (str, int, float)) and not isinstance(value, bool):
        return str(value)
    raise UsageError(f'{where} is a text or a number, such as "6,12", not {value!r}.', hint)


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {close[0]}?" if close else ""


def _mend(path: Path) -> str:
    return f"mend {shlex.quote(str(path))}, or {NAME}=OTHER_FILE"

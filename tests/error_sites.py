"""Every place where remoe makes one of its errors, and which of them a test has provoked.

`sites()` reads the sources; `record()` notes, in this process and (through recorder/sitecustomize.py) in those it starts, where
errors are made. conftest.py compares both when the whole suite has passed: a place that nothing provoked and that
unseen_errors.txt does not list is a failure. That list may only shrink: REMOE_ERRORS=shrink make test takes from it what was seen.

    REMOE_ERRORS_SEEN=/tmp/seen python -m pytest tests/test_x.py    # keeps what was seen, over several runs
    python tests/error_sites.py /tmp/seen                           # prints what was not
"""

import ast
import contextlib
import functools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "remoe_cli"
LISTED = TESTS / "unseen_errors.txt"
FOLDER = "REMOE_ERRORS_SEEN"
_PREFIX = "remoe-errors-"


class Site(NamedTuple):
    """file: below the package; first, last: lines of the call that makes the error; name: it is known by, lines apart."""

    file: str
    first: int
    last: int
    name: str


@functools.cache
def sites() -> list[Site]:
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))
    }
    kinds = _kinds(list(trees.values()))
    found: list[Site] = []
    for file, tree in trees.items():
        names: list[str] = []
        for inside, call in _calls(tree, kinds):
            name = (
                f"{file} {inside} {call.func.id if isinstance(call.func, ast.Name) else call.func.attr}: {_text(call)}"
            )
            names.append(name)
            number = names.count(name)
            found.append(Site(file, call.lineno, call.end_lineno, name if number == 1 else f"{name} #{number}"))
    return found


def listed() -> list[str]:
    return [line for line in LISTED.read_text().splitlines() if line and not line.startswith("#")]


def write(names: list[str]) -> None:
    head = [line for line in LISTED.read_text().splitlines() if line.startswith("#")]
    LISTED.write_text("\n".join([*head, *names]) + "\n")


def unseen(folder: Path) -> list[str]:
    """The names of the sites that no process recorded in this folder."""
    spots = {tuple(line.rsplit(":", 1)) for path in folder.iterdir() for line in path.read_text().splitlines()}
    return [
        site.name
        for site in sites()
        if not any(file == site.file and site.first <= int(line) <= site.last for file, line in spots)
    ]


def folder() -> Path:
    """Where this run and the processes it starts record; made by the first that asks."""
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-")
    path = Path(os.environ[FOLDER])
    path.mkdir(parents=True, exist_ok=True)
    return path


def forget() -> None:
    """Removes the folder, unless it was named from outside, or by a run of pytest that started this one."""
    if (path := folder()).name.startswith(f"{_PREFIX}{os.getpid()}-"):
        shutil.rmtree(path, ignore_errors=True)


def record() -> None:
    """From now on every error that is made leaves a line "file:line" in the folder, at once: a process may be killed."""
    from remoe_cli import errors

    make, seen = errors.RemoeError.__init__, set()
    if hasattr(make, "recording"):
        return

    def init(self, *arguments, **named):
        make(self, *arguments, **named)
        frame = sys._getframe(1)
        while frame is not None and (frame.f_code.co_filename == errors.__file__ or frame.f_locals.get("self") is self):
            frame = frame.f_back  # out of the error's own constructors
        spot = frame and (frame.f_code.co_filename, frame.f_lineno)
        if spot and spot not in seen and Path(spot[0]).is_relative_to(PACKAGE):
            seen.add(spot)
            with contextlib.suppress(OSError), open(Path(os.environ[FOLDER]) / str(os.getpid()), "a") as lines:
                lines.write(f"{Path(spot[0]).relative_to(PACKAGE).as_posix()}:{spot[1]}\n")

    init.recording = True
    errors.RemoeError.__init__ = init


def _kinds(trees: list[ast.Module]) -> set[str]:
    """RemoeError and all classes made from it, by name."""
    classes = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    kinds = {"RemoeError"}
    while more := {name for name, bases in classes.items() if kinds & set(bases)} - kinds:
        kinds |= more
    return kinds


def _calls(node: ast.AST, kinds: set[str], inside: str = "") -> Iterator[tuple[str, ast.Call]]:
    """(function, call) of every error that is made, in the order of the source."""
    for child in ast.iter_child_nodes(node):
        within = inside
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            within = f"{inside}.{child.name}".lstrip(".")
        if isinstance(child, ast.Call):
            name = child.func.id if isinstance(child.func, ast.Name) else getattr(child.func, "attr", "")
            if name in kinds:
                yield inside, child
        yield from _calls(child, kinds, within)


def _text(call: ast.Call) -> str:
    """The message as it is written, with {} for what is put in."""
    parts = [
        ast.unparse(one) if not isinstance(one, (ast.Constant, ast.JoinedStr)) else _plain(one) for one in call.args[:1]
    ]
    return " ".join("".join(parts).split())[:90]


def _plain(node: ast.expr) -> str:
    if isinstance(node, ast.JoinedStr):
        return "".join(str(one.value) if isinstance(one, ast.Constant) else "{}" for one in node.values)
    return str(node.value)


if __name__ == "__main__":
    print("\n".join(unseen(Path(sys.argv[1]))))

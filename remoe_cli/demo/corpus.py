"""The demo's text: the running Python's own standard library, so nothing is downloaded or shipped.

Two kinds of document: module sources (code) and the reference prose of `pydoc_data.topics` (prose).
Whole modules go to one split, chosen by a hash of the name, so that no module is in both.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HELD_OUT_SHARE = 10  # one name in ten is held out
# Left out: what distributions package apart, tables without language, and files that name the machine.
_SKIPPED = {
    "__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "ensurepip",
    "tkinter", "turtledemo", "turtle.py", "distutils", "pydoc_data", "encodings", "msilib",
}  # fmt: skip
_SKIPPED_PREFIXES = ("_sysconfigdata", "config-", "lib-dynload")


class Document(NamedTuple):
    name: str
    domain: str  # "code" or "prose"
    text: str


def documents(split: str) -> list[Document]:
    """Documents of one split, "train" or "heldout", in the order of their names.

    Raises ValueError for another split name.
    """
    if split not in ("train", "heldout"):
        raise ValueError(f"split is 'train' or 'heldout', not {split!r}")
    return [d for d in _all() if _is_held_out(d.name) == (split == "heldout")]


def fingerprint() -> str:
    """sha256 over the names and texts of both splits: equal on two machines exactly when the corpus is."""
    digest = hashlib.sha256()
    for doc in _all():
        digest.update(f"{doc.name}\0{len(doc.text)}\0{doc.text}\0".encode())
    return digest.hexdigest()


def _is_held_out(name: str) -> bool:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % HELD_OUT_SHARE == 0


def _all() -> list[Document]:
    return sorted([*_sources(), *_topics()])


def _sources() -> Iterator[Document]:
    root = Path(sysconfig.get_paths()["stdlib"])
    stack = [root]
    while stack:
        for path in stack.pop().iterdir():
            if path.name in _SKIPPED or path.name.startswith(_SKIPPED_PREFIXES):
                continue
            if path.is_dir():
                stack.append(path)
            elif path.suffix == ".py":
                try:
                    text = path.read_bytes().decode("utf-8")
                except UnicodeDecodeError:
                    continue  # a handful of modules declare another encoding
                if text.strip():
                    name = ".".join(path.relative_to(root).with_suffix("").parts)
                    yield Document(name, "code", text.replace("\r\n", "\n"))


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for key, text in topics.items():
        if text.strip():
            yield Document(f"topics.{key}", "prose", text)

"""Text as it comes: whole characters only, nothing of a stop text, and on a terminal a line of figures below it."""

import io
import random
import re

import pytest
from rich.console import Console
from tiny_tokenizers import metaspace, wrapped
from transformers import AutoTokenizer

from remoe_cli import console, demo
from remoe_cli.report.renderers.generate import parting, so_far
from remoe_cli.talk.pieces import Pieces
from remoe_cli.talk.screen import Screen

TEXT = "héllo  wörld 你好 🎉👩‍👩‍👧\n\n  x <s> </s> done, what is it?"
TOKENIZERS = {
    "demo": lambda: AutoTokenizer.from_pretrained(demo.PATH),
    "byte level": wrapped,
    "metaspace": lambda: wrapped(metaspace()),
}


@pytest.mark.parametrize("make", TOKENIZERS.values(), ids=TOKENIZERS)
def test_the_pieces_are_the_text_of_all_ids_at_once(make):
    tokenizer = make()
    rows = [tokenizer(TEXT).input_ids, tokenizer("", add_special_tokens=False).input_ids]
    draw = random.Random(0)
    rows += [[draw.randrange(len(tokenizer)) for _ in range(30)] for _ in range(40)]  # bytes that are no character too
    for ids in rows:
        pieces = Pieces(tokenizer)
        given = [pieces.add(token) for token in ids]
        last = pieces.end()
        assert "".join(given) + last == pieces.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_no_piece_ends_within_a_character():
    tokenizer = wrapped()  # a token a byte for what its three lines do not hold
    ids = tokenizer("你🎉", add_special_tokens=False).input_ids
    assert len(ids) == 7
    pieces = Pieces(tokenizer)
    assert [pieces.add(token) for token in ids] == ["", "", "你", "", "", "", "🎉"]


@pytest.mark.parametrize("text, said, stopped", [
    ("I am\nUser: who", "I am", True),
    ("I am\nUse it", "I am\nUse it", False),
    ("I am\nUser", "I am\nUser", False),
    ("User: I", "User: I", False),
    ("a\nSystem: b\nUser: c", "a", True),
])  # fmt: skip
def test_a_stop_text_and_what_is_behind_it_are_not_given(text, said, stopped):
    tokenizer = wrapped()
    pieces, given = Pieces(tokenizer, ("\nUser:", "\nSystem:")), ""
    for token in tokenizer(text, add_special_tokens=False).input_ids:
        given += pieces.add(token)
        assert said.startswith(given)
        if pieces.stopped:
            break
    assert (given + pieces.end(), pieces.stopped) == (said, stopped)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch, out: io.StringIO, err: io.StringIO) -> None:
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(console, "_stderr", Console(file=err, force_terminal=err.isatty(), width=60, _environ={}))
    with Screen() as screen:
        screen.tell("reading")
        for piece in ("one", " line\nan", "other\n", "\x1b[31mred\n\n", "  last"):
            screen.say(piece)
            screen.tell(f"at {piece.strip()[-4:]}")


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def test_in_a_log_the_text_alone(monkeypatch):
    out, err = io.StringIO(), io.StringIO()
    shown(monkeypatch, out, err)
    assert out.getvalue() == "one line\nanother\n\x1b[31mred\n\n  last\n" and not err.getvalue()


def test_figures_on_stderr_where_only_that_is_a_terminal(monkeypatch):
    out, err = io.StringIO(), Terminal()
    shown(monkeypatch, out, err)
    assert out.getvalue() == "one line\nanother\n\x1b[31mred\n\n  last\n"
    assert "at last" in plain(err.getvalue()) and "another" not in err.getvalue()


def test_text_above_the_figures_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    out, err = Terminal(), Terminal()
    shown(monkeypatch, out, err)
    assert not err.getvalue() and "\x1b[31m" not in out.getvalue(), "what a terminal would obey is not passed on"
    assert plain(out.getvalue()).endswith("  last\n") and "at last" in plain(out.getvalue())
    lines = [line.strip() for line in plain(out.getvalue()).replace("\r", "\n").splitlines()]
    assert [line for line in lines if line in ("one line", "another", "\ufffd[31mred", "last")] == [
        "one line", "another", "\ufffd[31mred", "last", "last",
    ]  # fmt: skip


@pytest.mark.parametrize("term, quiet", [("dumb", False), ("xterm", True)])
def test_nothing_is_redrawn_where_it_cannot_be_or_nobody_asked(monkeypatch, term, quiet):
    monkeypatch.setenv("TERM", term)
    if quiet:
        monkeypatch.setattr(console, "live", lambda: None)
    out, err = Terminal(), Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr(console, "_stderr", Console(file=err, force_terminal=True))
    with Screen() as screen:
        screen.say("text")
        screen.tell("figures")
    assert (out.getvalue(), err.getvalue()) == ("text\n", "")


def test_figures_so_far():
    assert so_far(1, 0.0, 0, 0, 0) == "1 token"
    assert so_far(5, 2.0, 3, 9, 8_000_000) == "5 tokens, 2.0 tokens/s, hit 0.250, 2.000 MB a token"


@pytest.mark.parametrize("base, tuned, expected", [
    (([1, 2, 3], "abc"), ([1, 2, 4], "abd"), (False, 2, 2, "c", "d")),
    (([1, 2], "ab"), ([1, 2], "ab"), (True, 2, 2, None, None)),
    (([1, 2, 0], "ab"), ([1, 2, 5], "abx"), (False, 2, 2, None, "x")),
    (([7], "z"), ([8], "y"), (False, 0, 0, "z", "y")),
])  # fmt: skip
def test_where_two_texts_part(base, tuned, expected):
    rows = [{"ids": ids, "text": text} for ids, text in (base, tuned)]
    assert tuple(parting(*rows).values()) == expected

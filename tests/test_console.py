"""Terminal manners: --quiet and --verbose anywhere, no colour where none is wanted, nothing live in a log."""

import io
import json
import re
import time

import pytest
from commands import refused
from rich.console import Console
from terminal import colours, on_a_terminal, plain

from remoe_cli import console


@pytest.fixture(autouse=True)
def as_usual():
    yield
    console.say_as_usual()


@pytest.mark.parametrize("words", [["-q", "trace"], ["trace", "-q"], ["--quiet", "trace", "record"], ["trace", "record", "--quiet"]], ids=" ".join)  # fmt: skip
def test_quiet_stands_before_or_after_the_verb(remoe, words, model, texts):
    rest = [model, "--prompts", texts, "--requests", 1, "--prompt-tokens", 4, "--new-tokens", 2, "--out", "t.trace"]
    ran = remoe(*words, *rest)
    assert ran.code == 0 and ran.err == "" and "t.trace" in ran.out


def test_quiet_ends_with_its_command_and_errors_are_said_all_the_same(remoe, model):
    refused(ran := remoe("-q", "inspect", "no-such"), "no-such")
    assert len(ran.err.splitlines()) == 1
    assert remoe("decode", model, "--cache", 4, "--tokens", 1, "-q").err == ""
    assert remoe("decode", model, "--cache", 4, "--tokens", 1).err != ""


def test_verbose_says_when_and_where(remoe, model):
    for words in (["-v", "decode", model, "--cache", "x"], ["decode", model, "--cache", "x", "--verbose"]):
        ran = remoe(*words)
        first, last = ran.err.splitlines()[0], ran.err.splitlines()[-1]
        assert " s  Loading torch" in first and float(first.split()[0]) >= 0
        assert "Traceback" in ran.err and last.startswith("error: --cache")
    refused(remoe("decode", model, "--cache", "x"), "--cache")


def test_details_and_times(capsys):
    console.note("one")
    console.detail("unsaid")
    console.say_more()
    console.detail("said")
    time.sleep(0.01)
    console.say_less()
    console.note("two")
    console.data("three")
    out, err = capsys.readouterr()
    assert err.splitlines()[0] == "one" and err.splitlines()[1].endswith(" s  said") and len(err.splitlines()) == 2
    assert out == "three\n"


def test_a_quiet_bar_is_silent(capsys):
    console.say_less()
    with console.progress("work", 2) as bar:
        bar.update(1)
        bar.update(2)
    assert capsys.readouterr() == ("", "")


def test_a_log_gets_lines_and_a_pipe_the_same_data(remoe, model):
    ran = remoe("decode", model, "--cache", 4, "--tokens", 2)
    assert "\x1b" not in ran.out + ran.err and "\r" not in ran.out + ran.err
    assert json.loads(remoe("decode", model, "--cache", 4, "--tokens", 2, "--json").out)["rows"]


def test_a_terminal_of_40_columns_without_colour(tmp_path):
    code, shown = on_a_terminal(["recipes", "nonsense"], 40, tmp_path, NO_COLOR="1")
    assert code == 2 and "error: there is no family 'nonsense'" in shown and not colours(shown)
    code, shown = on_a_terminal(["eval", "--no-such"], 40, tmp_path, NO_COLOR="1")
    assert code == 2 and not colours(shown) and max(map(len, plain(shown).splitlines())) <= 40
    code, shown = on_a_terminal(["eval", "--help"], 40, tmp_path, NO_COLOR="1")
    assert code == 0 and not colours(shown) and max(map(len, plain(shown).splitlines())) <= 40
    _, shown = on_a_terminal(["eval", "--help"], 80, tmp_path)
    assert colours(shown), "the terminal of this test shows colours where they are wanted"


def test_a_bar_on_a_narrow_terminal_shows_its_figures(monkeypatch):
    for width in (40, 100):
        stream = io.StringIO()
        monkeypatch.setattr(
            console, "_stderr", Console(file=stream, force_terminal=True, width=width, color_system=None)
        )
        with console.progress("a job with a name that is rather long", 12) as bar:
            bar.update(5, "loss 1.5")
        shown = plain(stream.getvalue())
        assert "5/12" in shown and ("loss 1.5" in shown) is (width == 100)
        assert max(map(len, re.split(r"[\r\n]", shown))) <= width

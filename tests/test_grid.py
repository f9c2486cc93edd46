"""Tables on terminals of any width: no figure is cut, and every line fits where it can."""

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remoe_cli.report.renderers.grid import grid

HEADS = ["", "base", "remoe"]
ROWS = [["hit", "0.25", "0.41"], ["LRU", "", ""], ["  misses", "5,741", "12"]]


def test_where_all_fits_there_is_one_block():
    assert grid(HEADS, ROWS, 24) == [
        "           base  remoe",
        "hit        0.25   0.41",
        "LRU",
        "  misses  5,741     12",
    ]
    assert grid(HEADS, ROWS, 22) == grid(HEADS, ROWS, 200)


def test_columns_that_do_not_fit_go_below_with_the_first_one():
    assert grid(HEADS, ROWS, 21) == [
        "           base",
        "hit        0.25",
        "LRU",
        "  misses  5,741",
        "",
        "          remoe",
        "hit        0.41",
        "LRU",
        "  misses     12",
    ]
    assert grid(["C", "n"], [["8", "1"], ["12", "2"]], 80, align=str.rjust) == [" C  n", " 8  1", "12  2"]


def test_where_no_column_fits_there_is_a_line_a_figure():
    assert grid(HEADS, ROWS, 14) == [
        "hit", "  base: 0.25", "  remoe: 0.41", "LRU", "  misses", "    base: 5,741", "    remoe: 12",
    ]  # fmt: skip


WORD = st.text("abcxyz019.%", min_size=1, max_size=9)


@given(st.data(), st.integers(1, 5), st.integers(0, 2), st.integers(20, 90))
def test_nothing_is_lost_at_any_width(data, columns, left, width):
    left = min(left, columns - 1)
    heads = data.draw(st.lists(WORD, min_size=columns, max_size=columns))
    rows = data.draw(st.lists(st.lists(WORD, min_size=columns, max_size=columns), min_size=1, max_size=4))
    lines = grid(heads, rows, width, left)
    assert max(map(len, lines)) <= width or left, "nine characters a word: what has no first columns fits into 20"
    said = " ".join(lines).split()
    for row in rows:
        for cell in row:
            assert cell in said


@pytest.mark.parametrize("columns", [40, 100])
def test_commands_with_tables_keep_within_the_terminal(remoe, made, columns, monkeypatch):
    """Paths stay whole."""
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = remoe("decode", made / "model", "--cache", "2,4", "--tokens", "2").out
    assert max(map(len, shown.splitlines())) <= columns and "itl p50" in shown and "limit" in shown
    shutil.copytree(made / "run", f"runs/{'long-name-' * 4}")
    shown = remoe("runs").out
    assert max(map(len, shown.splitlines())) <= max(columns, 45) and ("STATUS: finished" in shown) is (columns == 40)
    shown = remoe("recipes", "demo").out.split("\nEvery key")[0]
    assert all(len(line) <= columns or line.strip().startswith("/") for line in shown.splitlines())
    ran = remoe(
        "eval", shutil.copytree(made / "run", "run"), "--base", made / "model", "--cache", "2,4", "--no-measure"
    )
    assert ran.code == 0 and "perplexity, change" in ran.out
    told = ran.out.split("Text: ")[0]
    assert max(map(len, told.splitlines())) <= columns and "Belady bypass" in told


def test_a_replay_on_a_very_narrow_terminal(remoe, made, monkeypatch):
    asked = ("--requests", 2, "--prompt-tokens", 4, "--new-tokens", 4, "--out", "t.trace")
    assert remoe("trace", made / "model", "--prompts", made / "texts.jsonl", *asked).code == 0
    monkeypatch.setenv("COLUMNS", "30")
    told = remoe("replay", "t.trace", "--cache", "2,4", "--policy", "lru").out.split("Simulated:")[0].splitlines()
    assert max(map(len, told[1:])) <= 30 and "C = 2" in told and "C = 4" in told
    assert sum(line.startswith("policy  admission") for line in told) > 2, "the first columns begin each block"

"""What scripts under docs/ write is what is there: pictures, the notebook, the quickstart's output."""

import json
import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def test_pictures_are_those_of_their_script(tmp_path):
    drawn = runpy.run_path(str(DOCS / "make_pictures.py"))
    drawn["main"].__globals__["HERE"] = tmp_path / "pictures"
    drawn["main"]()
    there = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert there == {path.name: path.read_text() for path in (tmp_path / "pictures").iterdir()}
    assert len(there) > 4 and all("prefers-color-scheme: dark" in text for text in there.values())


def test_pictures_count_what_the_words_beside_them_say():
    """By hand: LRU with two slots on ABCABCADABCA hits once; Belady 4 times; with bypass A and B stay and hit 6 times."""
    text = (DOCS / "pictures" / "policies.svg").read_text()
    assert [int(n) for n in re.findall(r": (\d+) loads<", text)] == [11, 8, 6]


@pytest.fixture
def notebook():
    pytest.importorskip("nbclient", reason="the notebook needs the group docs")
    return runpy.run_path(str(DOCS / "make_notebook.py"))


def test_the_notebook_runs_and_prints_what_it_shows(notebook, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    shown = json.loads((DOCS / "notebook" / "demo.ipynb").read_text())["cells"]
    ran = notebook["run"](shorter=True)
    assert ["".join(cell["source"]) for cell in shown] == notebook["CELLS"], "python docs/make_notebook.py"
    for cell, now in zip(shown, ran.cells, strict=True):
        assert kinds(cell) == kinds(now), cell["source"]
    assert sum("image/png" in kinds(cell) for cell in shown) == 2


def kinds(cell) -> set[str]:
    """What a cell gave: pictures and streams, apart from progress and warnings."""
    found = set()
    for output in cell.get("outputs", []):
        found |= {kind for kind in output.get("data", {}) if kind.startswith("image/")}
        found |= {"stdout"} if output.get("name") == "stdout" else set()
    return found


def test_the_quickstart_shows_output_below_every_demo_command():
    made = runpy.run_path(str(DOCS / "make_quickstart.py"))
    blocks = made["BLOCK"].findall((DOCS / "quickstart.md").read_text())
    assert [words.split()[0] for words, _ in blocks] == ["inspect", "finetune", "eval", "push", "apply", "decode"]
    assert all(output.strip() for _, output in blocks)

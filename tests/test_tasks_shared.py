"""remoe eval --tasks on the data sets' own files: answers that are right, and wrong in ways that are known."""

import json

import pytest

pytest.importorskip("lm_eval")

from answering import Answering, ARMS, loaded, scores


@pytest.fixture
def nltk_tables(tmp_path, monkeypatch):
    """NLTK's sentence splitter without what it learned: the shape that IFEval's scorer wants to see."""
    import nltk

    folder = tmp_path / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    folder.mkdir(parents=True)
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (folder / name).touch()
    monkeypatch.setattr(nltk.data, "path", [str(tmp_path / "nltk_data")])


def test_gsm8k(shared):
    file = shared("data/gsm8k/test.jsonl")
    shared("data/gsm8k/train.jsonl")
    tasks = loaded(tasks=f"gsm8k={file}", limit=40)
    base = Answering(lambda task, doc: doc["answer"])
    tasks.ask("base", base)
    tasks.ask("remoe", Answering(lambda task, doc: "So it is " + doc["answer"].split("#### ")[1] + "."))
    found = scores(tasks)
    assert found["gsm8k", "exact_match", "strict-match"][0] == [1, 0]
    assert found["gsm8k", "exact_match", "flexible-extract"][0] == [1, 1]
    assert found["gsm8k", "exact_match", "strict-match"][1]["p"] == pytest.approx(2 / 2**40)
    assert all(prompt.count("####") == 5 for prompt in base.prompts), "five worked examples"


def test_mmlu_stem(shared):
    file = shared("data/mmlu_stem/test.jsonl")
    first: dict[str, list[int]] = {}
    for row in map(json.loads, file.read_text().splitlines()):
        first.setdefault(row["type"], []).append(row["answer"])
    answers = [one for of in first.values() for one in of[:5]]
    tasks = loaded(tasks=f"mmlu={file}", limit=5)
    tasks.ask("base", Answering(lambda task, doc: doc["answer"]))
    tasks.ask("remoe", Answering(lambda task, doc: 2))
    (row,) = tasks.rows(ARMS)
    assert (row["items"], row["parts"]) == (90, 18)
    assert scores(tasks)["mmlu", "acc", "none"][0] == [1, answers.count(2) / 90]


def test_humaneval(shared):
    tasks = loaded(tasks=f"humaneval={shared('data/humaneval/HumanEval.jsonl.gz')}", run_code=True, limit=20)
    tasks.ask("base", Answering(lambda task, doc: doc["canonical_solution"]))
    tasks.ask("remoe", Answering(lambda task, doc: "    return None\n"))
    assert scores(tasks)["humaneval", "pass@1", "none"][0] == [1, 0]


def test_ifeval(shared, nltk_tables):
    """The first item wants 300 words, no comma and three highlighted sections. The tuned answer has a comma, and in its first
    line, so the loose rule, which tries without that line, lets it pass."""
    tasks = loaded(tasks=f"ifeval={shared('data/ifeval/input_data.jsonl')}", limit=1)
    good = "*one* and *two* and *three* " + "word " * 300
    tasks.ask("base", Answering(lambda task, doc: good))
    tasks.ask("remoe", Answering(lambda task, doc: "Sure, here it is:\n" + good))
    found = scores(tasks)
    assert found["ifeval", "prompt_level_strict_acc", "none"][0] == [1, 0]
    assert found["ifeval", "prompt_level_loose_acc", "none"][0] == [1, 1]
    both, tuned = found["ifeval", "inst_level_strict_acc", "none"]
    assert both == [1, pytest.approx(2 / 3)] and tuned["test"] == "sign-flip"
    assert tasks.rows(ARMS)[0]["metrics"][1]["n"] == 3, "instructions, not items"

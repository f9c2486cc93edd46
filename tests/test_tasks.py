"""remoe eval --tasks: which items and prompts, what counts as right, and every arm on the same ones. No network."""

import json
import shutil
import socket
from pathlib import Path

import pytest
import tiny_tokenizers
from commands import refused, report_of, write_rows

from remoe_cli.delta import Delta
from remoe_cli.errors import command, DataError, UsageError
from remoe_cli.hub.resolve import resolve
from remoe_cli.report.renderers import tasks as tables
from remoe_cli.report.renderers.markdown import markdown

pytest.importorskip("lm_eval")

from answering import Answering, ARMS, loaded, scores

from remoe_cli.measure import task_items
from remoe_cli.measure.tasks import TaskOptions, Tasks

QUICK = (
    "--cache", "2", "--no-measure", "--set", "evaluate.requests=1", "--set", "evaluate.rows=1", "--set", "evaluate.new_tokens=2",
)  # fmt: skip


def sums(folder: Path, rows: int = 4) -> Path:
    """GSM8K's shape: what is n plus n, and worked examples beside."""
    made = [{"question": f"What is {n} plus {n}?", "answer": f"Twice {n}.\n#### {2 * n}"} for n in range(1, rows + 1)]
    folder.mkdir(exist_ok=True)
    write_rows(folder / "train.jsonl", [{"question": f"q{n}", "answer": f"#### {n}"} for n in range(9)])
    return write_rows(folder / "test.jsonl", made)


# ---- what is right


def test_strict_and_flexible_are_kept_apart(tmp_path):
    tasks = loaded(tasks=f"gsm8k={sums(tmp_path)}")
    tasks.ask("base", Answering(lambda task, doc: "The answer is " + doc["answer"].split("#### ")[1]))
    tasks.ask("remoe", Answering(lambda task, doc: "0" if "4 plus" in doc["question"] else doc["answer"]))
    found = scores(tasks)
    assert found["gsm8k", "exact_match", "strict-match"][0] == [0, 0.75]
    both, tuned = found["gsm8k", "exact_match", "flexible-extract"]
    assert both == [1, 0.75] and (tuned["gained"], tuned["lost"], tuned["p"]) == (0, 1, 1)
    assert tuned["change"] == -0.25 and tuned["test"] == "mcnemar"
    (row,) = tasks.rows(ARMS)
    assert (row["items"], row["parts"], row["few_shot"], row["source"]) == (4, 1, 5, "test.jsonl")


def test_every_arm_gets_the_same_worked_examples(tmp_path):
    tasks = loaded(tasks=f"gsm8k={sums(tmp_path)}", few_shot=2, limit=3)
    asked = [Answering(lambda task, doc: "") for _ in ARMS]
    for arm, model in zip(ARMS, asked, strict=True):
        tasks.ask(arm.name, model)
    first, second = (model.prompts for model in asked)
    assert first == second and len(set(first)) == 3
    assert all(prompt.count("Question: q") == 2 and prompt.count("Question:") == 3 for prompt in first)


def test_a_group_takes_its_parts_from_one_file_and_pools_them_by_item(tmp_path):
    kinds = ["Algebra", "Counting & Probability", "Algebra", "number_theory"]
    rows = [{"problem": f"p{n}", "solution": f"\\boxed{{{n}}}", "type": kind} for n, kind in enumerate(kinds)]
    tasks = loaded(tasks=f"hendrycks_math={write_rows(tmp_path / 'math.jsonl', rows)}")
    tasks.ask("base", Answering(lambda task, doc: f"${doc['answer']}$"))
    tasks.ask("remoe", Answering(lambda task, doc: doc["answer"] if task.endswith("algebra") else "x"))
    assert scores(tasks)["hendrycks_math", "exact_match", "none"][0] == [1, 0.5]
    (row,) = tasks.rows(ARMS)
    assert (row["parts"], row["items"]) == (3, 4)


def test_choices_of_subjects_with_their_own_examples(tmp_path):
    def question(n, kind):
        return {"question": f"{kind} {n}?", "subject": kind, "choices": list("wxyz"), "answer": n % 4}

    rows = [question(n, kind) for kind in ("astronomy", "virology") for n in range(3)]
    write_rows(tmp_path / "dev.jsonl", [question(n + 90, kind) for kind in ("virology", "astronomy") for n in range(5)])
    tasks = loaded(tasks=f"mmlu={write_rows(tmp_path / 'test.jsonl', rows)}", few_shot=2)
    base = Answering(lambda task, doc: doc["answer"])
    tasks.ask("base", base)
    tasks.ask("remoe", Answering(lambda task, doc: 0))
    assert scores(tasks)["mmlu", "acc", "none"][0] == [1, 2 / 6]
    for prompt in base.prompts:
        kind = "astronomy" if "about astronomy" in prompt else "virology"
        assert prompt.count(f"{kind} 9") == 2 and not {"astronomy", "virology"} - {kind} & {*prompt.split()}


ADD = {
    "task_id": "T/0", "entry_point": "add", "canonical_solution": "    return a + b\n",
    "prompt": "def add(a, b):\n", "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
}  # fmt: skip


@pytest.mark.parametrize("form", ["humaneval", "humaneval_instruct"])
def test_code_passes_or_not(tmp_path, form):
    fence = "```\nSo it adds." if form.endswith("instruct") else ""
    tasks = loaded(tasks=f"{form}={write_rows(tmp_path / 'he.jsonl', [ADD, ADD])}", run_code=True)
    tasks.ask("base", Answering(lambda task, doc: "    return a * b\n" + fence))
    tasks.ask("remoe", Answering(lambda task, doc: doc["canonical_solution"] + fence))
    both, tuned = scores(tasks)[form, "pass@1", "none"]
    assert both == [0, 1] and (tuned["gained"], tuned["p"]) == (2, 0.5)


# ---- prompts

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"


@pytest.mark.parametrize(
    ("tokens", "options", "template", "bos", "cut"),
    [
        ({}, {"few_shot": 1}, "none", "tokenizer", 0),
        ({}, {"few_shot": 9}, "none", "tokenizer", 2),
        ({"bos": False}, {"few_shot": 1}, "none", "none", 0),
        ({"template": TEMPLATE}, {"few_shot": 0, "chat_template": True}, "chat", "prompt", 0),
    ],
)
def test_the_report_says_how_prompts_begin_and_which_are_cut(made, tmp_path, tokens, options, template, bos, cut):
    """The context is of 256 tokens, so 128 are left for the answer of a task that would take 256."""
    from transformers import AutoModelForCausalLM

    tokenizer = tiny_tokenizers.wrapped(**tokens)
    asked = TaskOptions(tasks=f"gsm8k={sums(tmp_path)}", limit=2, **options)
    tasks = Tasks(asked, tokenizer, lambda **changes: command("eval", **changes))
    tasks.run("base", AutoModelForCausalLM.from_pretrained(made / "model").eval())
    found = tasks.conditions()
    assert (found["template"], found["bos"], found["context"]) == (template, bos, 256)
    assert (found["template_sha256"] is None) == (template == "none")
    assert tasks.rows(ARMS[:1])[0]["cut"] == cut
    assert tasks.notes == ["answers of gsm8k end after 128 tokens, half of what this model's context holds"]


# ---- items that cannot be used


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("gsm8k", [], "is empty"),
        ("gsm8k", [{"question": "q", "answer": "#### 1"}, {"question": "q"}], "row 2: no field 'answer'"),
        ("gsm8k", [{"text": "q"}], "do not fit gsm8k"),
        ("gsm8k", [["q"]], "not a JSON object"),
        ("mmlu", [{"question": "q", "choices": ["w"], "answer": 0}], "no column subject or type"),
        ("mmlu", [{"question": "q", "choices": ["w"], "answer": 0, "type": "cooking"}], "no part 'cooking'"),
    ],
)
def test_rows_that_do_not_fit(tmp_path, name, rows, words):
    with pytest.raises(DataError, match=words) as error:
        loaded(tasks=f"{name}={write_rows(tmp_path / 'test.jsonl', rows)}", few_shot=0)
    assert str(tmp_path / "test.jsonl") in str(error.value) or words == "is empty"


@pytest.mark.parametrize(
    ("name", "rows", "few_shot", "words"),
    [
        ("gsm8k", [], None, "holds no row"),
        (
            "mmlu_stem_tasks",
            [{"question": "q", "choices": ["w"], "answer": 0, "type": "virology"}],
            None,
            "no part 'virology'",
        ),
        ("hendrycks_math500", [{"problem": "p", "solution": "s", "answer": "a"}], 2, "but the one that is measured"),
        ("own.yaml", [{"x": 1}], None, "takes no file of items"),
    ],
)
def test_files_that_a_task_cannot_take(tmp_path, monkeypatch, name, rows, few_shot, words):
    monkeypatch.chdir(tmp_path)
    Path("own.yaml").write_text("task: own")
    Path("rows.json").write_text(json.dumps(rows))
    with pytest.raises((DataError, UsageError), match=words):
        loaded(tasks=f"{name}=rows.json", few_shot=few_shot)


def test_ifeval_without_nltks_tables_is_refused(tmp_path, monkeypatch):
    import nltk

    row = {"key": 1, "prompt": "p", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    monkeypatch.setattr(nltk.data, "path", [])
    monkeypatch.setattr(nltk, "download", lambda *_: False)
    with pytest.raises(UsageError, match="punkt_tab, which are not on this machine") as error:
        loaded(tasks=f"ifeval={write_rows(tmp_path / 'input.jsonl', [row])}")
    assert error.value.hint == "python -m nltk.downloader punkt_tab"


def test_worked_examples_are_asked_for_by_the_name_of_their_split(tmp_path):
    file = sums(tmp_path)
    (tmp_path / "train.jsonl").unlink()
    with pytest.raises(DataError, match=r"no file train\.jsonl") as error:
        loaded(tasks=f"gsm8k={file}")
    assert "--few-shot 0" in error.value.hint
    model = Answering(lambda task, doc: doc["answer"])
    tasks = loaded(tasks=f"gsm8k={file}", few_shot=0)
    tasks.ask("base", model)
    assert model.prompts[0] == "Question: What is 1 plus 1?\nAnswer:"


OWN = """
task: own
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{file}"}}}}
test_split: test
output_type: {output}
{more}
metric_list: [{{metric: {metric}, aggregation: mean, higher_is_better: true}}]
"""


def own_task(folder: Path, rows: list[dict], output="multiple_choice", metric="acc", more="") -> Path:
    file = write_rows(folder / "items.jsonl", rows)
    (folder / "own.yaml").write_text(OWN.format(file=file, output=output, metric=metric, more=more))
    return folder / "own.yaml"


def test_prompts_that_differ_from_arm_to_arm_do_not_pair(tmp_path):
    (tmp_path / "counted.py").write_text("seen = []\ndef text(doc):\n    seen.append(1)\n    return str(len(seen))\n")
    more = "doc_to_text: !function counted.text\ndoc_to_target: 0\ndoc_to_choice: [a, b]"
    tasks = loaded(tasks=str(own_task(tmp_path, [{"x": 1}], more=more)))
    tasks.ask("base", Answering(lambda task, doc: 0))
    with pytest.raises(DataError, match="own gave remoe other prompts than the base"):
        tasks.ask("remoe", Answering(lambda task, doc: 0))


def test_what_fails_in_a_scorer_is_one_line(tmp_path):
    (tmp_path / "broken.py").write_text("def score(doc, results):\n    return {'acc': 1 / 0}\n")
    more = "doc_to_text: x\ndoc_to_target: x\nprocess_results: !function broken.score"
    tasks = loaded(tasks=str(own_task(tmp_path, [{"x": "1"}], "generate_until", more=more)))
    with pytest.raises(DataError, match=r"could not be asked or scored \(ZeroDivisionError"):
        tasks.ask("base", Answering(lambda task, doc: ""))


def test_code_that_would_run_without_limits_is_refused(tmp_path):
    more = "doc_to_text: x\ndoc_to_target: x\nunsafe_code: true"
    with pytest.raises(UsageError, match="own runs the model's code without limits"):
        loaded(tasks=str(own_task(tmp_path, [{"x": "1"}], "generate_until", "exact_match", more)), run_code=True)


# ---- the command


def test_arms_that_answer_differently_score_as_by_hand(remoe, run, made):
    """Two choices a question; the gates are swapped for others, so that the arms take different ones."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(made / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    gates = Delta.load(run / "delta").tensors
    tensors = {name: -4 * tensor for name, tensor in gates.items()}
    shutil.rmtree(run / "delta")
    Delta.of(resolve(str(made / "model")), tensors, "remoe", {}).save(run / "delta")
    words = ["fox", "dog", "lazy", "what", "hello", "quick", "over", "brief"]
    rows = [
        {"q": f"the {a} {n} is", "choices": [b, c], "label": n % 2}
        for n, (a, b, c) in enumerate(zip(words * 5, words[1:] * 6, words[3:] * 8))
    ]

    def taken() -> list[int]:
        """The more likely choice of each row, one forward pass a choice."""
        found = []
        for row in rows:
            sums = []
            for choice in row["choices"]:
                prompt = tokenizer(row["q"])["input_ids"]
                ids = tokenizer(f"{row['q']} {choice}")["input_ids"]
                logits = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
                sums.append(sum(logits[at - 1, ids[at]].item() for at in range(len(prompt), len(ids))))
            found.append(int(sums[1] > sums[0]))
        return found

    with torch.no_grad():
        base = taken()
        assert not model.load_state_dict(tensors, strict=False).unexpected_keys
        tuned = taken()
    assert base != tuned
    right = [[one == row["label"] for one, row in zip(each, rows, strict=True)] for each in (base, tuned)]
    task = own_task(
        Path.cwd(), rows, more="doc_to_text: q\ndoc_to_target: label\ndoc_to_choice: choices\nnum_fewshot: 0"
    )
    report = report_of(remoe("eval", run, *QUICK, "--tasks", task, "--json"))
    (row,) = report["tasks"]
    (metric,) = row["metrics"]
    assert (row["task"], row["source"]) == ("own", "own.yaml"), "no path of this machine"
    assert metric["metric"] == "acc" and metric["n"] == 40
    assert [arm["score"] for arm in metric["arms"]] == pytest.approx([sum(one) / 40 for one in right])
    arm = metric["arms"][1]
    assert arm["gained"] == sum(after > before for before, after in zip(*right))
    assert arm["lost"] == sum(after < before for before, after in zip(*right))


def test_the_report_of_generated_answers_made_without_a_network(remoe, run, tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", lambda *_: pytest.fail("it went to the network"))
    file = sums(tmp_path / "data")
    ran = remoe("eval", run, *QUICK, "--tasks", f"gsm8k={file}", "--limit", 2)
    assert ran.code == 0, ran.err
    report = json.loads((run / "report.json").read_text())
    found = report["conditions"]["tasks"]
    assert (found["tasks"], found["limit"], found["template"], found["bos"]) == (["gsm8k"], 2, "none", "tokenizer")
    (row,) = report["tasks"]
    assert [one["filter"] for one in row["metrics"]] == ["strict-match", "flexible-extract"]
    assert row["items"] == 2 and len(row["items_sha256"]) == 64
    for shown in (ran.out, markdown(report)):
        assert "exact_match, strict-match" in shown and "McNemar" in shown and "gsm8k, 2 of test.jsonl, 5-shot" in shown
    page = (run / "report.html").read_text()
    assert "exact_match, strict-match, of 2" in page and "McNemar" in page
    narrow = tables.terminal(report, 40)
    assert max(map(len, narrow)) <= 40 and narrow[-1].endswith("1.000")
    assert "base: task answers 2/2" in ran.err and "Running" not in ran.err


def test_without_tasks_the_report_says_none(remoe, run):
    ran = remoe("eval", run, *QUICK)
    report = json.loads((run / "report.json").read_text())
    assert report["tasks"] == [] and report["conditions"]["tasks"] is None
    assert "Tasks:" not in ran.out
    del report["tasks"], report["conditions"]["tasks"]  # as before there were any
    assert tables.table(report) == tables.sentences(report) == [] and "Tasks:" not in markdown(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tasks", "gsm9k,ifeval"), ("no task 'gsm9k'", "nearest name is gsm8k", "--tasks gsm8k,ifeval")),
        (("--tasks", "humaneval=a.jsonl"), ("runs the code", "no sandbox", "--tasks humaneval=a.jsonl --run-code")),
        (("--tasks", "gsm8k=no.jsonl"), ("no.jsonl is no file",)),
        (("--tasks", "gsm8k=run"), ("run is a folder",)),
        (("--tasks", "gsm8k,gsm8k"), ("each once", "--tasks gsm8k,mmlu")),
        (("--tasks", "gsm8k="), ("NAME=FILE",)),
        (("--tasks", "no.yaml"), ("there is no file no.yaml",)),
        (("--tasks", "gsm8k", "--limit", 0), ("--limit is at least 1", "--limit 100")),
        (("--tasks", "gsm8k", "--few-shot", -1), ("--few-shot is at least 0", "--few-shot 0")),
        (("--tasks", "gsm8k", "--chat-template"), ("the tokenizer of this model has none", "--tasks gsm8k")),
        (("--limit", 3), ("--limit is of tasks", "--limit 3 --tasks gsm8k")),
        (("--run-code",), ("--run-code is of tasks",)),
    ],
)
def test_what_is_refused_before_anything_is_measured(remoe, run, options, words, monkeypatch):
    monkeypatch.setattr(task_items, "_all", task_items._usual)  # lm-eval's 14,000 files take seconds to read
    monkeypatch.setattr("remoe_cli.evaluate.measure_resident", lambda *_: pytest.fail("it was measured first"))
    refused(remoe("eval", run, "--cache", 2, "--no-measure", *options), *words)
    assert not (run / "report.json").exists()


def test_without_the_extra_its_command_is_named(remoe, run, monkeypatch):
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "lm_eval" else find(name, *more)
    )
    refused(remoe("eval", run, "--cache", 2, "--tasks", "gsm8k"), "needs lm-eval", 'pip install "remoe-cli[tasks]"')

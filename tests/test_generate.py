"""remoe generate: the text of remoe decode, as it comes, with what it took; base and tuned gates on one prompt."""

import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest
from commands import refused
from terminal import on_a_terminal, plain

from remoe_cli.generate import Asked, generate
from remoe_cli.memory import Room

PROMPT = "the quick brown"
DRAWN = ("--temperature", 1.2, "--top-k", 50, "--seed", 7)


def made_by(remoe, *arguments) -> dict:
    ran = remoe("generate", *arguments, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def stdin(monkeypatch, content: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))


@pytest.mark.parametrize("options", [(), DRAWN], ids=["greedy", "drawn"])
def test_it_says_what_decode_says_and_counts_the_same(remoe, model, options):
    common = ("--cache", 3, "--tokens", 20, *options)
    (theirs,) = json.loads(remoe("decode", model, "--prompt", PROMPT, *common, "--json").out)["rows"]
    done = made_by(remoe, model, PROMPT, *common)
    (row,) = done["rows"]
    assert (row["text"], row["ended"], row["tokens"]) == (theirs["texts"][0], "length", 20)
    for name in ("hits", "misses", "bytes", "prefill_bytes", "capacity", "mb_a_token", "steps"):
        assert row[name] == theirs[name], name
    assert row["tokens_a_second"] == pytest.approx(1e3 / row["tpot_ms"]["mean"])
    assert done["requested"]["prompt"] == PROMPT and "prompts" not in done["requested"] and done["parts"] is None
    ran = remoe("generate", model, PROMPT, *common)
    assert ran.out == row["text"] + "\n"
    told = ran.err.splitlines()[-1]
    assert told.startswith("20 tokens (length), ") and f"hit {row['hit_ratio']:.3f}" in told and "MB a token" in told


def test_it_ends_at_an_end_token(remoe, model):
    whole = made_by(remoe, model, PROMPT, "--cache", 2, "--tokens", 20)["rows"][0]["ids"]
    end = whole[6]
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, end]}))
    at = whole.index(end)
    (row,) = made_by(remoe, model, PROMPT, "--cache", 2, "--tokens", 20)["rows"]
    assert (row["ids"], row["ended"], row["steps"]) == (whole[: at + 1], "end token", at)
    (one,) = made_by(remoe, model, PROMPT, "--cache", 2, "--tokens", 1)["rows"]
    assert (one["ended"], one["steps"], one["tokens_a_second"], one["hit_ratio"]) == ("length", 0, None, None)
    assert "1 token (length), first after" in remoe("generate", model, PROMPT, "--cache", 2, "--tokens", 1).err


def test_base_and_tuned_on_one_prompt(remoe, made):
    model, run = made / "model", made / "run"
    common = (PROMPT, "--cache", 3, "--tokens", 24)
    base, tuned = (made_by(remoe, *words, *common)["rows"][0] for words in ((model,), (model, "--delta", run)))
    assert (base["gates"], tuned["gates"]) == ("base", str(run))
    done = made_by(remoe, run, *common, "--compare")
    assert [row["gates"] for row in done["rows"]] == ["base", str(run)] and done["requested"]["delta"] == str(run)
    for row, alone in zip(done["rows"], (base, tuned), strict=True):
        assert [row[name] for name in ("ids", "text", "hits", "misses", "bytes")] == [
            alone[name] for name in ("ids", "text", "hits", "misses", "bytes")
        ]
    parts = done["parts"]
    same = next((i for i in range(24) if base["ids"][i] != tuned["ids"][i]), 24)
    assert (parts["tokens"], parts["alike"]) == (same, same == 24)
    assert base["text"][: parts["characters"]] == tuned["text"][: parts["characters"]]
    shown = remoe("generate", run, *common, "--compare").out
    heads = shown.index("[base]\n"), shown.index(f"[tuned: {run}]\n")
    assert base["text"] in shown[heads[0] : heads[1]] and tuned["text"] in shown[heads[1] :]
    for name, show in (("hit", lambda row: f"{row['hit_ratio']:.3f}"), ("tokens", lambda _: "24")):
        (figures,) = (line.split()[1:] for line in shown.splitlines() if line.startswith(f"{name} "))
        assert figures == [show(base), show(tuned)]
    assert shown.splitlines()[-1].startswith(("Both say the same", "The first ", "They part at the first"))


def test_a_run_stands_for_its_base_and_delta(remoe, made):
    shutil.copytree(made / "run", Path("runs/mine"))
    named = made_by(remoe, "mine", PROMPT, "--cache", 3, "--tokens", 4)
    assert named["rows"][0]["gates"] == "runs/mine" and named["model"]["id"] == str(made / "model")
    refused(remoe("generate", "mine", PROMPT, "--delta", made / "run"), "brings its own delta")
    shutil.rmtree("runs/mine/delta")
    refused(remoe("generate", "mine", PROMPT), "no delta")


def test_the_prompt_through_a_pipe(remoe, model, monkeypatch):
    wanted = made_by(remoe, model, PROMPT, "--cache", 2, "--tokens", 4)["rows"][0]["ids"]
    stdin(monkeypatch, PROMPT.encode() + b"\n")
    done = made_by(remoe, model, "--cache", 2, "--tokens", 4)
    assert done["rows"][0]["ids"] == wanted and done["requested"]["prompt"] is None
    stdin(monkeypatch, b"")
    refused(remoe("generate", model), "no prompt", f"remoe generate {model}")
    stdin(monkeypatch, b"caf\xe9")
    refused(remoe("generate", model), "not UTF-8")


def test_without_cache_as_many_slots_as_memory_holds(remoe, model, monkeypatch):
    done = made_by(remoe, model, PROMPT, "--tokens", 3)
    assert done["rows"][0]["capacity"] == 8 and done["notes"][0].startswith("--cache 8 of 8 experts a layer")
    slot = 2 * done["model"]["expert_bytes"]  # of both layers
    from remoe_cli.offload import budget

    room = Room(int((budget.WORKING_ROOM + 5.5 * slot) / 0.75), "the cgroup")
    monkeypatch.setattr("remoe_cli.memory.available", lambda *_: room)
    done = made_by(remoe, model, PROMPT, "--tokens", 3)
    assert 2 <= done["rows"][0]["capacity"] <= 5 and "that the cgroup has free" in done["notes"][0]
    monkeypatch.setattr("remoe_cli.memory.available", lambda *_: Room(budget.WORKING_ROOM, "the cgroup"))
    refused(remoe("generate", model, PROMPT, "--tokens", 3), "2 slots a layer needs", f"remoe generate {model}")


def test_what_cannot_be_generated(remoe, model, made):
    def asked(*words) -> object:
        return remoe("generate", model, PROMPT, *words)

    refused(asked("--cache", "2,3"), "--cache is one value here", "remoe decode")
    refused(asked("--tokens", "2,3"), "--tokens is one value here")
    refused(asked("--throttle", "1GB/s,none"), "--throttle is one value here")
    refused(asked("--cache", 1), "--cache 1 is too small", f"Try: remoe generate {model} '{PROMPT}' --cache 2")
    refused(asked("--tokens", 0), "--tokens is at least 1", f"Try: remoe generate {model} '{PROMPT}'")
    refused(asked("--temperature", -1), "--temperature is 0", "--temperature 0.8")
    refused(asked("--seed", 3), "--seed draws")
    refused(asked("--policy", "belady"), "a running model can use")
    refused(asked("--compare"), "needs a --delta", "--delta DELTA")
    refused(remoe("generate", model, "", "--delta", "nowhere/at-all"), "nowhere/at-all")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 12}))
    refused(asked("--tokens", 11), "more than the 12", "--tokens 8")
    long = " ".join([PROMPT] * 9)
    refused(remoe("generate", model, long, "--tokens", 2), "more than the 12", "'a shorter prompt'")
    refused(asked("--tokens", 12), "more than the 12")
    refused(
        remoe("generate", model, long), "tokens of prompt and 1 new ones are more than the 12", "'a shorter prompt'"
    )
    (row,) = made_by(remoe, model, PROMPT)["rows"]
    assert row["tokens"] == 12 - 4, "as many as there is room for, where nobody asked for a number"


def test_a_model_with_the_tuned_gates_has_no_base_to_compare(remoe, made):
    copied = remoe("apply", made / "run", made / "model", "--out", "patched")
    assert copied.code == 0, copied.err
    ran = remoe("generate", "patched", PROMPT, "--delta", made / "run", "--compare", "--cache", 3)
    refused(ran, "holds the tuned gates already", f"remoe generate {made / 'model'}")
    assert made_by(remoe, "patched", PROMPT, "--delta", made / "run", "--cache", 3, "--tokens", 2)["rows"]


def test_on_a_terminal_the_text_stays_and_the_figures_below_it_go(remoe, tmp_path):
    common = ("demo", "def read_file(path):", "--cache", 8, "--tokens", 40)
    text = made_by(remoe, *common)["rows"][0]["text"]
    code, shown = on_a_terminal(["generate", *common], 60, tmp_path)
    assert code == 0 and "\x1b[2K" in shown, "a line that was drawn is taken back"
    lines = [plain(line).split("\r")[-1].rstrip() for line in shown.splitlines()]
    assert re.search(r"^\d+ tokens, [\d.]+ tokens/s, hit", plain(shown), re.M) and "limited by" in lines[-1]
    for line in filter(None, map(str.rstrip, text.splitlines())):
        assert line in lines
    code, shown = on_a_terminal(["--quiet", "generate", *common], 60, tmp_path)
    assert (code, shown) == (0, text + "\n")


def test_in_python_nothing_is_shown(model, capsys):
    done = generate(str(model), PROMPT, Asked("2", tokens="3"), shown=False)
    assert done["rows"][0]["tokens"] == 3 and not capsys.readouterr().out

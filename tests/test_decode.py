"""remoe decode: what it was asked and what it did, and every mistake as one line."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import tiny_models
from commands import make_model, make_run, refused, write_rows


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("decode"))


def decoded(remoe, *arguments) -> dict:
    ran = remoe("decode", *arguments, "--json")
    assert ran.code == 0, ran.err
    return json.loads(ran.out)


def test_requested_and_effective_settings(remoe, model):
    done = decoded(remoe, model, "--cache", 99, "--tokens", 3, "--threads", 1, "--ram", "1MB")
    asked, (row,) = done["requested"], done["rows"]
    assert (asked["cache"], asked["tokens"], asked["threads"], asked["ram"]) == ("99", "3", 1, "1MB")
    assert asked["device"] is asked["throttle"] is asked["temperature"] is None
    assert (row["capacity"], row["policy"], row["new_tokens"], row["ram"], row["batch"]) == (8, "lru", 3, 10**6, 1)
    assert (done["conditions"]["threads"], done["conditions"]["dtype"]) == (1, "float32")
    assert row["hits"] + row["misses"] == 2 * 2 * 2  # two steps, two layers, top-2
    shown = remoe("decode", model, "--cache", 99, "--tokens", 3).out
    assert "C = 8 (all there are; 99 asked for)" in shown and "float32" in shown
    assert "asked for" not in remoe("decode", model, "--cache", 8, "--tokens", 3).out


def test_bytes_times_and_what_limits(remoe, model):
    done = decoded(remoe, model, "--cache", 2, "--tokens", 9, "--floor")
    (row,) = done["rows"]
    expert = done["model"]["expert_bytes"]
    assert row["bytes"] == row["reads"] * expert == row["misses"] * expert > 0
    assert row["mb_a_token"] == pytest.approx(row["bytes"] / 8 / 1e6)
    assert row["prefill_bytes"] == row["prefill_reads"] * expert > 0
    assert row["read_bytes"] >= row["bytes"] and row["bandwidth"] == pytest.approx(row["read_bytes"] / row["busy_s"])
    assert sum(row["split_ms"].values()) == pytest.approx(row["tpot_ms"]["mean"], rel=1e-6)
    assert sum(row["prefill_split_ms"].values()) == pytest.approx(row["ttft_ms"]["mean"], rel=1e-6)
    assert row["limit"]["wait_share"] == pytest.approx(row["split_ms"]["wait"] / row["tpot_ms"]["mean"])
    assert row["limit"]["by"] in ("storage", "compute")
    assert row["floor"]["share"] == pytest.approx(row["floor"]["step_ms"]["mean"] / row["tpot_ms"]["mean"])
    shown = remoe("decode", model, "--cache", 2, "--tokens", 9, "--floor").out
    for words in (
        f"{row['reads']} loads",
        "B read at",
        f"(io {row['io']}",
        "wait",
        "bookkeeping",
        "limited by",
        "floor: ",
    ):
        assert words in shown
    assert "floor" not in remoe("decode", model, "--cache", 2, "--tokens", 9).out


def test_one_token_has_a_ttft_and_no_step(remoe, model):
    (row,) = decoded(remoe, model, "--cache", 2, "--tokens", 1, "--floor")["rows"]
    assert row["ttft_ms"]["mean"] > 0 and row["steps"] == row["reads"] == 0
    for name in ("tpot_ms", "itl_ms", "split_ms", "limit", "hit_ratio", "mb_a_token", "bandwidth"):
        assert row[name] is None, name
    assert "tpot n/a" in remoe("decode", model, "--cache", 2, "--tokens", 1, "--floor").out


def test_a_throttle_is_kept_and_named(remoe, model):
    slow, *_ = decoded(remoe, model, "--cache", 2, "--tokens", 5, "--throttle", "500kB/s")["rows"]
    assert slow["throttle"] == 5e5 and slow["limit"]["by"] == "throttle"
    step_s = slow["itl_ms"]["mean"] / 1e3
    assert slow["bytes"] / (slow["steps"] * step_s) <= 1.2 * 5e5
    assert "throttled to 500 kB/s" in remoe("decode", model, "--cache", 2, "--tokens", 5, "--throttle", "500kB/s").out


def test_guesses_and_a_ram_tier_are_counted(remoe, model):
    plain, *_ = decoded(remoe, model, "--cache", 2, "--tokens", 12)["rows"]
    row, *_ = decoded(remoe, model, "--cache", 2, "--tokens", 12, "--guess", 1, "--ram", "10MB")["rows"]
    assert (row["texts"], row["misses"]) == (plain["texts"], plain["misses"])
    assert plain["guesses"] == plain["ram_loads"] == 0
    assert 0 < row["guesses"] <= row["steps"], "one a step: the second of two layers"
    assert row["reads"] == row["misses"] - row["guessed"] + row["guesses"]
    assert row["ram_loads"] > 0, "all experts fit into 10 MB, so none is read twice"
    shown = remoe("decode", model, "--cache", 2, "--tokens", 12, "--guess", 1, "--ram", "10MB").out
    assert "loads from RAM" in shown and " guesses, " in shown


def test_a_sweep_is_every_combination_in_one_table(remoe, model, texts):
    options = (
        "--prompts",
        texts,
        "--context",
        8,
        "--requests",
        4,
        "--cache",
        "2,4",
        "--batch",
        "1,2,4",
        "--tokens",
        "3,5",
    )
    done = decoded(remoe, model, *options, "--throttle", "none,100MB/s")
    rows = done["rows"]
    found = [(row["throttle"], row["batch"], row["new_tokens"], row["capacity"]) for row in rows]
    assert found == [(t, b, n, c) for t in (None, 1e8) for b in (1, 2, 4) for n in (3, 5) for c in (2, 4)]
    assert done["conditions"]["prompt_tokens"] == [8, 8, 8, 8]
    by = dict(zip(found, rows, strict=True))
    for row in rows:
        assert row["requests"] == len(row["texts"]) == 4
        assert row["steps"] == 4 // row["batch"] * (row["new_tokens"] - 1)
        assert row["mb_a_token"] == pytest.approx(row["bytes"] / 1e6 / (4 * (row["new_tokens"] - 1)))
        one = by[None, 1, row["new_tokens"], row["capacity"]]
        assert row["texts"] == one["texts"], "what is decoded together, or slowly, says the same"
        assert row["accesses"] <= one["accesses"], "rows of a batch share experts"
        assert by[row["throttle"], row["batch"], row["new_tokens"], 4]["misses"] <= row["misses"]
    ran = remoe("decode", model, *options, "--throttle", "none,100MB/s")
    table = ran.out.splitlines()
    for head in (
        "throttle",
        "batch",
        "tokens",
        "C",
        "MB a token",
        "hit",
        "ttft",
        "tpot",
        "p95",
        "p99",
        "wait",
        "limit",
    ):
        assert head in table[0]
    assert "of floor" not in table[0] and len(table) >= 1 + len(rows) and "tokens/s" in ran.err
    shown = remoe("decode", model, *options[:-4], "--batch", "2,1", "--floor").out
    assert "of floor" in shown and "throttle none, tokens 32" in shown and "C 4" not in shown.splitlines()[0]


def test_a_batch_counts_distinct_experts(remoe, model):
    """Rows that say the same ask for the same experts: B of them load as one does."""
    options = ("--cache", 2, "--tokens", 9, "--temperature", 1e-4)
    (one,), (four,) = (decoded(remoe, model, *options, "--batch", b)["rows"] for b in (1, 4))
    assert four["texts"] == one["texts"] * 4
    assert all(four[name] == one[name] for name in ("accesses", "hits", "misses", "evictions", "reads", "bytes"))
    assert four["mb_a_token"] == pytest.approx(one["mb_a_token"] / 4)


def test_prompts_are_taken_in_turn_and_laid_out(remoe, model):
    texts = write_rows(Path("p.jsonl"), [{"text": f"{letter} " * 60} for letter in "abcdefghijklm"])
    each = [
        decoded(remoe, model, "--cache", 2, "--tokens", 4, "--prompts", texts, "--requests", 3, *more)
        for more in ((), ("--context", 10), ("--context", 200))
    ]
    assert [done["conditions"]["prompt_tokens"][1:] for done in each[1:]] == [[10, 10], [200, 200]]
    assert len({*each[0]["rows"][0]["texts"]}) > 1 and each[0]["rows"][0]["requests"] == 3
    shown = remoe("decode", model, "--cache", 2, "--tokens", 4, "--prompts", texts, "--requests", 3)
    assert "[3] " in shown.out and "decode 12/12" in shown.err
    long = decoded(remoe, model, "--cache", 2, "--tokens", 4, "--context", 200)
    assert long["conditions"]["prompt_tokens"] == [200]


def test_prompts_of_a_batch_are_cut_to_one_length_with_a_note(remoe, model):
    write_rows(Path("p.jsonl"), [{"text": "the quick brown fox " * (3 + i)} for i in range(8)])
    ran = remoe(
        "decode", model, "--cache", 2, "--tokens", 3, "--prompts", "p.jsonl", "--batch", 3, "--requests", 7, "--json"
    )
    lengths = json.loads(ran.out)["conditions"]["prompt_tokens"]
    assert len(lengths) == 6 and len({*lengths}) == 1
    assert f"cut to their first {lengths[0]} tokens" in ran.err and "6 prompts are decoded, not 7" in ran.err


def test_prompts_longer_than_the_model_are_cut_with_a_note(remoe, model):
    write_rows(Path("p.jsonl"), [{"text": "the quick brown fox " * (100 * (i % 2) + 3)} for i in range(8)])
    ran = remoe("decode", model, "--cache", 2, "--tokens", 6, "--prompts", "p.jsonl", "--requests", 4, "--json")
    assert max(json.loads(ran.out)["conditions"]["prompt_tokens"]) == 250 and "first 250 tokens" in ran.err


def test_sampling_is_seeded_and_greedy_is_temperature_0(remoe, model):
    def text(*options) -> str:
        return decoded(remoe, model, "--cache", 4, "--tokens", 16, *options)["rows"][0]["texts"][0]

    hot = ("--temperature", 1.5, "--top-p", 0.95, "--top-k", 50)
    assert text(*hot) == text(*hot, "--seed", 0) != text(*hot, "--seed", 1)
    assert text() == text("--temperature", 0) == text("--top-k", 1) != text(*hot)


def test_a_cache_that_lives_on(remoe, model, texts):
    options = ("--cache", 6, "--tokens", 6, "--prompts", texts, "--requests", 4, "--context", 6)
    cold, carry = (decoded(remoe, model, *options, "--warm", warm)["rows"][0] for warm in ("cold", "carry"))
    assert carry["misses"] < cold["misses"] and carry["texts"] == cold["texts"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs")
def test_reads_that_are_not_direct_are_labelled(remoe, model):
    done = decoded(remoe, model, "--cache", 2, "--tokens", 3, "--io", "buffered")
    assert done["rows"][0]["io"] == done["conditions"]["io"] == "buffered" and not done["conditions"]["io_reason"]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        copy = shutil.copytree(model, Path(memory) / "model")
        done = decoded(remoe, copy, "--cache", 2, "--tokens", 3)
        assert done["conditions"]["io"] == "buffered" and "tmpfs" in done["conditions"]["io_reason"]
        assert "(io buffered: tmpfs" in remoe("decode", copy, "--cache", 2, "--tokens", 3).out


def test_a_policy_with_a_parameter_and_one_that_needs_probabilities(remoe, model):
    for policy in ("lrfu:0.1", "decayed", "gate"):
        (row,) = decoded(remoe, model, "--cache", 2, "--tokens", 6, "--policy", policy, "--admission", "bypass")["rows"]
        assert (row["policy"], row["admission"]) == (policy, "bypass") and row["hits"] + row["misses"] == 5 * 2 * 2


def test_a_delta_by_folder_by_run_and_by_the_runs_name(remoe, run):
    Path("runs").mkdir()
    Path("runs/mine").symlink_to(run)
    rows = [
        decoded(remoe, run.parent / "model", "--cache", 2, "--tokens", 8, *delta)["rows"][0]
        for delta in ([], ["--delta", run / "delta"], ["--delta", run], ["--delta", "mine"])
    ]
    base, *tuned = [(row["texts"], row["misses"]) for row in rows]
    assert tuned[0] == tuned[1] == tuned[2] != base


def test_what_cannot_be_decoded(remoe, model, texts):
    for options, *words in (
        (["--threads", 0], "--threads is 1 to"),
        (["--threads", -1], "not -1"),
        (["--threads", 10**6], "--threads is 1 to"),
        (["--tokens", 0], "--tokens is at least 1"),
        (["--tokens", 10**9], "more than the 256"),
        (["--device", "tpu"], "--device is cpu, cuda or cuda:N"),
        (["--device", ""], "--device is cpu"),
        (["--device", "cpu:3"], "--device is cpu, cuda or cuda:N"),
        (["--device", "cpu:0"], "--device is cpu"),
        (["--device", "cuda:07"], "--device is cpu"),
        (["--device", "cuda:x"], "--device is cpu"),
        (["--device", "cuda:99"], "no cuda:99"),
        (["--policy", "belady"], "lru, lfu, fifo"),
        (["--policy", "belady"], "what only a replay has"),
        (["--policy", "hindsight"], "what only a replay has"),
        (["--policy", "static"], "what only a replay has"),
        (["--policy", ""], "lru, lfu, fifo"),
        (["--policy", "lrru"], "did you mean"),
        (["--policy", "lru:2"], "takes no parameter"),
        (["--policy", "decayed:7"], "not '7'"),
        (["--policy", "decayed:x"], "not 'x'"),
        (["--admission", "free"], "forced or bypass"),
        (["--prompt", "\udcff"], "not UTF-8"),
        (["--cache", "2,x"], "--cache takes whole numbers", "--cache 2"),
        (["--cache", ""], "--cache takes whole numbers"),
        (["--cache", "2.5"], "not '2.5'"),
        (["--cache", "1,4"], "--cache 1 is too small", "--cache 2,4"),
        (["--tokens", "4,"], "--tokens takes whole numbers", "--tokens 4"),
        (["--tokens", "4,-1"], "--tokens is at least 1, not -1", "--tokens 4"),
        (["--batch", 0], "--batch is at least 1"),
        (["--batch", "two"], "--batch takes whole numbers"),
        (["--batch", 2], "says the same in every row", "--prompts demo"),
        (["--batch", "2,4", "--prompts", "texts.jsonl", "--requests", 3], "fewer than the 4", "--requests 4"),
        (
            ["--batch", 30, "--prompts", "texts.jsonl", "--context", 250, "--tokens", 1],
            "fewer than the 30 prompts of 250",
        ),
        (["--batch", 2, "--policy", "decayed"], "token by token", "--batch 2"),
        (["--warm", "batch", "--policy", "decayed"], "token by token"),
        (["--throttle", "fast"], "--throttle takes bytes a second", "--throttle 1GB/s"),
        (["--throttle", "1GB"], "not '1GB'"),
        (["--throttle", "1Gb/s"], "not '1Gb/s'"),
        (["--throttle", "0GB/s"], "not '0GB/s'"),
        (["--throttle", "1GB/s,"], "not ''"),
        (["--throttle", "-1GB/s"], "--throttle takes bytes a second"),
        (["--ram", "8Gb"], "--ram takes a size", "--ram 8GB"),
        (["--ram", "0"], "--ram takes a size"),
        (["--ram", "-1GB"], "--ram takes a size"),
        (["--ram", "900TB"], "RAM tier 900,000 GB", "--ram "),
        (["--guess", -1], "--guess is the number"),
        (["--guess", 3], "--guess 3 is more than the 2 experts", "--guess 2"),
        (["--readers", 0], "--readers is 1 to 64"),
        (["--readers", 65], "not 65"),
        (["--io", "mmap"], "--io is direct or buffered"),
        (["--warm", "hot"], "--warm is cold, batch or carry"),
        (["--warm", "carry", "--floor"], "--floor empties the cache"),
        (["--pack", "nothing-here"], "nothing-here"),
        (["--context", 0], "--context is at least 1"),
        (["--context", 250], "250 tokens of prompt and 32 new ones are more than the 256"),
        (["--requests", 2], "--requests counts those of --prompts"),
        (["--requests", 0, "--prompts", "texts.jsonl"], "--requests is at least 1"),
        (["--prompts", "texts.jsonl", "--prompt", "x"], "take one"),
        (["--prompts", "nothing.jsonl"], "no file nothing.jsonl"),
        (["--prompt", "x " * 400], "more than the 256", "--context 224"),
        (["--temperature", -1], "--temperature is 0"),
        (["--temperature", "nan"], "--temperature is 0"),
        (["--temperature", "inf"], "--temperature is 0"),
        (["--top-p", 0], "--top-p is above 0"),
        (["--top-p", 1.1], "--top-p is above 0"),
        (["--top-p", "nan"], "--top-p is above 0"),
        (["--top-k", 0], "--top-k is at least 1"),
        (["--seed", 1], "--seed draws the tokens"),
        (["--seed", -1, "--top-k", 4], "--seed is at least 0"),
        (["--seed", 2**63, "--top-k", 4], "--seed is at least 0"),
        (["--delta", "nothing-here"], "nothing-here"),
        (["--delta", "."], "not a delta"),
    ):
        refused(remoe("decode", model, *([] if "--cache" in options else ["--cache", 2]), *options), *words)
    refused(remoe("decode", tiny_models.make("olmoe", "bare"), "--cache", 2), "tokenizer")
    for cache in (1, 0, -3):
        refused(remoe("decode", model, "--cache", cache), f"--cache {cache} is too small", "--cache 2")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="needs /proc")
def test_ctrl_c_while_decoding(tmp_path):
    model = make_model(tmp_path / "model", max_position_embeddings=10**6)
    command = [sys.executable, "-m", "remoe_cli", "decode", str(model), "--cache", "2", "--tokens", "100000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not opened(process.pid, ".safetensors"):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "") and err.splitlines()[-1:] == ["Interrupted."], err
    assert "Traceback" not in err


def opened(pid: int, ending: str) -> bool:
    """Whether the process holds a file of that ending: the experts' files stay open while it decodes."""
    folder = Path(f"/proc/{pid}/fd")
    for link in os.listdir(folder):
        try:
            if os.readlink(folder / link).endswith(ending):
                return True
        except OSError:
            continue
    return False

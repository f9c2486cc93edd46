"""remoe decode: what it was asked and what it did."""

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
from commands import make_model, make_run, write_rows


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
    assert (row["capacity"], row["policy"], row["new_tokens"], row["batch"]) == (8, "lru", 3, 1)
    all_experts = 2 * 8 * done["model"]["expert_bytes"]
    assert all_experts < row["ram"] < 10**6, "of 1 MB no more than what all experts take, in whole pages"
    assert [words.split(" is taken as ")[0] for words in done["notes"]] == ["--cache 99", "--ram"]
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


def test_texts_are_decoded_as_they_lie_in_their_file(remoe, model):
    """One or equal ones, and of one line, will do: nothing is held out or trained on."""

    def lengths(name: str, *options) -> tuple[list[int], list[int]]:
        c = decoded(remoe, model, "--cache", 2, "--tokens", 2, "--prompts", name, *options)["conditions"]
        return c["prompt_rows"], c["prompt_tokens"]

    write_rows(Path("six.jsonl"), [{"text": "x" * 5 * i} for i in (1, 2, 0, 3, 4, 5, 6)])
    rows, tokens = lengths("six.jsonl", "--requests", 5)
    assert rows == [1, 2, 4, 5, 6] and tokens == sorted(set(tokens)), "in its order, without the empty one"
    joined, tokens = lengths("six.jsonl", "--context", 12)
    assert joined[0] == 1 and joined == sorted(joined) and set(tokens) == {12}
    write_rows(Path("one.jsonl"), [{"text": "the only one"}])
    write_rows(Path("same.jsonl"), [{"text": "the same"}] * 5)
    Path("line.txt").write_text("one document of one line")
    assert [lengths(name)[0] for name in ("one.jsonl", "same.jsonl", "line.txt")] == [[1], [1, 2, 3, 4, 5], [1]]
    assert decoded(remoe, model, "--cache", 2, "--tokens", 2)["conditions"]["prompt_rows"] is None


def test_a_recipes_number_of_held_out_texts_is_no_limit(remoe, model):
    write_rows(Path("many.jsonl"), [{"text": f"text {i}"} for i in range(1100)])
    options = ("--context", 4, "--tokens", 1, "--cache", 2, "--prompts", "many.jsonl", "--requests", 1050)
    done = decoded(remoe, model, *options)
    assert len(done["conditions"]["prompt_rows"]) == 1050 and done["notes"] == []


def test_caches_larger_than_the_model_are_one_row(remoe, model):
    done = decoded(remoe, model, "--cache", "2,8,99", "--tokens", 2)
    assert [row["capacity"] for row in done["rows"]] == [2, 8]
    assert "C = 8 (all there are; 99 asked for)" in remoe("decode", model, "--cache", "8,99", "--tokens", 2).out
    assert done["notes"] == ["--cache 99 is taken as 8: these are all experts of a layer"]


def test_a_table_says_all_that_its_figures_depend_on(remoe, model, texts):
    options = ("--cache", "2,4", "--tokens", "2,3", "--batch", "1,2", "--throttle", "none,1GB/s", "--prompts", texts)
    shown = remoe("decode", model, *options, "--context", 4, "--requests", 2).out
    assert "\nlru, forced; 2 prompts of 4 tokens.\nOn " in shown, "nothing that is by default"
    more = ("--ram", "80kB", "--guess", 1, "--warm", "batch", "--readers", 1, "--top-k", 5, "--seed", 7)
    shown = remoe("decode", model, "--cache", "2,4", "--tokens", 3, *more).out
    assert "1 prompt of" in shown and "With --ram 80 kB, --guess 1, --warm batch, --readers 1, tokens drawn (" in shown
    assert "top_k 5, seed 7" in shown


def test_no_rate_of_the_disk_where_memory_served_a_part(remoe, model):
    options = ("--cache", 2, "--tokens", 12, "--ram", "10MB")
    (row,) = decoded(remoe, model, *options)["rows"]
    assert row["ram_loads"] and row["bandwidth"] is None and row["prefill_bandwidth"] > 0
    shown = remoe("decode", model, *options).out
    assert "loads from RAM" in shown and "B/s" not in shown


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

"""What remoe decode refuses: every wrong option as one line, with the command that mends it."""

from pathlib import Path

import pytest
import tiny_models
from commands import refused, write_rows

from remoe_cli import memory
from remoe_cli.errors import CacheError, MemoryShortError
from remoe_cli.measure.decode_options import Asked, fitted, plan_of, shorter_of


def test_what_cannot_be_decoded(remoe, model, texts):
    write_rows(Path("blank.jsonl"), [{"text": " "}, {"text": ""}])
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
        (["--batch", "two"], "--batch takes whole numbers", "--cache 2"),
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
        (["--ram", "8B"], "holds no expert", "--cache 2"),
        (["--guess", -1], "--guess is the number"),
        (["--guess", 3], "--guess 3 is more than the 2 experts", "--guess 2"),
        (["--readers", 0], "--readers is 1 to 64"),
        (["--readers", 65], "not 65"),
        (["--io", "mmap"], "--io is direct or buffered"),
        (["--warm", "hot"], "--warm is cold, batch or carry"),
        (["--warm", "carry", "--floor"], "--floor empties the cache"),
        (["--pack", "nothing-here"], "nothing-here"),
        (["--context", 0], "--context is at least 1"),
        (["--context", 250], "250 tokens of prompt and 32 new ones are more than the 256", "--context 224"),
        (["--context", 253, "--tokens", 4], "253 tokens of prompt", "--context 252 --tokens 4"),
        (["--context", 253, "--tokens", 256], "253 tokens of prompt", "--context 224"),
        (["--requests", 2], "--requests counts those of --prompts"),
        (["--requests", 0, "--prompts", "texts.jsonl"], "--requests is at least 1"),
        (["--prompts", "texts.jsonl", "--prompt", "x"], "take one"),
        (["--prompts", "nothing.jsonl"], "no file nothing.jsonl"),
        (["--prompts", ""], "no source of texts", "--prompts demo"),
        (["--prompts", "blank.jsonl"], "no row of blank.jsonl can be used: empty", "--prompts demo"),
        (["--prompts", "blank.jsonl/x.jsonl"], "there is no file", "ls "),
        (["--prompt", "x " * 400], "more than the 256", "--context 224"),
        (["--temperature", -1], "--temperature is 0"),
        (["--temperature", "nan"], "--temperature is 0"),
        (["--temperature", "inf"], "--temperature is 0"),
        (["--top-p", 0], "--top-p is above 0"),
        (["--top-p", 1.1], "--top-p is above 0"),
        (["--top-p", "nan"], "--top-p is above 0"),
        (["--top-k", 0], "--top-k is at least 1"),
        (["--seed", 1], "--seed draws the tokens"),
        (["--temperature", 0, "--seed", 3], "--temperature 0 is greedy", "--seed", "--temperature 0.8 --seed 3"),
        (["--temperature", 0, "--top-p", 0.5], "--temperature 0 is greedy", "--top-p has no use"),
        (["--seed", -1, "--top-k", 4], "--seed is at least 0"),
        (["--seed", 2**63, "--top-k", 4], "--seed is at least 0"),
        (["--delta", "nothing-here"], "nothing-here"),
        (["--delta", "."], "not a delta"),
    ):
        refused(remoe("decode", model, *([] if "--cache" in options else ["--cache", 2]), *options), *words)
    refused(remoe("decode", tiny_models.make("olmoe", "bare"), "--cache", 2), "tokenizer")
    for cache in (1, 0, -3):
        refused(remoe("decode", model, "--cache", cache), f"--cache {cache} is too small", "--cache 2")


def test_too_many_tokens_for_memory_are_refused_with_as_many_as_fit(remoe, model, monkeypatch):
    options = ("--cache", 2, "--top-k", 5, "--tokens", 16)
    monkeypatch.setattr(memory, "available", lambda: memory.Room(10**9, "the machine"))
    refused(
        remoe("decode", model, *options, "--batch", "2,200000"), "tokens would fit", "--tokens 16 --top-k 5 --batch 2"
    )
    ran = remoe("decode", model, *options, "--batch", "200000", "--context", 100)
    refused(ran, "tokens would fit", "--context 100 --tokens 16 --top-k 5 --batch ")
    batch = int(ran.err.split("--batch ")[-1])
    shorter = shorter_of(plan_of(Asked("2", tokens="16", batch="4"), "m"), 116)
    assert shorter(116 * batch + 115) == {"batch": str(min(batch, 4))} and shorter(116) == {"batch": "1"}
    assert shorter(115) == {"batch": None, "tokens": 16, "context": 99}


def test_too_little_memory_is_refused_with_the_other_options_kept(remoe, model, monkeypatch):
    options = {"cache": "2,4,8", "tokens": "4", "ram": "1MB", "guess": 1}
    asked = Asked(**options)
    for changes, words in (
        ({"cache": 5, "ram": None}, "--cache 2,4,5 --tokens 4 --guess 1"),
        ({"cache": 8, "ram": "20MB"}, "--cache 2,4,8 --tokens 4 --ram 20MB --guess 1"),
    ):
        with pytest.raises(CacheError) as caught, fitted(lambda **to: asked.command("m", **to), [2, 4, 8]):
            raise MemoryShortError("too little", "remoe decode m", changes)
        assert caught.value.hint == f"remoe decode m {words}"
    monkeypatch.setattr(memory, "available", lambda: memory.Room(1000, "the machine"))
    given = [word for name, value in options.items() for word in (f"--{name}", value)]
    refused(remoe("decode", model, *given), "has 1 kB left", f"decode {model} --cache 2 --tokens 4 --guess 1 where ")

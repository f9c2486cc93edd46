"""The overlay and the copy in vLLM: the same logits, the tuned ones.

vLLM pins its own torch and transformers, so it lives in an environment of its own: REMOE_VLLM names that Python.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest
import tiny_models
import torch
from interop_model import logits, moved
from transformers import AutoModelForCausalLM

from remoe_cli.delta import Delta, overlay, patched_copy
from remoe_cli.hub.checkpoint import Checkpoint

PYTHON = os.environ.get("REMOE_VLLM")
pytestmark = pytest.mark.skipif(not PYTHON, reason="REMOE_VLLM names no Python that has vLLM")
IDS = [3, 1, 4, 1, 5, 9, 2, 6, 50, 60, 70, 80, 90, 100] * 4
SCRIPT = """
import gc, json, os, sys
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
ids, *folders = map(json.loads, sys.argv[1:])
asked = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
for folder in folders:
    model = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=1, skip_tokenizer_init=True, seed=0)
    said = model.generate({"prompt_token_ids": ids}, asked)[0].prompt_logprobs
    print(json.dumps([places[token].logprob for places, token in zip(said[1:], ids[1:])]), flush=True)
    del model
    gc.collect()
    cleanup_dist_env_and_memory()
os._exit(0)  # not waiting for its engines
"""


def said_by_vllm(*folders: Path) -> list[torch.Tensor]:
    """Log-probability of each token of IDS after those before it, by folder. [55] each."""
    settings = {"VLLM_MLA_DISABLE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    environment = {**os.environ, **settings, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(PYTHON), "-c", SCRIPT, json.dumps(IDS), *(json.dumps(str(folder)) for folder in folders)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    found = [torch.tensor(json.loads(line)) for line in done.stdout.splitlines() if line.startswith("[-")]
    assert len(found) == len(folders), done.stderr[-3000:] + done.stdout[-3000:]
    return found


def said_by_transformers(folder: Path) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    chances = logits(model, torch.tensor([IDS])).log_softmax(-1)[0, :-1]
    return chances.gather(1, torch.tensor(IDS[1:])[:, None])[:, 0]


def test_vllm_reads_the_overlay_as_it_reads_the_copy(tmp_path):
    """Of a family that both compute alike: what vLLM says is what transformers says, before and after."""
    sizes = {"hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    base = Checkpoint.open(tiny_models.make("qwen3_moe", tmp_path / "base", torch.float32, **sizes))
    check(base, moved(base, share=0.5), tmp_path, against_transformers=True)


def test_vllm_reads_the_demos_overlay_as_its_copy(demo, demo_delta, tmp_path):
    """Its DeepSeek-V2 attention on a CPU is not transformers' (for the base as well), so those two are not compared."""
    check(demo, demo_delta, tmp_path, against_transformers=False)


def check(base: Checkpoint, delta: Delta, work: Path, against_transformers: bool) -> None:
    folders = [base.folder, patched_copy(delta, base, work / "copy"), overlay(delta, base, work / "overlay")]
    before, copied, laid_over = said_by_vllm(*folders)
    assert torch.equal(copied, laid_over)
    assert (copied - before).abs().max() > 0.05, "nothing to tell apart"
    if against_transformers:
        for folder, found in zip(folders, (before, copied, laid_over)):
            torch.testing.assert_close(found, said_by_transformers(folder), rtol=0, atol=1e-4)

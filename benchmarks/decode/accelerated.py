"""The peer of transformers' users: accelerate keeps some modules on disk (or, with a GPU, in host memory) and brings each
to where it computes just before it runs.

    python -m decode.accelerated < JOB.json

JOB: model (folder), ids, prompt (how many of them are the prompt; the rest are fed one by one), threads, offload (folder
for what it writes), disk ("experts": the routed experts stay on disk; "layers": whole layers do, as device_map="auto" would
have it; null: all in RAM), max_memory (instead of `disk`: device -> bytes, for device_map="auto"). Prints one line of JSON: ttft_s, itl_s, token_bytes, best.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging


def main() -> None:
    job = json.load(sys.stdin)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(job["threads"])
    model = load(job)
    device = next(iter(model.hf_device_map.values())) if job.get("max_memory") else "cpu"
    ids = torch.tensor([job["ids"]], device=device if isinstance(device, int) else "cpu")
    at, read, best = [time.perf_counter()], [storage_bytes()], []
    with torch.inference_mode():
        out = model(input_ids=ids[:, : job["prompt"]], use_cache=True, logits_to_keep=1)
        for token in range(job["prompt"], ids.shape[1] + 1):
            best.append(int(out.logits[0, -1].argmax()))
            at.append(time.perf_counter())
            read.append(storage_bytes())
            if token < ids.shape[1]:
                name = "cache" if "cache" in out else "past_key_values"  # renamed in transformers 5.24
                out = model(input_ids=ids[:, token : token + 1], use_cache=True, **{name: out[name]})
    steps = [b - a for a, b in zip(at, at[1:])]
    moved = [b - a for a, b in zip(read, read[1:])]
    print(json.dumps({"ttft_s": steps[0], "itl_s": steps[1:], "token_bytes": moved[1:], "best": best}))


def load(job: dict) -> torch.nn.Module:
    """The stock model; what stays on disk is read from there for every pass."""
    folder = job["model"]
    if job.get("max_memory"):
        limits = {int(name) if name.isdigit() else name: size for name, size in job["max_memory"].items()}
        where: dict = {"device_map": "auto", "max_memory": limits, "offload_folder": job["offload"]}
    elif job["disk"]:
        where = {
            "device_map": device_map(AutoConfig.from_pretrained(folder), job["disk"]),
            "offload_folder": job["offload"],
        }
    else:
        where = {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **where).eval()


def device_map(config, disk: str) -> dict[str, str]:
    found = dict.fromkeys(["model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"], "cpu")
    for number in range(config.num_hidden_layers):
        layer = f"model.layers.{number}"
        if number < config.first_k_dense_replace:
            found[layer] = "cpu"
        elif disk == "layers":
            found[layer] = "disk"
        else:
            names = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp.gate", "mlp.shared_experts")
            found |= dict.fromkeys([f"{layer}.{name}" for name in names], "cpu")
            found[f"{layer}.mlp.experts"] = "disk"
    return found


def storage_bytes() -> int:
    """What the kernel fetched from storage for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


if __name__ == "__main__":
    main()

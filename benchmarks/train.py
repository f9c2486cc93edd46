"""Training the gates of one model in several ways: tokens a second, and peak memory above the weights.

    make bench-train                          3 interleaved rounds on the CPU, about 10 minutes on 2 cores
    python benchmarks/train.py --dry-run      the same code on a tiny model, in seconds: its figures mean nothing
    python benchmarks/train.py --device cuda

Every arm is a process of its own, learns the same tokens with cross entropy alone, and moves nothing but the gates: remoe with its own experts
that do not learn (with and without checkpointing), the Hugging Face Trainer with PEFT on the routers (LNTuning: their whole weight), and plain
autograd with the stock experts. Memory on a CPU is what is anonymous and resident at its peak, less what was so once the model was
there. Bars: 1.5 times the Trainer's tokens a second, at half its memory above the weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decode import report
from decode.rounds import Bar, interleave, number, ratio, spread

ARMS = ("remoe", "remoe, checkpointed", "Trainer + PEFT", "autograd, grouped_mm", "autograd, eager")
MODEL = {
    "vocab_size": 32_000, "hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2048, "moe_intermediate_size": 512, "num_experts": 64, "num_experts_per_tok": 8,
}  # fmt: skip
TINY = MODEL | {
    "vocab_size": 512,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
EVERY_S = 0.005  # between two looks at this process' memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/bench/results"))
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.arm:
        print(json.dumps(run(json.loads(asked.arm))))
        return
    if asked.device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here. Try: python benchmarks/train.py --dry-run")
    job = {name: getattr(asked, name) for name in ("device", "steps", "sequence", "accumulation", "threads")}
    results = measure(job, asked.rounds, dry=asked.dry_run)
    asked.out.mkdir(parents=True, exist_ok=True)
    stem = asked.out / f"train-{time.strftime('%Y%m%d-%H%M%S')}"
    text = markdown(results)
    stem.with_suffix(".json").write_text(json.dumps({**results, "bars": [bar.row() for bar in results["bars"]]}))
    stem.with_suffix(".md").write_text(text + "\n")
    print(text)


def measure(job: dict[str, Any], rounds: int, *, dry: bool, arms: tuple[str, ...] = ARMS) -> dict[str, Any]:
    """job: device, steps, sequence, accumulation, threads. dry: a tiny model, one round, short rows."""
    if dry:
        job, rounds = {**job, "steps": 2, "sequence": 32}, 1
    job = {**job, "model": TINY if dry else MODEL}
    found = interleave({name: lambda name=name: _child({**job, "name": name}) for name in arms}, rounds, "train")
    ours, theirs = arms[0], "Trainer + PEFT"
    rate: Callable[[str], Callable] = lambda name: lambda r: r[name]["tokens_per_s"]  # noqa: E731
    peak: Callable[[str], Callable] = lambda name: lambda r: r[name]["peak"]  # noqa: E731
    bars = [
        Bar("tokens a second against the Trainer's", ratio(found, rate(ours), rate(theirs)), 1.5),
        Bar(
            "memory above the weights against the Trainer's", ratio(found, peak(ours), peak(theirs)), 0.5, better="less"
        ),
    ]
    rows = [
        {
            "arm": name,
            "tokens/s": str(spread([r[name]["tokens_per_s"] for r in found])),
            "MB above the weights": str(spread([r[name]["peak"] / 1e6 for r in found])),
            "remoe's tokens/s to its": str(ratio(found, rate(ours), rate(name))),
            "remoe's memory to its": str(ratio(found, peak(ours), peak(name))),
            "loss of the last step": number(found[0][name]["loss"]),
        }
        for name in arms
    ]  # fmt: skip
    conditions = {
        "model": f"random weights, Qwen3-MoE, {json.dumps(job['model'])}, bf16, {found[0][ours]['weights'] / 1e9:.2f} GB",
        "step": f"{job['accumulation']} rows of {job['sequence']} tokens, cross entropy alone, AdamW on the gates",
        "device": torch.cuda.get_device_name() if job["device"] == "cuda" else f"CPU, {job['threads']} threads",
        "figures": "medians over rounds of the mean of all steps but the first; of ratios within a round",
    }
    return {"conditions": conditions, "bars": bars, "rows": rows, "rounds": found}


def markdown(results: dict[str, Any]) -> str:
    lines = ["# Training the gates", "", *(f"- {k}: {v}" for k, v in results["conditions"].items()), ""]
    return "\n".join(
        lines + report.table([report.bar_row(bar) for bar in results["bars"]]) + report.table(results["rows"])
    )


def _child(job: dict[str, Any]) -> dict[str, Any]:
    ran = subprocess.run([sys.executable, __file__, "--arm", json.dumps(job)], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"error: the arm {job['name']} failed:\n{ran.stderr[-2000:]}")
    return json.loads(ran.stdout.splitlines()[-1])


def run(job: dict[str, Any]) -> dict[str, Any]:
    """In a process of its own: one arm. weights, peak: bytes; tokens_per_s of all steps but the first."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    config = AutoConfig.for_model("qwen3_moe", **job["model"], router_aux_loss_coef=0.0, norm_topk_prob=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).to(job["device"]).eval()
    torch.set_default_dtype(torch.float32)
    rows = torch.randint(3, job["model"]["vocab_size"], (job["steps"] * job["accumulation"], job["sequence"])).tolist()
    ends: list[float] = []
    with _Peak(job["device"]) as peak:
        loss = _arms()[job["name"]](model, rows, job, lambda: ends.append(_now(job["device"])))
    tokens = job["accumulation"] * job["sequence"] * (len(ends) - 1)
    return {
        "tokens_per_s": tokens / (ends[-1] - ends[0]),
        "peak": peak.nbytes,
        "weights": sum(parameter.nbytes for parameter in model.parameters()),
        "loss": loss,
    }


def _arms() -> dict[str, Callable[..., float]]:
    return {
        "remoe": _remoe,
        "remoe, checkpointed": lambda *given: _remoe(*given, checkpointing=True),
        "Trainer + PEFT": _trainer,
        "autograd, grouped_mm": _autograd,
        "autograd, eager": lambda *given: _autograd(*given, experts="eager"),
    }


def _remoe(
    model: Any, rows: list[list[int]], job: dict[str, Any], on_step: Callable, checkpointing: bool = False
) -> float:
    from remoe_cli.families import find_gates
    from remoe_cli.recipe import load, override
    from remoe_cli.train.packing import batches
    from remoe_cli.train.trainer import train

    settings = {
        "steps": job["steps"],
        "sequence": job["sequence"],
        "accumulation": job["accumulation"],
        "checkpointing": str(checkpointing).lower(),
    }
    recipe = override(load("ce-only", "qwen3_moe"), [f"train.{key}={value}" for key, value in settings.items()])
    texts = batches(rows, job["sequence"], 1)
    return train(model, find_gates(model), texts, recipe, on_step=lambda _: on_step()).steps[-1].loss


def _autograd(
    model: Any, rows: list[list[int]], job: dict[str, Any], on_step: Callable, experts: str = "grouped_mm"
) -> float:
    model.set_experts_implementation(experts)
    model.requires_grad_(False)
    gates = [
        parameter.requires_grad_() for name, parameter in model.named_parameters() if name.endswith("mlp.gate.weight")
    ]
    optimiser, total = torch.optim.AdamW(gates, lr=5e-5, weight_decay=0.0), 0.0
    for step in range(job["steps"]):
        total = 0.0
        for row in rows[step * job["accumulation"] : (step + 1) * job["accumulation"]]:
            ids = torch.tensor([row], device=job["device"])
            loss = model(input_ids=ids, labels=ids).loss / job["accumulation"]
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(gates, 1.0)
        optimiser.step()
        optimiser.zero_grad()
        on_step()
    return total


def _trainer(model: Any, rows: list[list[int]], job: dict[str, Any], on_step: Callable) -> float:
    from peft import get_peft_model, LNTuningConfig
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Ends(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            on_step()

    tuned = get_peft_model(model, LNTuningConfig(target_modules=r".*\.mlp\.gate"))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=job["steps"], per_device_train_batch_size=1, gradient_accumulation_steps=job["accumulation"], learning_rate=5e-5,
            lr_scheduler_type="constant", weight_decay=0.0, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, seed=0,
            use_cpu=job["device"] == "cpu", dataloader_pin_memory=job["device"] == "cuda",
        )  # fmt: skip
        texts = [{"input_ids": row, "labels": row} for row in rows]
        trainer = Trainer(tuned, arguments, train_dataset=texts, callbacks=[Ends()], data_collator=_collated)
        trainer.train()
    return float(next(row["loss"] for row in reversed(trainer.state.log_history) if "loss" in row))


def _collated(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


class _Peak:
    """nbytes: the most memory that was in use while open, less what was at its start."""

    def __init__(self, device: str) -> None:
        self._cuda, self.nbytes = device == "cuda", 0

    def __enter__(self) -> _Peak:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
            return self
        self._before, self._over = _anonymous(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self.nbytes = torch.cuda.max_memory_allocated() - self._before
            return
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(EVERY_S):
            self.nbytes = max(self.nbytes, _anonymous() - self._before)


def _anonymous() -> int:
    """Bytes that are resident and no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    main()

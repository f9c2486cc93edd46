"""Makes the embedded demo checkpoint from nothing but the running Python's standard library.

    python recipes/demo/make.py --out remoe_cli/demo/checkpoint --work build/demo

Seeded; resumable (run it again after an interrupt: it goes on from the last saved step in --work);
ships the step with the lowest held-out loss. Shape letters: B rows, T tokens, E experts, K experts a token.
"""

import argparse
import json
import math
import os
import platform
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import decoders, models, pre_tokenizers, processors, Tokenizer, trainers
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, PreTrainedTokenizerFast

from remoe_cli.demo import corpus

SEQUENCE, BATCH, LR, WARMUP, BALANCE = 256, 8, 3e-3, 100, 0.003
VOCAB = 2048


def main() -> None:
    args = _arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(args.work / "tokenizer.json")
    train_NT = rows(tokenizer, "train", SEQUENCE)
    held_NT = rows(tokenizer, "heldout", SEQUENCE)
    print(
        f"corpus {corpus.fingerprint()[:16]}  train {train_NT.numel():,} tokens  held-out {held_NT.numel():,}",
        flush=True,
    )
    model = DeepseekV2ForCausalLM(config())
    model.set_experts_implementation("grouped_mm")
    print(f"parameters {sum(p.numel() for p in model.parameters()):,}", flush=True)
    history = pretrain(model, train_NT, held_NT, args)
    ship(model, tokenizer, history, args)


def config() -> DeepseekV2Config:
    return DeepseekV2Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=384, moe_intermediate_size=48, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=2, n_routed_experts=64, num_experts_per_tok=6,
        first_k_dense_replace=1, kv_lora_rank=64, q_lora_rank=None, qk_rope_head_dim=16, qk_nope_head_dim=32,
        v_head_dim=32, topk_method="greedy", n_group=1, topk_group=1, norm_topk_prob=False, routed_scaling_factor=1.0,
        max_position_embeddings=1024, rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=0, eos_token_id=1, pad_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip


def make_tokenizer(cache: Path) -> Tokenizer:
    """Byte-level BPE of VOCAB entries, trained on the train split; one BOS is put first, as DeepSeek's does."""
    if cache.exists():
        return Tokenizer.from_file(str(cache))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|bos|>", "<|eos|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.text for d in corpus.documents("train")), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer.save(str(cache))
    return tokenizer


def rows(tokenizer: Tokenizer, split: str, length: int) -> torch.Tensor:
    """All documents of a split, each BOS ... EOS, in one stream cut into rows [N, length]; the rest is dropped."""
    ids = [i for doc in corpus.documents(split) for i in [*tokenizer.encode(doc.text).ids, 1]]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def pretrain(model, train_NT, held_NT, args) -> dict:
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=True)
    probabilities: list[torch.Tensor] = []
    choices: list[torch.Tensor] = []

    def record(_module, _inputs, outputs) -> None:
        probabilities.append(outputs[0].softmax(-1))
        choices.append(outputs[2])

    for layer in model.model.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(record)
    state, step, history, best = args.work / "state.pt", 0, [], (math.inf, 0)
    if state.exists():
        saved = torch.load(state)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, history, best = saved["step"], saved["history"], saved["best"]
        print(f"resumed at step {step}", flush=True)
    per_epoch, begin, first = len(train_NT) // BATCH, time.time(), step
    while step < args.steps:
        epoch, at = divmod(step, per_epoch)
        order = torch.randperm(len(train_NT), generator=torch.Generator().manual_seed(args.seed + epoch))
        ids_BT = train_NT[order[at * BATCH : (at + 1) * BATCH]]
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, args.steps)
        probabilities.clear()
        choices.clear()
        model.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=args.bf16):
            ce = model(ids_BT, labels=ids_BT, use_cache=False).loss
        balance = sum(balance_loss(p, c, BATCH) for p, c in zip(probabilities, choices, strict=True))
        loss = ce + BALANCE * balance
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 20 == 0:
            rate = (step - first) * ids_BT.numel() / (time.time() - begin)
            eta = (args.steps - step) * ids_BT.numel() / rate / 60
            print(
                f"step {step}/{args.steps}  ce {ce:.4f}  balance {balance:.3f}  {rate:,.0f} tok/s  eta {eta:.1f} min",
                flush=True,
            )
        if step % args.save_every == 0 or step == args.steps:
            held, eor = evaluate(model, held_NT, choices, args)
            history.append({"step": step, "epoch": step / per_epoch, "heldout_loss": held, "eor": eor})
            print(f"  held-out loss {held:.4f}  perplexity {math.exp(held):.2f}  EOR {eor:.3f}", flush=True)
            if held < best[0]:
                best = (held, step)
                torch.save(model.state_dict(), args.work / "best.pt")
            snapshot = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "step": step,
                "history": history,
                "best": best,
            }
            torch.save(snapshot, state.with_suffix(".tmp"))
            os.replace(state.with_suffix(".tmp"), state)
    model.load_state_dict(torch.load(args.work / "best.pt"))
    return {"history": history, "best_step": best[1], "heldout_loss": best[0], "epochs": best[1] / per_epoch}


def learning_rate(step: int, steps: int) -> float:
    if step < WARMUP:
        return LR * (step + 1) / WARMUP
    return LR * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / max(1, steps - WARMUP))))


def balance_loss(probability_NE: torch.Tensor, choice_NK: torch.Tensor, batch: int) -> torch.Tensor:
    """Sequence-level balance loss (DeepSeek-V2, section 2.2.3): sum_e f_e P_e for each row; 1 when even."""
    experts, k = probability_NE.shape[-1], choice_NK.shape[-1]
    share_BE = F.one_hot(choice_NK, experts).sum(1).view(batch, -1, experts).float().mean(1) * experts / k
    return (share_BE * probability_NE.view(batch, -1, experts).mean(1)).sum(-1).mean()


@torch.no_grad()
def evaluate(model, held_NT, choices, args) -> tuple[float, float]:
    """Held-out loss (nats a token) and expert overlap ratio over the first rows."""
    model.eval()
    losses, shared, pairs = [], 0.0, 0
    for ids_BT in held_NT[: args.eval_rows].split(16):
        choices.clear()
        losses.append(model(ids_BT, labels=ids_BT, use_cache=False).loss.item() * len(ids_BT))
        for choice_NK in choices:
            hot = F.one_hot(choice_NK, 64).sum(1).view(len(ids_BT), -1, 64)
            shared += (hot[:, 1:] * hot[:, :-1]).sum().item() / choice_NK.shape[-1]
            pairs += hot[:, 1:].shape[0] * hot[:, 1:].shape[1]
    return sum(losses) / len(held_NT[: args.eval_rows]), shared / pairs


def ship(model, tokenizer: Tokenizer, history: dict, args) -> None:
    """Writes the checkpoint in bf16, the tokenizer, and training.json (what the card quotes)."""
    model.to(torch.bfloat16).save_pretrained(args.out)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|bos|>", eos_token="<|eos|>", pad_token="<|pad|>", model_max_length=1024
    ).save_pretrained(args.out)
    named = args.out / "tokenizer_config.json"  # under the name that every release of transformers knows
    named.write_text(named.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    (args.out / "model.safetensors").chmod(0o644)
    facts = {
        "corpus_sha256": corpus.fingerprint(), "python": platform.python_version(), "torch": torch.__version__,
        "seed": args.seed, "steps": args.steps, "tokens_a_step": SEQUENCE * BATCH, "learning_rate": LR,
        "balance_coefficient": BALANCE, "bf16_autocast": args.bf16, **history,
    }  # fmt: skip
    (args.out / "training.json").write_text(json.dumps(facts, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=4900)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save-every", type=int, default=250)
    parser.add_argument("--eval-rows", type=int, default=128)
    parser.add_argument("--bf16", action=argparse.BooleanOptionalAction, default=False)
    return parser.parse_args()


if __name__ == "__main__":
    main()

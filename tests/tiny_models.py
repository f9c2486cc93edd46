"""Tiny random checkpoints with the real on-disk layouts of each family, in several shards.

Three layers (some families: the first one dense), hidden 32, 8 routed experts, top-2, vocabulary 128. The weights are
random and wide enough that routing and greedy tokens vary; they mean nothing.
"""

import json
from pathlib import Path

import torch

HIDDEN, EXPERTS, TOP_K, LAYERS, VOCABULARY = 32, 8, 2, 3, 128
SHARDS = 4
MODEL_TYPES = ("deepseek_v2", "qwen3_moe", "mixtral", "gpt_oss", "olmoe", "qwen2_moe")
FIRST_DENSE = ("deepseek_v2", "qwen2_moe")  # their first layer has no gate

_COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_experts_per_tok": TOP_K,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SETTINGS = {
    "deepseek_v2": {
        "num_key_value_heads": 4,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    },
    "qwen3_moe": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "num_experts": EXPERTS,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": EXPERTS},
    "gpt_oss": {
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "num_local_experts": EXPERTS,
        "sliding_window": 8,
    },
    "olmoe": {
        "num_key_value_heads": 4,
        "intermediate_size": 24,
        "num_experts": EXPERTS,
        "norm_topk_prob": False,
    },
    "qwen2_moe": {
        "num_key_value_heads": 2,
        "intermediate_size": 48,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "num_experts": EXPERTS,
        "norm_topk_prob": False,
        "mlp_only_layers": [0],
    },
}


def make(
    model_type: str, folder: str | Path, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: object
) -> Path:
    """Write a checkpoint (config.json, at least 3 safetensors shards and their index) into folder; returns folder.

    model_type: one of MODEL_TYPES. settings override the configuration (`tie_word_embeddings=True`, `num_experts=16`).
    Every tensor is stored in dtype, the gates too, as the published checkpoints do. The shards are cut in the natural
    order of names, so that most experts lie side by side and some lie in two shards.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_COMMON, **_SETTINGS[model_type], **settings})
    state = torch.random.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _widen(model)
    finally:
        torch.random.set_rng_state(state)
    model = model.to(dtype)
    config.dtype = dtype
    model.save_pretrained(folder)
    _shard(Path(folder))
    return Path(folder)


def _shard(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    single = folder / "model.safetensors"
    tensors = load_file(single)
    single.unlink()
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[list[str]] = [[]]
    size = 0
    for name in sorted(tensors, key=_natural):
        if size >= total / SHARDS and len(shards) < SHARDS:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensors[name].nbytes
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _natural(name: str) -> tuple:
    return tuple((int(word), "") if word.isdigit() else (-1, word) for word in name.split("."))


@torch.no_grad()
def _widen(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "_bias" in name or "sinks" in name:
            parameter.normal_(0, 0.1)
        elif parameter.ndim == 1:
            parameter.normal_(1, 0.1)
        elif "embed_tokens" in name:
            parameter.normal_(0, 3.0)  # outweighs the mean that attention adds to all tokens alike
        else:
            parameter.normal_(0, 1.5 * HIDDEN**-0.5)

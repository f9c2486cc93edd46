"""Tiny random checkpoints with the real on-disk layouts of each family, in several shards.

Three layers (some families: the first one dense), hidden 32, 8 routed experts, top-2, vocabulary 128, as the rows of the
conformance suite have it. The weights are random and wide enough that routing and greedy tokens vary; they mean nothing.
"""

import json
from pathlib import Path

import torch
from conformance.rows import EXPERTS, HIDDEN, LAYERS, ROWS, settings_of, TOP_K, VOCABULARY

SHARDS = 4
MODEL_TYPES = ("deepseek_v2", "qwen3_moe", "mixtral", "gpt_oss", "olmoe", "qwen2_moe")
FIRST_DENSE = tuple(name for name in MODEL_TYPES if ROWS[name].dense)  # their first layer has no gate


def make(
    model_type: str, folder: str | Path, dtype: torch.dtype = torch.float32, seed: int = 0, **settings: object
) -> Path:
    """Write a checkpoint (config.json, at least 3 safetensors shards and their index) into folder; returns folder.

    model_type: a row of the conformance suite. settings override the configuration (`tie_word_embeddings=True`, `num_experts=16`).
    Every tensor is stored in dtype, the gates too, as the published checkpoints do. The shards are cut in the natural
    order of names, so that most experts lie side by side and some lie in two shards.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**settings_of(model_type), **settings})
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
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.normal_(0, 0.2)
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "_bias" in name or "sinks" in name:
            parameter.normal_(0, 0.1)
        elif parameter.ndim == 1:
            parameter.normal_(1, 0.1)
        elif "embed_tokens" in name:
            parameter.normal_(0, 3.0)  # outweighs the mean that attention adds to all tokens alike
        else:
            parameter.normal_(0, 1.5 * HIDDEN**-0.5)


__all__ = ["EXPERTS", "FIRST_DENSE", "HIDDEN", "LAYERS", "MODEL_TYPES", "SHARDS", "TOP_K", "VOCABULARY", "make"]

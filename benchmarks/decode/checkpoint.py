"""A random checkpoint with the layer geometry of DeepSeek-V2-Lite, as safetensors and, for llama.cpp, as GGUF.

    python -m decode.checkpoint OUT [--layers 8] [--tiny] [--no-gguf]        (from benchmarks/)

OUT/hf: config.json, one shard a layer, index. OUT/model.gguf: the same weights in bf16. Speed depends on shapes and on which
experts are chosen, not on what the weights mean. Random routers would repeat too few experts, so tokens share a direction:
embeddings have mean 1/2, and each gate row has a mean of its own, which every token scores alike. `skew` is the standard
deviation of those scores, and sets the EOR (about .32 at 1.5). Eight layers take 8.6 GB a format.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

SHARED = 0.5  # mean of the embeddings, whose noise has deviation 1
KINDS = ("gate", "up", "down")


@dataclass(frozen=True)
class Geometry:
    """hidden, expert, dense: widths; lora, nope, rope, value: of the latent attention, as the configuration calls them."""

    layers: int = 8
    hidden: int = 2048
    expert: int = 1408
    dense: int = 10944
    experts: int = 64
    top_k: int = 6
    shared: int = 2
    heads: int = 16
    lora: int = 512
    nope: int = 128
    rope: int = 64
    value: int = 128
    vocabulary: int = 25600
    context: int = 4096

    @property
    def config(self) -> dict:
        return {
            "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "dtype": "bfloat16",
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "intermediate_size": self.dense,
            "moe_intermediate_size": self.expert, "n_routed_experts": self.experts, "n_shared_experts": self.shared,
            "num_experts_per_tok": self.top_k, "first_k_dense_replace": 1, "moe_layer_freq": 1,
            "num_attention_heads": self.heads, "num_key_value_heads": self.heads, "q_lora_rank": None,
            "kv_lora_rank": self.lora, "qk_nope_head_dim": self.nope, "qk_rope_head_dim": self.rope,
            "v_head_dim": self.value, "vocab_size": self.vocabulary, "max_position_embeddings": self.context,
            "topk_method": "greedy", "scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 1.0,
            "n_group": 1, "topk_group": 1, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1,
        }  # fmt: skip


TINY = Geometry(
    layers=3, hidden=64, expert=64, dense=96, experts=16, top_k=4, shared=1, heads=4, lora=32, nope=16, rope=8, value=16,
    vocabulary=256, context=512,
)  # fmt: skip


def make(out: Path, geometry: Geometry, *, skew: float = 1.5, gguf: bool = True) -> None:
    """Writes OUT/hf and OUT/model.gguf, both from one pass over the layers; at most one layer is in memory."""
    from safetensors.torch import save_file

    folder = out / "hf"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(geometry.config, indent=1))
    writer = _Gguf(out / "model.gguf", geometry) if gguf else None
    places, total = {}, 0
    for number in range(geometry.layers + 1):
        tensors = dict(_layer(geometry, number, skew) if number < geometry.layers else _ends(geometry))
        name = f"model-{number + 1:05d}-of-{geometry.layers + 1:05d}.safetensors"
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places.update(dict.fromkeys(tensors, name))
        total += sum(tensor.nbytes for tensor in tensors.values())
        if writer:
            writer.write(number, tensors)
    if writer:
        writer.close()
    # the index comes last: without it the folder is unfinished
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def shorter(folder: Path, out: Path, layers: int) -> Path:
    """The first `layers` layers of a checkpoint that `make` wrote, in links to its shards."""
    out.mkdir(parents=True, exist_ok=True)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": layers}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"] = {
        name: file
        for name, file in index["weight_map"].items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    for file in set(index["weight_map"].values()):
        link = out / file
        link.unlink(missing_ok=True)
        link.symlink_to((folder / file).resolve())
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    return out


def _normal(name: str, *shape: int, std: float, mean: float = 0.0) -> torch.Tensor:
    """Always the same for a name."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.empty(shape).normal_(mean, std, generator=generator).bfloat16()


def _ends(g: Geometry) -> Iterator[tuple[str, torch.Tensor]]:
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    yield embedding, _normal(embedding, g.vocabulary, g.hidden, std=1.0, mean=SHARED)
    yield head, _normal(head, g.vocabulary, g.hidden, std=g.hidden**-0.5)
    yield "model.norm.weight", torch.ones(g.hidden, dtype=torch.bfloat16)


def _layer(g: Geometry, number: int, skew: float) -> Iterator[tuple[str, torch.Tensor]]:
    prefix = f"model.layers.{number}."
    # what a block adds to the stream shrinks with depth, so that the shared direction lasts
    out = (2 * g.layers) ** -0.5

    def normal(name: str, rows: int, columns: int, gain: float = 1.0) -> tuple[str, torch.Tensor]:
        return prefix + name, _normal(prefix + name, rows, columns, std=gain * columns**-0.5)

    def mlp(name: str, width: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield normal(f"{name}.gate_proj.weight", width, g.hidden)
        yield normal(f"{name}.up_proj.weight", width, g.hidden)
        yield normal(f"{name}.down_proj.weight", g.hidden, width, 2 * out)

    for name, width in (
        ("input_layernorm", g.hidden),
        ("post_attention_layernorm", g.hidden),
        ("self_attn.kv_a_layernorm", g.lora),
    ):
        yield f"{prefix}{name}.weight", torch.ones(width, dtype=torch.bfloat16)
    yield normal("self_attn.q_proj.weight", g.heads * (g.nope + g.rope), g.hidden)
    yield normal("self_attn.kv_a_proj_with_mqa.weight", g.lora + g.rope, g.hidden)
    yield normal("self_attn.kv_b_proj.weight", g.heads * (g.nope + g.value), g.lora)
    yield normal("self_attn.o_proj.weight", g.hidden, g.heads * g.value, out)
    if number == 0:
        yield from mlp("mlp", g.dense)
        return
    gate = _normal(f"{prefix}mlp.gate.weight", g.experts, g.hidden, std=1.5 * g.hidden**-0.5).float()
    # after the norm a token's mean is SHARED / sqrt(1 + SHARED^2), and a row's sum times that is what all tokens share
    shared = _normal(f"{prefix}skew", g.experts, 1, std=skew).float() * math.sqrt(1 + SHARED**2) / SHARED / g.hidden
    yield f"{prefix}mlp.gate.weight", (gate - gate.mean(1, keepdim=True) + shared).bfloat16()
    yield from mlp("mlp.shared_experts", g.shared * g.expert)
    for expert in range(g.experts):
        yield from mlp(f"mlp.experts.{expert}", g.expert)


class _Gguf:
    """GGUF of architecture deepseek2, written layer by layer; token ids only, no vocabulary."""

    def __init__(self, path: Path, g: Geometry) -> None:
        import gguf

        self._geometry, self._bf16 = g, gguf.GGMLQuantizationType.BF16
        self._writer = writer = gguf.GGUFWriter(path, "deepseek2")
        writer.add_block_count(g.layers)
        writer.add_context_length(g.context)
        writer.add_embedding_length(g.hidden)
        writer.add_feed_forward_length(g.dense)
        writer.add_vocab_size(g.vocabulary)
        writer.add_tokenizer_model("no_vocab")
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        writer.add_head_count(g.heads)
        writer.add_head_count_kv(1)  # the latent is one head that all share
        writer.add_q_lora_rank(0)  # llama.cpp guesses "lite" from the number of layers unless told
        writer.add_kv_lora_rank(g.lora)
        writer.add_key_length(g.lora + g.rope)
        writer.add_value_length(g.lora)
        writer.add_key_length_mla(g.nope + g.rope)
        writer.add_value_length_mla(g.value)
        writer.add_rope_dimension_count(g.rope)
        writer.add_rope_freq_base(10000.0)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_count(g.experts)
        writer.add_expert_used_count(g.top_k)
        writer.add_expert_shared_count(g.shared)
        writer.add_expert_feed_forward_length(g.expert)
        writer.add_expert_weights_scale(1.0)
        for number in range(g.layers + 1):
            for name, shape, wide in self._plan(number):
                if wide:
                    writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
                else:
                    in_bytes = [*shape[:-1], 2 * shape[-1]]
                    writer.add_tensor_info(
                        name, in_bytes, np.dtype(np.uint8), 2 * math.prod(shape), raw_dtype=self._bf16
                    )
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()

    def write(self, number: int, tensors: dict[str, torch.Tensor]) -> None:
        """One layer, or, after the last, the embeddings and the head."""
        for name, shape, wide in self._plan(number):
            tensor = self._tensor(number, name.removeprefix(f"blk.{number}."), tensors).contiguous()
            assert tuple(tensor.shape) == tuple(shape), (name, tensor.shape, shape)
            data = tensor.float().numpy() if wide else tensor.view(torch.uint8).numpy()
            self._writer.write_tensor_data(data)

    def close(self) -> None:
        self._writer.close()

    def _plan(self, number: int) -> Iterator[tuple[str, list[int], bool]]:
        """(name, shape, whether in fp32) in the order of the file."""
        g = self._geometry
        if number == g.layers:
            yield "token_embd.weight", [g.vocabulary, g.hidden], False
            yield "output_norm.weight", [g.hidden], True
            yield "output.weight", [g.vocabulary, g.hidden], False
            return
        plan: list[tuple[str, list[int], bool]] = [
            ("attn_norm", [g.hidden], True),
            ("ffn_norm", [g.hidden], True),
            ("attn_kv_a_norm", [g.lora], True),
            ("attn_q", [g.heads * (g.nope + g.rope), g.hidden], False),
            ("attn_kv_a_mqa", [g.lora + g.rope, g.hidden], False),
            ("attn_k_b", [g.heads, g.lora, g.nope], False),
            ("attn_v_b", [g.heads, g.value, g.lora], False),
            ("attn_output", [g.hidden, g.heads * g.value], False),
        ]
        if number == 0:
            plan += [(f"ffn_{kind}", _mlp_shape(kind, g.hidden, g.dense), False) for kind in KINDS]
        else:
            plan.append(("ffn_gate_inp", [g.experts, g.hidden], True))
            plan += [(f"ffn_{kind}_shexp", _mlp_shape(kind, g.hidden, g.shared * g.expert), False) for kind in KINDS]
            plan += [(f"ffn_{kind}_exps", [g.experts, *_mlp_shape(kind, g.hidden, g.expert)], False) for kind in KINDS]
        for name, shape, wide in plan:
            yield f"blk.{number}.{name}.weight", shape, wide

    def _tensor(self, number: int, name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
        g, prefix = self._geometry, f"model.layers.{number}."
        simple = {
            "token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
            "output.weight": "lm_head.weight", "attn_norm.weight": f"{prefix}input_layernorm.weight",
            "ffn_norm.weight": f"{prefix}post_attention_layernorm.weight",
            "attn_kv_a_norm.weight": f"{prefix}self_attn.kv_a_layernorm.weight",
            "attn_q.weight": f"{prefix}self_attn.q_proj.weight",
            "attn_kv_a_mqa.weight": f"{prefix}self_attn.kv_a_proj_with_mqa.weight",
            "attn_output.weight": f"{prefix}self_attn.o_proj.weight", "ffn_gate_inp.weight": f"{prefix}mlp.gate.weight",
            **{f"ffn_{kind}.weight": f"{prefix}mlp.{kind}_proj.weight" for kind in KINDS},
            **{f"ffn_{kind}_shexp.weight": f"{prefix}mlp.shared_experts.{kind}_proj.weight" for kind in KINDS},
        }  # fmt: skip
        if name in simple:
            return tensors[simple[name]]
        if name.endswith("_exps.weight"):
            kind = name.split("_")[1]
            return torch.stack([tensors[f"{prefix}mlp.experts.{e}.{kind}_proj.weight"] for e in range(g.experts)])
        both = tensors[f"{prefix}self_attn.kv_b_proj.weight"].view(g.heads, g.nope + g.value, g.lora)
        # llama.cpp multiplies the keys' half into the query, hence transposed
        return both[:, : g.nope].transpose(1, 2) if name == "attn_k_b.weight" else both[:, g.nope :]


def _mlp_shape(kind: str, hidden: int, width: int) -> list[int]:
    return [hidden, width] if kind == "down" else [width, hidden]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=Geometry.layers)
    parser.add_argument("--skew", type=float, default=1.5)
    parser.add_argument("--tiny", action="store_true", help="a few kB an expert, to try things out")
    parser.add_argument("--no-gguf", action="store_true")
    asked = parser.parse_args()
    geometry = TINY if asked.tiny else Geometry(layers=asked.layers)
    make(asked.out, geometry, skew=asked.skew, gguf=not asked.no_gguf)


if __name__ == "__main__":
    main()

"""Checkpoints as GGUF, written with gguf-py: the demo and its kind whole, of any family the gates."""

import re
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch

from remoe_cli.delta import Delta
from remoe_cli.gguf.names import ARCHITECTURES
from remoe_cli.hub.checkpoint import Checkpoint

F32, F16, BF16, Q8_0 = (gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16", "Q8_0"))
SIMPLE = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp",
    **{f"mlp.{kind}_proj": f"ffn_{kind}" for kind in ("gate", "up", "down")},
    **{f"mlp.shared_experts.{kind}_proj": f"ffn_{kind}_shexp" for kind in ("gate", "up", "down")},
}


def noisy(checkpoint: Checkpoint, dtype: torch.dtype | None = None, seed: int = 1) -> Delta:
    """A delta of all the checkpoint's gates, moved by noise; in the base's dtype, or in another."""
    generator = torch.Generator().manual_seed(seed)
    gates = {}
    for name in checkpoint.tensors:
        if name.endswith((".mlp.gate.weight", ".mlp.router.weight", ".mlp.router.bias", "_moe.gate.weight")):
            base = checkpoint.read(name).float()
            gates[name] = base + torch.randn(base.shape, generator=generator)
    return Delta.of(checkpoint, gates, "remoe", {}, dtype=dtype)


def write(
    checkpoint: Checkpoint,
    out: Path,
    experts: gguf.GGMLQuantizationType = F32,
    gates: gguf.GGMLQuantizationType = F32,
    parts: int = 1,
) -> Path:
    """experts, gates: types of the experts and of the gates; all other weights, and rows that no block divides, are F32. With parts > 1 the file written is
    NAME-00001-of-0000N.gguf and its neighbours. Returns the first file.

    Token ids stand for themselves: the file has no vocabulary.
    """
    c = checkpoint.config
    tensors = list(_tensors(checkpoint))
    writer = gguf.GGUFWriter(out, "deepseek2", split_max_tensors=0 if parts == 1 else -(-len(tensors) // parts))
    heads, nope, rope, value, lora = (
        c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    )
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_vocab_size(c["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_head_count(heads)
    writer.add_head_count_kv(1)  # the latent is one head that all share
    writer.add_kv_lora_rank(lora)
    writer.add_q_lora_rank(0)
    writer.add_key_length(lora + rope)
    writer.add_value_length(lora)
    writer.add_key_length_mla(nope + rope)
    writer.add_value_length_mla(value)
    writer.add_rope_dimension_count(rope)
    writer.add_rope_freq_base(c["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_leading_dense_block_count(c["first_k_dense_replace"])
    writer.add_expert_count(c["n_routed_experts"])
    writer.add_expert_used_count(c["num_experts_per_tok"])
    writer.add_expert_shared_count(c["n_shared_experts"])
    writer.add_expert_feed_forward_length(c["moe_intermediate_size"])
    writer.add_expert_weights_scale(c["routed_scaling_factor"])
    for name, tensor in tensors:
        kind = gates if ".ffn_gate_inp." in name else experts if "_exps." in name else F32
        if tensor.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
            kind = F32
        data = tensor.to(torch.float32).contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
    return _written(writer, out)


def write_gates(
    checkpoint: Checkpoint,
    out: Path,
    kind: gguf.GGMLQuantizationType = F32,
    blocks: int | None = None,
    further: int = 0,
) -> Path:
    """Only the gates, and `further` bytes of another tensor before them, under the metadata that a patch reads."""
    architecture = ARCHITECTURES[checkpoint.model_type]
    writer = gguf.GGUFWriter(out, architecture)
    writer.add_block_count(blocks or checkpoint.config["num_hidden_layers"])
    writer.add_array("tokenizer.ggml.tokens", ["a", "b", "çé"])
    if further:
        writer.add_tensor("token_embd.weight", torch.zeros(further // 4).numpy())
    for name in sorted(checkpoint.tensors):
        found = re.fullmatch(r"model\.layers\.(\d+)\..*\.(?:gate|router)\.(weight|bias)", name)
        if found:
            data = checkpoint.read(name).float().numpy()
            writer.add_tensor(
                f"blk.{found[1]}.ffn_gate_inp.{found[2]}", gguf.quants.quantize(data, kind), raw_dtype=kind
            )
    return _written(writer, out)


def _written(writer: gguf.GGUFWriter, out: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out if out.exists() else min(out.parent.glob(f"{out.stem}-*-of-*.gguf"))


def _tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    c, read = checkpoint.config, checkpoint.read
    yield "token_embd.weight", read("model.embed_tokens.weight")
    yield "output_norm.weight", read("model.norm.weight")
    yield "output.weight", read("lm_head.weight")
    for layer in range(c["num_hidden_layers"]):
        there, here = f"model.layers.{layer}.", f"blk.{layer}."
        for name, called in SIMPLE.items():
            if f"{there}{name}.weight" in checkpoint.tensors:
                yield f"{here}{called}.weight", read(f"{there}{name}.weight")
        nope, value = c["qk_nope_head_dim"], c["v_head_dim"]
        both = read(f"{there}self_attn.kv_b_proj.weight").view(
            c["num_attention_heads"], nope + value, c["kv_lora_rank"]
        )
        # llama.cpp multiplies the keys' half into the query, hence transposed
        yield f"{here}attn_k_b.weight", both[:, :nope].transpose(1, 2)
        yield f"{here}attn_v_b.weight", both[:, nope:]
        if layer >= c["first_k_dense_replace"]:
            for kind in ("gate", "up", "down"):
                names = (f"{there}mlp.experts.{e}.{kind}_proj.weight" for e in range(c["n_routed_experts"]))
                yield f"{here}ffn_{kind}_exps.weight", torch.stack([read(name) for name in names])

"""A row a family: its few scaled-down dimensions, as transformers' config class takes them, and what of it cannot be.

Three layers, hidden 32, 8 routed experts, top-2, vocabulary 128, unless a row says otherwise.
"""

from dataclasses import dataclass, field

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

HIDDEN, EXPERTS, TOP_K, LAYERS, VOCABULARY = 32, 8, 2, 3, 128
COMMON = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_experts_per_tok": TOP_K,
    "vocab_size": VOCABULARY,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 8}
_INNER = {"intermediate_size": 48, "moe_intermediate_size": 24}
_SHARED = {"shared_expert_intermediate_size": 40}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
_ROUTED = {**_INNER, "n_routed_experts": EXPERTS, "n_shared_experts": 1}
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
_SPARSE = {"mlp_layer_types": ["dense", "sparse", "sparse"]}
_DELTANET = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_KDA = {
    "linear_head_dim": 8,
    "linear_num_heads": 4,
    "num_experts_per_token": TOP_K,
    "num_shared_experts": 1,
    "model_max_length": 256,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_INDEXED = {
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "layer_types": ["indexed_attention"] * LAYERS,
}

_AT_ONCE = "its experts run as one product over all of them, on weighed copies of the tokens"
_SORTED = "its experts take tokens sorted by expert, in two modules"
_ONE_MATRIX = "its experts lie in one matrix, without a dimension for them"
_PAST = "its router reads the weight of the module that PEFT replaces, and never calls it"
_HANDED = "its layers hand the places that attention looks at to the next ones"
_ZERO = "some of its experts have no weights"


@dataclass(frozen=True)
class Row:
    """settings: of the config class, over COMMON; dense: layers without a gate. gaps: row of the suite -> why not, each
    listed in docs/families.md and shown to fail. gguf: its architecture in gguf-py, "" where there is none."""

    settings: dict
    dense: tuple[int, ...] = ()
    gguf: str = ""
    gaps: dict[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    layers: int = LAYERS
    experts: int = EXPERTS
    bias: bool = False
    exact: bool = True


# fmt: off
ROWS: dict[str, Row] = {
    "deepseek_v2": Row({**_LATENT, **_ROUTED, "q_lora_rank": None, "first_k_dense_replace": 1}, (0,), "DEEPSEEK2"),
    "qwen3_moe": Row({**_GROUPED, **_INNER, "num_experts": EXPERTS, "norm_topk_prob": True}, (), "QWEN3MOE"),
    "mixtral": Row({"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": EXPERTS}, (), "LLAMA"),
    "gpt_oss": Row({**_GROUPED, "intermediate_size": 24, "num_local_experts": EXPERTS, "sliding_window": 8}, (),
        "GPT_OSS"),
    "olmoe": Row({"num_key_value_heads": 4, "intermediate_size": 24, "num_experts": EXPERTS, "norm_topk_prob":
        False}, (), "OLMOE"),
    "qwen2_moe": Row({**_INNER, **_SHARED, "num_key_value_heads": 2, "num_experts": EXPERTS, "norm_topk_prob":
        False, "mlp_only_layers": [0]}, (0,), "QWEN2MOE"),
    # softmax over all experts
    "qwen3_next": Row({**_GROUPED, **_INNER, **_SHARED, **_DELTANET, "num_experts": EXPERTS}, (), "QWEN3NEXT"),
    "qwen3_5_moe_text": Row({**_GROUPED, **_INNER, **_SHARED, **_DELTANET, "num_experts": EXPERTS}, (),
        "QWEN35MOE"),
    "qwen4_exp_text": Row({**_GROUPED, **_INNER, **_SHARED, **_DELTANET, "num_experts": EXPERTS, "hc_count": 2,
        "hc_lowrank": 8, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 32,
        "indexer_compress_ratio": 4}),
    "lara_mini": Row({**_GROUPED, **_INNER, **_SHARED, **_DELTANET, "num_experts": EXPERTS, "layer_types":
        ["linear_attention", "sliding_attention", "linear_attention"]}),
    "flex_olmo": Row({"num_key_value_heads": 4, "intermediate_size": 24, "num_experts": EXPERTS}),
    "minimax": Row({**_GROUPED, "intermediate_size": 24, "num_local_experts": EXPERTS, "layer_types":
        ["linear_attention", "full_attention", "linear_attention"]}),
    "mellum": Row({**_GROUPED, **_INNER, "num_local_experts": EXPERTS, "norm_topk_prob": True}),
    "jamba": Row({"num_key_value_heads": 2, "intermediate_size": 24, "num_experts": EXPERTS, "num_hidden_layers": 4,
        "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels":
        False}, (0, 2), "JAMBA", layers=4),
    "hunyuan_v1_moe": Row({**_GROUPED, "intermediate_size": 24, "num_experts": EXPERTS, "moe_topk": TOP_K}, (),
        "HUNYUAN_MOE", without=("num_experts_per_tok",)),
    "ernie4_5_moe": Row({**_INNER, "num_key_value_heads": 2, "moe_num_experts": EXPERTS, "moe_k": TOP_K,
        "moe_num_shared_experts": 1, "moe_layer_start_index": 1, "moe_layer_end_index": 2}, (0,), "ERNIE4_5_MOE",
        without=("num_experts_per_tok",), bias=True),
    # top-k of the logits, then softmax
    "granitemoe": Row({"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": EXPERTS}, (),
        "GRANITE_MOE"),
    "granitemoeshared": Row({"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": EXPERTS,
        "shared_intermediate_size": 40}, (), "GRANITE_MOE"),
    "granitemoehybrid": Row({"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": EXPERTS,
        "shared_intermediate_size": 40, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "layer_types":
        ["linear_attention", "full_attention", "linear_attention"]}, (), "GRANITE_HYBRID"),
    "granitemoe_swa": Row({"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": EXPERTS,
        "shared_intermediate_size": 40, "sliding_window": 8}),
    "aria_text": Row({**_GROUPED, "intermediate_size": 24, "moe_num_experts": EXPERTS, "moe_topk": TOP_K},
        without=("num_experts_per_tok",)),
    "cohere2_moe": Row({**_GROUPED, "intermediate_size": 24, "num_experts": EXPERTS, "num_shared_experts": 1,
        "sliding_window": 8, "mlp_layer_types": ["dense", "sparse", "sparse"], "prefix_dense_intermediate_size": 40},
        (0,)),
    # sigmoid and a selection bias
    "deepseek_v3": Row({**_LATENT, **_ROUTED, **_GROUPS, "first_k_dense_replace": 1}, (0,), "DEEPSEEK2", bias=True),
    "deepseek_v32": Row({**_LATENT, **_ROUTED, **_GROUPS, **_INDEXED, **_SPARSE}, (0,), bias=True),
    "glm4_moe": Row({**_GROUPED, **_ROUTED, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}, (0,),
        "GLM4_MOE", bias=True),
    "glm4_moe_lite": Row({**_LATENT, **_ROUTED, **_SPARSE}, (0,), "DEEPSEEK2", bias=True),
    "glm_moe_dsa": Row({**_LATENT, **_ROUTED, **_INDEXED, **_SPARSE, "indexer_types": ["full", "full", "shared"]},
        (0,), "GLM_DSA", bias=True, gaps={"streamed": _HANDED}),
    "dots1": Row({**_GROUPED, **_ROUTED, "first_k_dense_replace": 1, "norm_topk_prob": True}, (0,), "DOTS1",
        bias=True),
    "exaone_moe": Row({**_GROUPED, **_INNER, **_SPARSE, "num_experts": EXPERTS, "num_shared_experts": 1, "n_group":
        4, "topk_group": 2, "sliding_window": 8}, (0,), "EXAONE_MOE", bias=True),
    "solar_open": Row({**_GROUPED, **_ROUTED}, bias=True),
    "mimo_v2_flash": Row({**_GROUPED, **_ROUTED, **_SPARSE, "v_head_dim": 8, "sliding_window": 8}, (0,), "MIMO2",
        bias=True),
    "kimi_linear": Row({**_LATENT, **_INNER, **_KDA, **_SPARSE, "q_lora_rank": None, "num_experts": EXPERTS}, (0,),
        "KIMI_LINEAR", without=("num_experts_per_tok", "max_position_embeddings"), bias=True),
    "bailing_hybrid": Row({**_LATENT, **_INNER, **_KDA, **_SPARSE, "q_lora_rank": None, "num_experts": EXPERTS,
        "num_expert_group": 4, "topk_group": 2}, (0,), without=("num_experts_per_tok", "max_position_embeddings"),
        bias=True),
    "nemotron_h": Row({**_GROUPED, **_ROUTED, "moe_shared_expert_intermediate_size": 40, "ssm_state_size": 8,
        "mamba_num_heads": 8, "mamba_head_dim": 8, "n_groups": 2, "chunk_size": 16, "use_mamba_kernels": False,
        "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"]}, (0, 2),
        "NEMOTRON_H_MOE", without=("num_hidden_layers",), bias=True, layers=4),
    "minimax_m2": Row({**_GROUPED, "intermediate_size": 24, "num_local_experts": EXPERTS}, (), "MINIMAXM2",
        bias=True),
    "lfm2_moe": Row({**_INNER, "num_key_value_heads": 2, "num_experts": EXPERTS, "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"]}, (0,), "LFM2MOE", bias=True),
    "afmoe": Row({**_GROUPED, **_INNER, "num_experts": EXPERTS, "num_shared_experts": 1, "num_dense_layers": 1,
        "route_scale": 1.5, "sliding_window": 8}, (0,), "AFMOE", bias=True),
    "hy_v3": Row({**_GROUPED, **_INNER, **_SPARSE, "num_experts": EXPERTS, "num_shared_experts": 1}, (0,),
        bias=True),
    "hy_v4": Row({**_LATENT, **_ROUTED, **_INDEXED, **_SPARSE, "head_dim": 16, "indexer_types": ["full", "full",
        "shared"]}, (0,), bias=True, exact=False, gaps={"streamed": _HANDED}),
    "laguna": Row({**_GROUPED, **_INNER, **_SHARED, **_SPARSE, "num_experts": EXPERTS, "sliding_window": 8,
        "num_attention_heads_per_layer": [4, 4, 4], "moe_router_logit_softcapping": 3.0}, (0,), bias=True),
    "flint": Row({**_GROUPED, **_INNER, **_SHARED, "num_experts": EXPERTS, "mlp_only_layers": [0]}, (0,)),
    "axk1": Row({**_LATENT, **_ROUTED, **_GROUPS, **_SPARSE}, (0,), bias=True),
    "axk2": Row({**_LATENT, **_ROUTED, **_INDEXED, **_SPARSE, "gated_norm_rank": 8}, (0,), bias=True),
    "beam": Row({**_GROUPED, **_INNER, **_SPARSE, "num_experts": EXPERTS, "n_group": 4, "topk_group": 2}, (0,),
        bias=True),
    "dots3_note_text": Row({**_LATENT, **_ROUTED, **_INDEXED, **_SPARSE, "head_dim": 16,
        "shared_experts_intermediate_size": 24}, (0,), bias=True),
    "kolibri1": Row({**_GROUPED, **_INNER, **_SHARED, "num_local_experts": EXPERTS, "sliding_window": 8},
        bias=True),
    "minimax_m3_vl_text": Row({**_GROUPED, **_SPARSE, "intermediate_size": 24, "num_local_experts": EXPERTS,
        "dense_intermediate_size": 48, "shared_intermediate_size": 24, "rotary_dim": 4, "index_n_heads": 2,
        "index_head_dim": 8, "layer_types": ["full_attention"] * LAYERS}, (0,), bias=True, exact=False),
    # of their own kind
    "gemma4_text": Row({**_GROUPED, **_INNER, "num_experts": EXPERTS, "top_k_experts": TOP_K, "enable_moe_block":
        True, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": VOCABULARY, "sliding_window": 8,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}, (), "GEMMA4",
        without=("num_experts_per_tok",)),
    "llama4_text": Row({**_GROUPED, "intermediate_size": 24, "intermediate_size_mlp": 48, "num_local_experts":
        EXPERTS, "attention_chunk_size": 64}, (), "LLAMA4", gaps={"offload": _AT_ONCE}),
    "phimoe": Row({"num_key_value_heads": 2, "intermediate_size": 24, "num_local_experts": EXPERTS}, (), "PHIMOE"),
    "longcat_flash": Row({**_LATENT, "num_layers": 2, "ffn_hidden_size": 48, "moe_topk": TOP_K, "n_routed_experts":
        EXPERTS, "zero_expert_num": 2, "expert_ffn_hidden_size": 24, "head_dim": 8}, without=("num_hidden_layers",
        "num_experts_per_tok"), bias=True, layers=2, experts=EXPERTS + 2, gaps={"offload": _ZERO, "peft": _PAST, "streamed": _ZERO}),
    "jetmoe": Row({"num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 24, "num_local_experts":
        EXPERTS}, gaps={"offload": _SORTED}),
    "dbrx": Row({"d_model": HIDDEN, "n_heads": 4, "n_layers": LAYERS, "max_seq_len": 256, "attn_config":
        {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "ffn_config": {"hidden_size": HIDDEN,
        "ffn_hidden_size": 24, "moe_num_experts": EXPERTS, "moe_top_k": TOP_K}}, (), "DBRX", without=("hidden_size",
        "num_hidden_layers", "num_attention_heads", "max_position_embeddings", "num_experts_per_tok"), gaps={"offload":
        _ONE_MATRIX}),
    "deepseek_v4": Row({"num_key_value_heads": 1, "head_dim": 16, "moe_intermediate_size": 24, "n_routed_experts":
        EXPERTS, "q_lora_rank": 16, "o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "index_n_heads": 2, "index_head_dim":
        16, "index_topk": 8, "sliding_window": 8, "qk_rope_head_dim": 8, "mlp_layer_types": ["hash_moe", "moe", "moe"],
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]}, (0,),
        bias=True, exact=False),
}
# fmt: on


# an older transformers has not all of them
PRESENT = {model_type: row for model_type, row in ROWS.items() if model_type in CONFIG_MAPPING}


def settings_of(model_type: str) -> dict:
    """All that the config class of a row takes."""
    row = ROWS[model_type]
    return {name: value for name, value in {**COMMON, **row.settings}.items() if name not in row.without}

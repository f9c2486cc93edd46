"""Every family that remoe knows, a row each: where its gates lie and how they score. `Family` says what the words mean.

Model cards and papers say what a family is; what its code does was read from transformers 5.24, and tests/conformance holds
each row to it.
"""

from collections.abc import Callable

from remoe_cli.families.base import Family
from remoe_cli.families.outputs import (
    called_with_bias,
    called_with_bias_3d,
    chosen_by_block,
    probabilities_first,
    scattered,
    sorted_by_expert,
)
from remoe_cli.families.scores import BIASED_LOGITS, Score, SIGMOID, SOFTMAX, SQRT_SOFTPLUS


def _never(config: dict) -> bool:
    return False


def _where(key: str, default: bool) -> Callable[[dict], bool]:
    """Renormalised where the configuration says so."""
    return lambda config: bool(config.get(key, default))


def _either(key: str) -> Callable[[dict], Score]:
    """The rule that the configuration names."""
    rules = {score.name: score for score in (SOFTMAX, SIGMOID, SQRT_SOFTPLUS)}
    return lambda config: rules[str(config.get(key, "softmax"))]


_NORM_OFF, _NORM_ON = _where("norm_topk_prob", False), _where("norm_topk_prob", True)
_SCORE_BIAS = "mlp.gate.e_score_correction_bias"

_SOFTMAX = [
    Family("deepseek_v2", shared="mlp.shared_experts", renormalised=_never),
    Family("olmoe", renormalised=_NORM_OFF),
    Family("flex_olmo", renormalised=_NORM_OFF),
    # beside the routed experts stands a shared one with a gate of its own, `shared_expert_gate` [1, D]: it routes nothing
    Family("qwen2_moe", shared="mlp.shared_expert", renormalised=_NORM_OFF),
    Family("qwen3_moe", renormalised=_NORM_OFF, wrappers=("qwen3_vl_moe_text",)),
    Family("qwen3_next", shared="mlp.shared_expert", renormalised=_NORM_ON),
    Family("qwen3_5_moe_text", shared="mlp.shared_expert", wrappers=("qwen3_5_moe",)),
    Family("qwen4_exp_text", shared="mlp.shared_expert", renormalised=_NORM_ON, wrappers=("qwen4_exp",)),
    Family("lara_mini", shared="mlp.shared_expert", renormalised=_NORM_ON),
    Family("mellum", renormalised=_NORM_OFF),
    Family("mixtral", disk="block_sparse_moe.gate"),
    Family("minimax", disk="block_sparse_moe.gate"),
    Family("jamba", router="feed_forward.router", experts="feed_forward.experts", renormalised=_never),
    Family("hunyuan_v1_moe", tensors=("wg.weight",), shared="mlp.shared_mlp"),
    Family("ernie4_5_moe", bias="mlp.gate.moe_statics.e_score_correction_bias", shared="mlp.shared_experts"),
    Family(
        "longcat_flash",
        router="mlp.router",
        tensors=("classifier.weight",),
        bias="mlp.router.e_score_correction_bias",
        renormalised=_never,
        adapts=False,
    ),
    # the p-norm of the K weights is 1; p = 1 is their sum
    Family(
        "dbrx",
        router="ffn.router",
        experts="ffn.experts",
        tensors=("layer.weight",),
        stack="blocks",
        read=chosen_by_block,
        reroutes=False,
        renormalised=lambda config: config["ffn_config"]["moe_normalize_expert_weights"] == 1,
    ),
    Family(
        "gemma4_text",
        router="router",
        experts="experts",
        tensors=("proj.weight",),
        read=probabilities_first,
        reroutes=False,
        input="proj",
        early=False,
        wrappers=("gemma4",),
    ),
    # sparsemixer: two argmaxes, each weighed by a softmax over what lies near it
    Family("phimoe", router="mlp.router", disk="block_sparse_moe.gate", renormalised=_never, reroutes=False),
]

# top-k of the logits, softmax over the K chosen: shares of P
_SOFTMAX_OF_CHOSEN = [
    Family("gpt_oss", router="mlp.router", tensors=("weight", "bias")),
    *(
        Family(
            model_type,
            router="block_sparse_moe.router",
            experts="block_sparse_moe.experts",
            disk="block_sparse_moe.router.layer",
        )
        for model_type in ("granitemoe", "granitemoeshared", "granitemoehybrid")
    ),
    Family("granitemoe_swa", router="block_sparse_moe.router", experts="block_sparse_moe.experts"),
    Family("aria_text", router="mlp.router", shared="mlp.shared_experts"),
    Family("cohere2_moe", shared="mlp.shared_experts", score=_either("expert_selection_fn"), renormalised=_NORM_ON),
    Family(
        "jetmoe",
        router="mlp.router",
        experts="mlp.input_linear",
        tensors=("layer.weight",),
        read=sorted_by_expert,
        reroutes=False,
        apart=("self_attention.experts.router",),
    ),
]

_HANDING = ("glm_moe_dsa", "hy_v4")
_SIGMOID = [
    *(
        Family(
            model_type,
            score=SIGMOID,
            bias=_SCORE_BIAS,
            shared="mlp.shared_experts",
            renormalised=_NORM_ON,
            entangled="layers hand the places that attention looks at to the next ones"
            if model_type in _HANDING
            else "",
        )
        for model_type in (
            "deepseek_v3",
            "deepseek_v32",
            "glm4_moe",
            "glm4_moe_lite",
            "glm_moe_dsa",
            "dots1",
            "dots3_note_text",
            "exaone_moe",
            "solar_open",
            "axk1",
            "axk2",
            "hy_v4",
        )
    ),
    Family("mimo_v2_flash", score=SIGMOID, bias=_SCORE_BIAS, renormalised=_NORM_ON),
    Family("beam", score=SIGMOID, bias=_SCORE_BIAS, renormalised=_NORM_ON),
    Family(
        "kimi_linear",
        disk="block_sparse_moe.gate",
        score=SIGMOID,
        bias=_SCORE_BIAS,
        shared="mlp.shared_experts",
        renormalised=_where("moe_renormalize", True),
    ),
    Family(
        "bailing_hybrid",
        score=SIGMOID,
        bias=_SCORE_BIAS,
        shared="mlp.shared_experts",
        renormalised=_where("moe_renormalize", True),
    ),
    Family(
        "nemotron_h",
        router="mixer.gate",
        experts="mixer.experts",
        score=SIGMOID,
        bias="mixer.gate.e_score_correction_bias",
        shared="mixer.shared_experts",
        renormalised=_NORM_ON,
    ),
    Family(
        "minimax_m2",
        disk="block_sparse_moe.gate",
        score=SIGMOID,
        bias="mlp.e_score_correction_bias",
        call=called_with_bias,
    ),
    Family("minimax_m3_vl_text", score=SIGMOID, bias=_SCORE_BIAS, shared="mlp.shared_experts"),
    Family(
        "lfm2_moe",
        router="feed_forward.gate",
        experts="feed_forward.experts",
        score=SIGMOID,
        bias="feed_forward.expert_bias",
        call=called_with_bias,
        renormalised=_NORM_ON,
    ),
    Family(
        "afmoe",
        router="mlp.router",
        tensors=("gate.weight",),
        score=SIGMOID,
        bias="mlp.expert_bias",
        call=called_with_bias_3d,
        shared="mlp.shared_experts",
    ),
    Family(
        "hy_v3",
        disk="mlp.router.gate",
        score=SIGMOID,
        bias="mlp.e_score_correction_bias",
        call=called_with_bias,
        shared="mlp.shared_experts",
    ),
    Family("laguna", score=SIGMOID, bias=_SCORE_BIAS, shared="mlp.shared_experts", capped="router_logit_softcapping"),
    Family("flint", score=SIGMOID, renormalised=_NORM_ON, shared="mlp.shared_expert"),
    Family("kolibri1", score=BIASED_LOGITS, bias=_SCORE_BIAS, shared="mlp.shared_experts", renormalised=_NORM_OFF),
    # each expert's input, not its output, is weighed, by the sigmoid of its logit
    Family(
        "llama4_text",
        router="feed_forward.router",
        experts="feed_forward.experts",
        score=SIGMOID,
        read=scattered,
        reroutes=False,
        renormalised=_never,
        shared="feed_forward.shared_expert",
        wrappers=("llama4",),
    ),
    # the first layers look their experts up by token id: those have no gate
    Family(
        "deepseek_v4",
        disk="ffn.gate",
        score=_either("scoring_func"),
        bias=_SCORE_BIAS,
        shared="mlp.shared_experts",
    ),
]

FAMILIES: dict[str, Family] = {row.model_type: row for row in (*_SOFTMAX, *_SOFTMAX_OF_CHOSEN, *_SIGMOID)}
WRAPPERS: dict[str, str] = {wrapper: row.model_type for row in FAMILIES.values() for wrapper in row.wrappers}

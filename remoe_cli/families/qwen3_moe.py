"""Qwen3-MoE (30B-A3B, 235B-A22B, Coder): softmax over all experts, weights renormalised where the config says so."""

from remoe_cli.families.base import Family

QWEN3_MOE = Family(
    model_type="qwen3_moe",
    router="mlp.gate",
    experts="mlp.experts",
    disk="model.layers.{layer}.mlp.gate.{tensor}",
    renormalised=lambda config: bool(config.get("norm_topk_prob", False)),
)

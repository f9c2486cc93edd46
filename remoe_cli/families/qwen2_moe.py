"""Qwen1.5-MoE and Qwen2-MoE (A2.7B, 57B-A14B): softmax over all experts, weights renormalised where the config says so.

Beside the routed experts stands a shared one with a gate of its own, `shared_expert_gate` [1, D]: it routes nothing.
"""

from remoe_cli.families.base import Family

QWEN2_MOE = Family(
    model_type="qwen2_moe",
    router="mlp.gate",
    experts="mlp.experts",
    shared="mlp.shared_expert",
    disk="model.layers.{layer}.mlp.gate.{tensor}",
    renormalised=lambda config: bool(config.get("norm_topk_prob", False)),
)

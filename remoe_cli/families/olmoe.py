"""OLMoE 1B-7B: softmax over all experts, weights renormalised where the config says so (the published one does not)."""

from remoe_cli.families.base import Family

OLMOE = Family(
    model_type="olmoe",
    router="mlp.gate",
    experts="mlp.experts",
    disk="model.layers.{layer}.mlp.gate.{tensor}",
    renormalised=lambda config: bool(config.get("norm_topk_prob", False)),
)

"""DeepSeek-V2 and V2-Lite: softmax over all experts, weights not renormalised; shared experts beside the routed ones."""

from remoe_cli.families.base import Family

DEEPSEEK_V2 = Family(
    model_type="deepseek_v2",
    router="mlp.gate",
    experts="mlp.experts",
    shared="mlp.shared_experts",
    disk="model.layers.{layer}.mlp.gate.{tensor}",
    renormalised=lambda config: False,
)

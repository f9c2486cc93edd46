"""gpt-oss in its bf16 layout: top-k of the raw logits (with a bias that trains), softmax over the K chosen."""

from remoe_cli.families.base import Family

GPT_OSS = Family(
    model_type="gpt_oss",
    router="mlp.router",
    experts="mlp.experts",
    disk="model.layers.{layer}.mlp.router.{tensor}",
    tensors=("weight", "bias"),
    renormalised=lambda config: True,
)

"""Mixtral 8x7B and 8x22B: softmax over all experts, weights renormalised. On disk the block has another name."""

from remoe_cli.families.base import Family

MIXTRAL = Family(
    model_type="mixtral",
    router="mlp.gate",
    experts="mlp.experts",
    disk="model.layers.{layer}.block_sparse_moe.gate.{tensor}",
    renormalised=lambda config: True,
)

"""Families: where a model type keeps its gates and experts, in memory and on disk, and how it scores.

A new family is one small file here, one line in FAMILIES and one row in the tests.
"""

from remoe_cli.families.base import Family, find_gates, Gate
from remoe_cli.families.deepseek_v2 import DEEPSEEK_V2
from remoe_cli.families.gpt_oss import GPT_OSS
from remoe_cli.families.heads import Heads, KINDS
from remoe_cli.families.mixtral import MIXTRAL
from remoe_cli.families.olmoe import OLMOE
from remoe_cli.families.qwen2_moe import QWEN2_MOE
from remoe_cli.families.qwen3_moe import QWEN3_MOE
from remoe_cli.families.refuse import refuse_if_unsupported
from remoe_cli.families.tap import probabilities, Routed, RouterTap

FAMILIES: dict[str, Family] = {
    "deepseek_v2": DEEPSEEK_V2,
    "gpt_oss": GPT_OSS,
    "mixtral": MIXTRAL,
    "olmoe": OLMOE,
    "qwen2_moe": QWEN2_MOE,
    "qwen3_moe": QWEN3_MOE,
}


def family_of(config: dict, model: str = "this model") -> Family:
    """The family of a config.json, whose `num_experts_per_tok` is then a whole number that its experts allow.

    Raises FamilyError, naming the model type, for a dense, quantised or unknown one.
    """
    refuse_if_unsupported(config, model, list(FAMILIES))
    return FAMILIES[config["model_type"]]


__all__ = [
    "FAMILIES",
    "KINDS",
    "Family",
    "Gate",
    "Heads",
    "Routed",
    "RouterTap",
    "family_of",
    "find_gates",
    "probabilities",
]

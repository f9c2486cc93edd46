"""Families: where a model type keeps its gates and experts, in memory and on disk, and how it scores.

A new family is a row in table.py and a row in tests/conformance/rows.py.
"""

from remoe_cli.errors import FamilyError
from remoe_cli.families.base import Family, find_gates, Gate
from remoe_cli.families.guessing import guess
from remoe_cli.families.heads import Heads, KINDS
from remoe_cli.families.refuse import refuse_if_unsupported, top_k_of
from remoe_cli.families.scores import probabilities, Score
from remoe_cli.families.table import FAMILIES, WRAPPERS
from remoe_cli.families.tap import Routed, RouterTap


def family_of(config: dict, model: str = "this model") -> Family:
    """The family of a config.json, whose experts a token are then a whole number that its experts allow.

    Raises FamilyError, naming the model type, for a dense, quantised or unknown one.
    """
    refuse_if_unsupported(config, model, [*FAMILIES], WRAPPERS)
    return known(str(config["model_type"]))


def known(model_type: str) -> Family:
    """The family of a model type, or of the text part of a multimodal one. Raises FamilyError where there is none."""
    found = FAMILIES.get(WRAPPERS.get(model_type, model_type))
    if found is None:
        raise FamilyError(
            f"remoe does not know the family {model_type!r}. Supported families: {', '.join(FAMILIES)}.",
            "remoe finetune demo",
        )
    return found


__all__ = [
    "FAMILIES",
    "KINDS",
    "Family",
    "Gate",
    "Heads",
    "Routed",
    "RouterTap",
    "Score",
    "family_of",
    "find_gates",
    "guess",
    "known",
    "probabilities",
    "top_k_of",
]

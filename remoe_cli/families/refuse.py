"""Which models are refused before any weight is downloaded, and in which words."""

from collections.abc import Sequence

from remoe_cli.errors import FamilyError

# Config keys with which transformers' MoE configs name their expert count.
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")


def refuse_if_unsupported(config: dict, model: str, supported: Sequence[str]) -> None:
    """Raises FamilyError for a dense, quantised or unknown model type, or expert counts that cannot be; else None."""
    model_type = config.get("model_type")
    allowed = f"Supported families: {', '.join(supported)}."
    experts = _n_experts(config) or _n_experts(config.get("text_config"))
    if experts < 2:
        raise FamilyError(
            f"{model} is a dense model (model_type {model_type!r}, no experts in its config): it has no gate to tune. {allowed}",
            "remoe finetune demo",
        )
    if model_type not in supported:
        raise FamilyError(
            f"{model} is of the family {model_type!r}, which remoe does not know yet. {allowed}", "remoe finetune demo"
        )
    quantised = config.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise FamilyError(
            f"{model} is stored quantised ({method or 'unknown method'}); remoe reads bf16, fp16 and fp32 layouts of {model_type}.",
            f"remoe finetune a bf16 copy of {model} (a local folder is fine)",
        )
    if not 1 <= _count(config, "num_experts_per_tok") <= experts:
        raise FamilyError(
            f"{model}: num_experts_per_tok in config.json is {config.get('num_experts_per_tok')!r}, "
            f"not a whole number from 1 to its {experts} experts.",
            "copy or download the model's config.json again",
        )


def _n_experts(config: object) -> int:
    """0 where config is no table or holds no count."""
    return max(_count(config, key) for key in _EXPERT_KEYS) if isinstance(config, dict) else 0


def _count(config: dict, key: str) -> int:
    value = config.get(key)
    return value if type(value) is int else 0

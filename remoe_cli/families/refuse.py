"""Which models are refused before any weight is downloaded, and in which words."""

from remoe_cli.errors import FamilyError

# Config keys with which transformers' MoE configs name their expert count.
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")


def refuse_if_unsupported(config: dict, model: str, supported: list[str]) -> None:
    """Raises FamilyError for a dense, quantised or unknown model type; returns None otherwise."""
    model_type = config.get("model_type")
    text = config.get("text_config") or {}
    allowed = f"Supported families: {', '.join(supported)}."
    experts = [config.get(key) or text.get(key) for key in _EXPERT_KEYS]
    if not any(isinstance(n, int) and n > 1 for n in experts) and model_type not in supported:
        raise FamilyError(
            f"{model} is a dense model (model_type {model_type!r}, no experts in its config): it has no gate to tune. {allowed}",
            "remoe finetune demo",
        )
    if model_type not in supported:
        raise FamilyError(
            f"{model} is of the family {model_type!r}, which remoe does not know yet. {allowed}", "remoe finetune demo"
        )
    quantised = config.get("quantization_config") or {}
    if quantised:
        method = quantised.get("quant_method", "unknown method")
        raise FamilyError(
            f"{model} is stored quantised ({method}); remoe reads bf16, fp16 and fp32 layouts of {model_type}.",
            f"remoe finetune a bf16 copy of {model} (a local folder is fine)",
        )

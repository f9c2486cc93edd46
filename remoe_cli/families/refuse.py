"""Which models are refused before any weight is downloaded, and in which words."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from remoe_cli.errors import FamilyError

if TYPE_CHECKING:
    from remoe_cli.families.base import Gate

# Config keys with which transformers' MoE configs name their expert count, and how many of them a token runs.
_EXPERT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts")
QUANTISED = ("fp8", "mxfp4")  # methods whose weights families/quantised.py reads
_TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


def refuse_if_unsupported(config: dict, model: str, supported: Sequence[str], wrappers: Mapping[str, str]) -> None:
    """Raises FamilyError for a dense, quantised or unknown model type, or expert counts that cannot be; else None.

    wrappers: multimodal model type -> the supported type of its text part.
    """
    model_type = config.get("model_type")
    allowed = f"Supported families: {', '.join(supported)}."
    experts = _n_experts(config)
    if experts < 2:
        raise FamilyError(
            f"{model} is a dense model (model_type {model_type!r}, no experts in its config): it has no gate to tune. {allowed}",
            "remoe finetune demo",
        )
    if not isinstance(model_type, str) or (model_type not in supported and model_type not in wrappers):
        native = "auto_map" not in config
        code = "" if native else " and which brings code of its own, which remoe never runs"
        raise FamilyError(
            f"{model} is of the family {model_type!r}, which remoe does not know yet{code}. {allowed}",
            "remoe finetune demo",
        )
    method = quant_method(config)
    if config.get("expert_dtype") == "fp4":  # DeepSeek-V4: experts in another layout than quantization_config says
        method = "fp4 experts"
    if config.get("quantization_config") and method not in QUANTISED:
        raise FamilyError(
            f"{model} is stored quantised ({method or 'unknown method'}); remoe reads bf16, fp16, fp32, {', '.join(QUANTISED)} layouts of {model_type}.",
            f"remoe finetune a bf16 copy of {model} (a local folder is fine)",
        )
    key, value = _top_k(config)
    if type(value) is not int or not 1 <= value <= experts:
        raise FamilyError(
            f"{model}: {key} in config.json is {value!r}, not a whole number from 1 to its {experts} experts.",
            "copy or download the model's config.json again",
        )


def top_k_of(config: dict) -> int:
    """Experts a token, of a config.json that `refuse_if_unsupported` passed."""
    return int(_top_k(config)[1])  # type: ignore[call-overload]


def quant_method(config: dict) -> str | None:
    """How weights are stored quantised, by config.json; None where they are not, or it does not say how."""
    quantised = config.get("quantization_config")
    return quantised.get("quant_method") if isinstance(quantised, dict) else None


def counts(config: dict) -> tuple[int, int | None]:
    """Routed experts a layer, 0 for none, and experts a token, None where it is no whole number, of any config.json."""
    top_k = _top_k(config)[1]
    return _n_experts(config), top_k if type(top_k) is int else None


def require_reroutable(gate: "Gate") -> None:
    """Raises FamilyError where nobody knows what another choice of experts would weigh."""
    if not gate.family.reroutes:
        raise FamilyError(
            f"{gate.family.model_type}: its routing weights are no shares of its scores, so its choices are not bent.",
            "remoe reroute demo",
        )


def _top_k(config: dict) -> tuple[str, object]:
    """The key under which a config.json says how many experts a token runs, and its value (of a list of equal ones, one)."""
    for part in _parts(config):
        for key in _TOP_K_KEYS:
            if key in part:
                value = part[key]
                alike = isinstance(value, list) and len({*map(str, value)}) == 1
                return key, value[0] if alike else value
    return _TOP_K_KEYS[0], None


def _n_experts(config: dict) -> int:
    """0 where config holds no count."""
    return max(_count(part, key) for part in _parts(config) for key in _EXPERT_KEYS)


def _parts(config: dict) -> list[dict]:
    """A config.json, and the parts of it that may speak of experts."""
    return [config, *(part for key in ("text_config", "ffn_config") if isinstance(part := config.get(key), dict))]


def _count(config: dict, key: str) -> int:
    value = config.get(key)
    return value if type(value) is int else 0

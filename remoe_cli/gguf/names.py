"""What a gate's on-disk name is called in a GGUF file, by gguf-py's name map."""

import re
from collections.abc import Iterable

from remoe_cli.errors import DeltaError, RunError

# model_type -> general.architecture, of the families that llama.cpp has; a gate that it stores otherwise fails its fingerprint
ARCHITECTURES = {
    "afmoe": "afmoe",
    "dbrx": "dbrx",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "dots1": "dots1",
    "ernie4_5_moe": "ernie4_5-moe",
    "exaone_moe": "exaone-moe",
    "gemma4_text": "gemma4",
    "glm4_moe": "glm4moe",
    "glm4_moe_lite": "deepseek2",
    "glm_moe_dsa": "glm-dsa",
    "gpt_oss": "gpt-oss",
    "granitemoe": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "granitemoeshared": "granitemoe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "jamba": "jamba",
    "kimi_linear": "kimi-linear",
    "lfm2_moe": "lfm2moe",
    "llama4_text": "llama4",
    "mimo_v2_flash": "mimo2",
    "minimax_m2": "minimax-m2",
    "mixtral": "llama",
    "nemotron_h": "nemotron_h_moe",
    "olmoe": "olmoe",
    "phimoe": "phimoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
}
GATE = re.compile(r"blk\.\d+\.ffn_gate_inp\.(weight|bias)")


def gate_names(model_type: str, on_disk: Iterable[str], n_blocks: int, base: str) -> dict[str, str | None]:
    """On-disk name -> GGUF name, None for a layer past n_blocks.

    Raises RunError without a gguf-py that knows the architecture, DeltaError where a tensor is no gate: a GGUF holds the others quantised or reordered.
    """
    try:
        from gguf import get_tensor_name_map, MODEL_ARCH_NAMES
    except ImportError:
        raise RunError("GGUF files need gguf-py, which is not installed.", 'pip install "remoe-cli[gguf]"') from None
    number = next((n for n, name in MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[model_type]), None)
    if number is None:
        raise RunError(
            f"this gguf-py does not know the architecture {ARCHITECTURES[model_type]}.", "pip install -U gguf"
        )
    names = get_tensor_name_map(number, n_blocks)
    found = {name: names.get_name(name, try_suffixes=(".weight", ".bias")) for name in on_disk}
    for name, called in found.items():
        if called is None and re.search(r"\.(gate|router)\.(weight|bias)$", name):
            continue
        if called is None or not GATE.fullmatch(called):
            raise DeltaError(
                f"this delta changes more than gates, such as {name}, and a GGUF takes gates only.",
                f"remoe apply DELTA {base} --as copy --out DIR, then llama.cpp's convert_hf_to_gguf.py DIR",
            )
    return found

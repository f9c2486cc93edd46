"""The architecture's promises, read from the sources: imports point down, no torch where none is needed, short files."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "remoe_cli"
SOURCES = sorted(PACKAGE.rglob("*.py"))
# lower number = lower layer; a file may import its own layer and below
LAYERS = {
    "errors": 0, "atomic": 0, "copies": 0, "console": 0, "environment": 0, "sizes": 0, "memory": 0, "config": 0,
    "recipe_rules": 1, "recipe": 1, "run": 1, "demo": 1, "routing": 1, "cache": 1, "report": 1, "hub": 1, "families": 1, "objectives": 1, "delta": 1, "gguf": 1,
    "train": 2, "measure": 2, "offload": 2, "stream": 2, "talk": 2,
    "finetune": 3, "finetuned": 3, "resumed": 3, "evaluate": 3, "apply": 3, "push": 3, "pull": 3, "decode": 3, "trace": 3, "replay": 3, "reroute": 3, "pack": 3, "sweep": 3, "inspect": 3, "inspect_model": 3, "diff": 3, "merge": 3, "plan": 3, "show": 3, "generate": 3, "chat": 3, "plan_decode": 3, "doctor": 3, "predictor": 3,
    "cli": 4, "__main__": 5,
    "__init__": 5,
}  # fmt: skip
LAZY_FREE = (
    "__init__", "errors", "atomic", "memory", "recipe_rules", "recipe", "run", "sizes", "cli", "show", "trace", "replay", "config", "console",
    "demo", "routing", "cache", "report", "gguf",
)  # fmt: skip


def imports(path: Path, top_level_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def part(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def test_every_part_has_a_layer():
    assert {part(path) for path in SOURCES} == set(LAYERS)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path):
    if part(path) == "__init__":
        return  # its one import, inside `load`, is the public door to a verb
    for name in imports(path, top_level_only=False):
        if name.startswith("remoe_cli."):
            target = name.split(".")[1]
            assert LAYERS.get(target, 0) <= LAYERS[part(path)], f"{path.name} imports {name}"


@pytest.mark.parametrize(
    "path", [p for p in SOURCES if part(p) in LAZY_FREE], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_no_torch_at_import(path):
    heavy = {name.split(".")[0] for name in imports(path, top_level_only=True)} & {
        "torch",
        "transformers",
        "datasets",
        "safetensors",
    }
    assert not heavy


def test_only_the_loader_uses_private_transformers_modules():
    private = ("core_model_loading", "conversion_mapping", "modeling_utils")
    users = {p.name for p in SOURCES if any(word in name for word in private for name in imports(p, False))}
    assert users == {"loader.py"}


def test_help_loads_no_torch():
    code = "import sys, remoe_cli.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_files_are_short(path):
    assert len(path.read_text().splitlines()) <= 400
    assert path.name != "utils.py"

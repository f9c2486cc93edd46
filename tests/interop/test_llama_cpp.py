"""A patched GGUF in llama.cpp, against the same gates in transformers: perplexity, logits, and which experts are chosen.

Tolerance: both compute in fp32, but add up in different orders. Perplexity agrees to 1 part in 10^5, logits to 10^-4 of their
spread, and all but 1 in 1000 choices of experts are the same (a near tie for the last place may fall either way). With experts
as Q8_0, perplexity agrees to 1 part in 100.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

import demo_gguf
import pytest
import torch
from interop_model import perplexity

from remoe_cli.delta import gates_for, put
from remoe_cli.families import find_gates, RouterTap
from remoe_cli.families.loader import gate_disk_names, load_resident
from remoe_cli.gguf import patch_copy, patch_in_place, undo

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed", exc_type=ImportError)
from llama_run import run, Said


class Choices(NamedTuple):
    base: dict[int, torch.Tensor]
    tuned: dict[int, torch.Tensor]


@pytest.fixture(scope="module")
def chosen(demo, demo_delta, ids_BT) -> Choices:
    """layer -> [B, T, K] as transformers chooses, before and after the gates are put in."""
    model = load_resident(demo, torch.float32, "cpu")
    gates = find_gates(model)

    def of() -> dict[int, torch.Tensor]:
        with torch.no_grad(), RouterTap(gates) as tap:
            model(ids_BT, use_cache=False)
            return {gate.layer: r.choice_NK.view(*ids_BT.shape, -1) for gate, r in zip(gates, tap.take(), strict=True)}

    base = of()
    put(model, gates_for(gate_disk_names(model, demo), demo_delta))
    return Choices(base, of())


@pytest.fixture
def file(demo, tmp_path) -> Path:
    return demo_gguf.write(demo, tmp_path / "demo.gguf")


def alike(one: dict[int, torch.Tensor], two: dict[int, torch.Tensor]) -> float:
    """Share of the choices, over tokens and layers, that are the same set of experts."""
    assert set(one) == set(two)
    return float(torch.cat([(one[n].sort(-1)[0] == two[n].sort(-1)[0]).all(-1).flatten() for n in one]).float().mean())


def agrees(said: Said, logits_BTV: torch.Tensor, choices: dict[int, torch.Tensor], ids_BT: torch.Tensor) -> None:
    found, expected = perplexity(said.logits_BTV, ids_BT), perplexity(logits_BTV, ids_BT)
    off = ((said.logits_BTV - logits_BTV).abs().max() / logits_BTV.std()).item()
    share = alike(said.choice_BTK, choices)
    print(f"perplexity {found:.5f} and {expected:.5f}, logits off by {off:.1e}, {share:.4f} of the choices alike")
    assert abs(found / expected - 1) < 1e-5 and off < 1e-4 and share > 0.999


def test_base_and_tuned_agree_with_transformers(demo_delta, file, in_memory, chosen, ids_BT, tmp_path):
    assert alike(chosen.base, chosen.tuned) < 0.9, "the delta changes too little to tell"
    agrees(run(file, ids_BT), in_memory["base"], chosen.base, ids_BT)
    tuned = patch_copy(demo_delta, file, tmp_path / "tuned.gguf").files[0]
    agrees(run(tuned, ids_BT), in_memory["tuned"], chosen.tuned, ids_BT)


def test_in_place_and_back_and_split(demo, demo_delta, in_memory, chosen, ids_BT, tmp_path):
    first = demo_gguf.write(demo, tmp_path / "demo.gguf", parts=3)
    parts = sorted(tmp_path.glob("*.gguf"))
    before = [hashlib.sha256(part.read_bytes()).hexdigest() for part in parts]
    patch_in_place(demo_delta, first)
    agrees(run(first, ids_BT), in_memory["tuned"], chosen.tuned, ids_BT)
    undo(first)
    assert [hashlib.sha256(part.read_bytes()).hexdigest() for part in parts] == before
    agrees(run(first, ids_BT), in_memory["base"], chosen.base, ids_BT)


def test_quantised_experts(demo, demo_delta, in_memory, ids_BT, tmp_path):
    """What most people have: gates in F32, the rest quantised."""
    file = demo_gguf.write(demo, tmp_path / "demo.gguf", experts=demo_gguf.Q8_0)
    base = perplexity(run(file, ids_BT).logits_BTV, ids_BT)
    patch_in_place(demo_delta, file)
    tuned = perplexity(run(file, ids_BT).logits_BTV, ids_BT)
    print(f"perplexity of base and tuned with experts as Q8_0: {base:.4f}, {tuned:.4f}")
    assert abs(base / perplexity(in_memory["base"], ids_BT) - 1) < 0.01
    assert abs(tuned / perplexity(in_memory["tuned"], ids_BT) - 1) < 0.01

"""Whose gate is it: in every dtype that a file may hold it in, and in checkpoints that are stored quantised."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_delta import make_delta, rewritten

from remoe_cli.apply import apply
from remoe_cli.delta import Delta
from remoe_cli.delta.fingerprint import applied, check_form, quantised_note, state_of
from remoe_cli.delta.stored import digest, dtype_named, stored_bytes
from remoe_cli.errors import DeltaError
from remoe_cli.hub.checkpoint import Checkpoint

GATE = "model.layers.0.mlp.gate.weight"
DTYPES = ("BF16", "F16", "F32")
BITS = st.integers(0, 2**16 - 1).filter(lambda bits: bits & 0x7FFF <= 0x7F80)  # of a bfloat16 that is no NaN


def delta_of(base: torch.Tensor, tuned: torch.Tensor, f16: bool = True) -> Delta:
    """f16: as new deltas have it, with the digest of a bfloat16 gate rounded to float16."""
    half = {GATE: digest(stored_bytes(base.half()))} if f16 and base.dtype == torch.bfloat16 else {}
    digests = {GATE: digest(stored_bytes(base))}
    return Delta(
        {GATE: tuned}, "org/base", "a" * 40, "mixtral", digests, 0.5, "remoe",
        base_dtypes={GATE: base.dtype}, base_sha256_f16=half,
    )  # fmt: skip


def state(delta: Delta, tensor: torch.Tensor) -> str:
    name = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[tensor.dtype]
    return state_of(delta, GATE, name, stored_bytes(tensor))


BASE = torch.tensor([[1.0, -0.5], [0.0, 3.140625]], dtype=torch.bfloat16)
TUNED = torch.tensor([[1.0, -0.25], [0.125, 3.140625]], dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("f16", [True, False], ids=["new", "first deltas"])
def test_a_gate_is_known_by_its_values_in_any_dtype_that_holds_them(dtype, f16):
    delta, kind = delta_of(BASE, TUNED, f16), dtype_named(dtype)
    assert state(delta, BASE.to(kind)) == "base" and state(delta, TUNED.to(kind)) == "tuned"
    assert state(delta, (0.75 * TUNED).to(kind)) == "other"
    assert state(delta_of(BASE, BASE, f16), BASE.to(kind)) == "both", "training left it as it was"
    assert state(delta, -BASE.to(kind)) == "other"
    assert state_of(delta, GATE, dtype, stored_bytes(BASE.to(kind))[:-1]) == "other"
    assert state_of(delta, GATE, dtype, b"") == "other"


def test_a_float32_gate_that_is_nearly_the_base_is_not_the_base():
    wide = BASE.float()
    wide[0, 0] += 2**-20  # rounds back to 1 in bfloat16
    assert torch.equal(wide.bfloat16(), BASE) and state(delta_of(BASE, TUNED), wide) == "other"


def test_float16_that_rounds_needs_the_digest_of_it():
    tiny = torch.tensor([[1e-8, 1.0]], dtype=torch.bfloat16)  # below float16's least
    assert tiny.half()[0, 0] == 0
    assert state(delta_of(tiny, tiny + 1), tiny.half()) == "base"
    assert state(delta_of(tiny, tiny + 1, f16=False), tiny.half()) == "other"


@pytest.mark.parametrize("kept", [torch.float16, torch.float32], ids=str)
def test_bases_that_are_not_bfloat16(kept):
    base = torch.tensor([[1.0, 0.1]], dtype=kept)  # 0.1 has more digits than bfloat16
    delta = delta_of(base, base + 1)
    assert state(delta, base) == "base" and state(delta, base.bfloat16()) == "other"
    assert state(delta, base.float()) == "base"
    exact = torch.tensor([[1.0, 0.5]], dtype=kept)
    assert state(delta_of(exact, exact + 1), exact.bfloat16()) == "base", "the same values, in fewer bits"


def test_gates_kept_in_float32_are_tuned_in_full_and_rounded():
    tuned = TUNED.float() + 2**-20
    delta = delta_of(BASE, tuned)
    assert delta.is_float32 and not delta_of(BASE, TUNED).is_float32
    assert torch.equal(delta.stored(GATE), TUNED) and torch.equal(delta.tensor(GATE), tuned)
    assert delta.stored(GATE, torch.float32).dtype == torch.float32
    for found in (tuned, delta.stored(GATE, torch.float32), TUNED, tuned.half()):
        assert state(delta, found) == "tuned"
    assert state(delta, tuned + 2**-20) == "other" and state(delta, BASE.float()) == "base"


@settings(deadline=None)
@given(st.lists(BITS, min_size=1, max_size=6), st.integers(0, 10**6), st.sampled_from(DTYPES))
def test_any_bits_are_the_base_and_any_other_bit_is_not(bits, where, dtype):
    """Infinities and subnormals among them; NaN has no bits of its own in another dtype."""
    base = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    delta = delta_of(base, torch.full_like(base, 2.5))
    stored = bytearray(stored_bytes(base.to(dtype_named(dtype))))
    expected = "both" if torch.equal(base, delta.tensors[GATE]) else "base"
    assert state_of(delta, GATE, dtype, bytes(stored)) == expected
    stored[where // 8 % len(stored)] ^= 1 << where % 8
    assert state_of(delta, GATE, dtype, bytes(stored)) in ("other", "tuned")
    if bytes(stored) != stored_bytes(delta.tensor(GATE, dtype_named(dtype))):
        assert state_of(delta, GATE, dtype, bytes(stored)) == "other"


def test_what_the_states_say_together():
    delta = delta_of(BASE, TUNED)
    assert applied(delta, {"a": "tuned", "b": "both"}, "F") and not applied(delta, {"a": "base", "b": "both"}, "F")
    assert not applied(delta, {"a": "both"}, "F")
    with pytest.raises(DeltaError, match=r"^F holds a mix"):
        applied(delta, {"a": "tuned", "b": "base"}, "F")
    with pytest.raises(DeltaError, match=r"the gate b of F is not .*org/base@aaaaaaaaaaaa.*smooth") as raised:
        applied(delta, {"a": "base", "b": "other"}, "F")
    assert raised.value.hint == f"remoe apply DELTA org/base@{'a' * 40} --out DIR"
    check_form(delta, GATE, "F32", (2, 2), "F")
    for dtype, shape, words in (
        ("Q8_0", (2, 2), "stored as Q8_0 in F.*quantised"), ("I8", (2, 2), "quantised"), ("F32", (2, 3), r"is \[2, 3\] in F but \[2, 2\]"),
    ):  # fmt: skip
        with pytest.raises(DeltaError, match=words):
            check_form(delta, GATE, dtype, shape, "F")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A bfloat16 base, as nearly all published models are."""
    return Checkpoint.open(tiny_models.make("mixtral", tmp_path_factory.mktemp("b") / "base", torch.bfloat16))


def is_gate(name: str) -> bool:
    return "block_sparse_moe.gate" in name


def matrices(tensors: dict) -> list[str]:
    return [name for name, tensor in tensors.items() if tensor.ndim == 2 and "norm" not in name and "embed" not in name]


def fp8(tensors: dict) -> None:
    """As DeepSeek-V3 and Qwen3-FP8: one scale a block."""
    for name in [name for name in matrices(tensors) if not is_gate(name)]:
        tensors[f"{name}_scale_inv"] = torch.ones(1, 1)
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def mxfp4(tensors: dict) -> None:
    """As gpt-oss: two values a byte, one exponent a block."""
    for name in [name for name in tensors if "experts" in name]:
        found = tensors.pop(name)
        tensors[f"{name}_blocks"] = torch.zeros(found.shape[0], found.numel() // found.shape[0] // 2, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.zeros(found.shape[0], 1, dtype=torch.uint8)


def packed(tensors: dict, names: list[str]) -> None:
    """As AWQ and GPTQ: eight values a word."""
    for name in names:
        stem, found = name.removesuffix("weight"), tensors.pop(name)
        tensors[f"{stem}qweight"] = torch.zeros(found.shape[1], found.shape[0] // 8 or 1, dtype=torch.int32)
        tensors[f"{stem}scales"] = torch.ones(1, found.shape[0], dtype=torch.float16)


def to_half(tensors: dict) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.bfloat16:
            tensors[name] = tensor.half()


def gptq(tensors: dict) -> None:
    """Its checkpoints are float16 where they are not quantised."""
    packed(tensors, [name for name in matrices(tensors) if not is_gate(name)])
    to_half(tensors)


def gptq_of_gates(tensors: dict) -> None:
    packed(tensors, matrices(tensors))


def awq(tensors: dict) -> None:
    """Scales of the layers that read one input are folded into the norm before, and so into the gate's columns."""
    gptq(tensors)
    for name in tensors:
        if is_gate(name):
            tensors[name] = tensors[name] * 1.25


def bitsandbytes(tensors: dict) -> None:
    """Two values a byte in one column; the gates too, since they are linear layers."""
    for name in matrices(tensors):
        found = tensors[name]
        tensors[name] = torch.zeros(found.numel() // 2, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.ones(1)


def compressed(tensors: dict) -> None:
    for name in matrices(tensors):
        found = tensors.pop(name)
        tensors[f"{name}_packed"] = torch.zeros(found.shape[0], found.shape[1] // 8, dtype=torch.int32)


def fp8_of_gates(tensors: dict) -> None:
    fp8(tensors)
    for name in [name for name in tensors if is_gate(name)]:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def quantised(base: Checkpoint, folder: Path, change, method: str) -> Checkpoint:
    rewritten(base, folder, change)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method}
    (folder / "config.json").write_text(json.dumps(config))
    return Checkpoint.open(folder)


@pytest.mark.parametrize(("change", "method"), [(fp8, "fp8"), (mxfp4, "mxfp4"), (gptq, "gptq")])
def test_a_quantised_base_whose_gates_are_the_same_takes_the_delta(base, tmp_path, capsys, change, method):
    delta = make_delta(base)
    delta.save(tmp_path / "delta")
    found = quantised(base, tmp_path / "quantised", change, method)
    assert set(found.tensors) != set(base.tensors) or found.tensors != base.tensors
    assert not delta.is_applied(found)
    assert f"stored quantised ({method}), but not its gates" in (quantised_note(found) or "")
    out = apply(str(tmp_path / "delta"), str(found.folder), tmp_path / "out")
    assert f"stored quantised ({method})" in " ".join(capsys.readouterr().err.split())
    patched = Checkpoint.open(out)
    for name, info in found.tensors.items():
        if name in delta.tensors:
            assert torch.equal(patched.read(name), delta.tensor(name, dtype_named(info.dtype)))
        else:
            assert patched.raw(name) == found.raw(name)
    assert delta.is_applied(patched)


@pytest.mark.parametrize(
    ("change", "method", "words"),
    [
        (awq, "awq", "a quantiser may smooth them"),
        (gptq_of_gates, "gptq", "has no gate .*a quantised one, .*gate.qweight, stands in its place"),
        (bitsandbytes, "bitsandbytes", "stored as U8 .*that gate is quantised"),
        (compressed, "compressed-tensors", "a quantised one, .*gate.weight_packed"),
        (fp8_of_gates, "fp8", "stored as F8_E4M3 .*but as bfloat16 .*quantised"),
    ],
)
def test_a_quantised_base_whose_gates_are_not_the_same_is_refused(base, tmp_path, change, method, words):
    delta = make_delta(base)
    delta.save(tmp_path / "delta")
    found = quantised(base, tmp_path / "quantised", change, method)
    with pytest.raises(DeltaError, match=words) as raised:
        apply(str(tmp_path / "delta"), str(found.folder), tmp_path / "out")
    assert "\n" not in raised.value.message and not (tmp_path / "out").exists()


def test_a_base_that_is_not_quantised_has_no_note(base):
    assert quantised_note(base) is None
    odd = replace(base, config={"quantization_config": "yes"})
    assert "(unknown method)" in (quantised_note(odd) or "")


def test_the_same_base_in_float32_takes_the_delta(base, tmp_path):
    delta = make_delta(base)
    delta.save(tmp_path / "delta")

    def widen(tensors):
        tensors.update({name: tensor.float() for name, tensor in tensors.items()})

    wide = rewritten(base, tmp_path / "wide", widen)
    assert not delta.is_applied(wide)
    patched = Checkpoint.open(apply(str(tmp_path / "delta"), str(wide.folder), tmp_path / "out"))
    for name, tensor in delta.tensors.items():
        assert torch.equal(patched.read(name), tensor.float())
    assert delta.is_applied(patched)


def test_new_deltas_say_how_the_base_stores_its_gates(base, tmp_path):
    delta = make_delta(base)
    delta.save(tmp_path / "delta")
    facts = json.loads((tmp_path / "delta/remoe.json").read_text())
    for name, gate in facts["gates"].items():
        assert gate["base_dtype"] == gate["dtype"] == "bfloat16"
        assert gate["base_sha256_f16"] == digest(stored_bytes(base.read(name).half()))
        del gate["base_dtype"], gate["base_sha256_f16"]
    (tmp_path / "delta/remoe.json").write_text(json.dumps(facts))
    older = Delta.load(tmp_path / "delta")
    assert older.base_sha256_f16 == {} and not older.is_applied(base) and not older.is_float32
    shutil.rmtree(tmp_path / "delta")

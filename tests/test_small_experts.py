"""Experts in 8 and 4 bits: how near they come, products against unpacked weights, stores, decoding, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import make_model, refused, report_of
from decoding import NEW, PROMPT
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import EXPERTS

from remoe_cli.cache import replay
from remoe_cli.families.loader import experts_on_disk
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, pack, Settings
from remoe_cli.offload.layout import Layout
from remoe_cli.offload.rows import light_ones
from remoe_cli.offload.small import blocked, group_for, GROUPS, has_kernel, int4, int8, Small
from remoe_cli.offload.small_pack import error_of

pytestmark = pytest.mark.usefixtures("one_thread")
FAMILIES = ("deepseek_v2", "gpt_oss", "mixtral")
WIDE = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Family -> a bf16 checkpoint whose experts have inputs that groups of 32 divide."""
    import tiny_models

    made: dict = {}

    def make(family):
        if family not in made:
            sizes = WIDE if family != "deepseek_v2" else {**WIDE, "moe_intermediate_size": 96}
            made[family] = tiny_models.make(family, tmp_path_factory.mktemp("wide"), torch.bfloat16, **sizes)
        return Checkpoint.open(made[family])

    return make


# ---- numbers


def slow_int4(weight_OI, group):
    """Codes, scales and zeros of a weight, one group after the other, without a choice of ranges; -> what they stand for."""
    out = weight_OI.clone()
    for row in out:
        for start in range(0, len(row), group):
            part = row[start : start + group]
            low, high = part.min().item(), part.max().item()
            scale = torch.tensor((high - low) / 15).bfloat16().item()
            zero = torch.tensor((high + low) / 2 + scale / 2).bfloat16().item()
            codes = ((part - zero) / scale + 8).round().clamp(0, 15)
            part.copy_((codes - 8) * scale + zero)
    return out


def test_inputs_that_no_group_divides_are_filled_up():
    weight_OI, x = torch.randn(70, 48), torch.randn(3, 48).bfloat16()
    assert [group_for(inputs, 64) for inputs in (48, 64, 96, 20)] == [64, 64, 32, 32]
    small = int4(weight_OI, group_for(48, 64))
    assert small.codes.shape == (2, 64, 32) and error_of(small, weight_OI) < 0.15
    expected = x.float() @ small.weight(torch.float32)[:, :48].T
    assert (small.linear(x).float() - expected).abs().max() < 0.01 * expected.abs().max()
    with_zeros = int4(torch.nn.functional.pad(weight_OI, (0, 16)), 64)
    assert torch.equal(small.codes, with_zeros.codes) and torch.equal(small.scales, with_zeros.scales)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 130), st.sampled_from(GROUPS), st.integers(1, 3), st.integers(0, 99))
def test_small_weights_stand_for_numbers_near_theirs(rows, group, groups, seed):
    weight_OI = torch.randn(rows, group * groups, generator=torch.Generator().manual_seed(seed))
    four, eight = int4(weight_OI, group), int8(weight_OI)
    assert four.weight(torch.float32).shape == eight.weight(torch.float32).shape == weight_OI.shape
    plain = (slow_int4(weight_OI, group) - weight_OI).square().sum()
    assert (four.weight(torch.float32) - weight_OI).square().sum() <= plain * (1 + 1e-4)
    assert error_of(eight, weight_OI) < 0.02 and error_of(four, weight_OI) < 0.15
    scale_O = eight.scales.float()
    # half a step, and what is cut where the scale was rounded down
    assert ((eight.weight(torch.float32) - weight_OI).abs() <= 1.01 * scale_O[:, None]).all()


def test_codes_lie_as_the_kernel_wants_them_by_hand():
    codes = torch.zeros(64, 2, dtype=torch.uint8)
    codes[0, 0], codes[32, 0], codes[31, 1], codes[63, 1] = 1, 2, 3, 4
    found = blocked(codes)
    assert found.shape == (1, 2, 32) and found[0, 0, 0] == 1 + 16 * 2 and found[0, 1, 31] == 3 + 16 * 4
    assert found.int().sum() == 33 + 67
    four = Small(found, torch.ones(1, 64, 2, dtype=torch.bfloat16), 64)  # scale 1, zero 1
    assert torch.equal(four.weight(torch.float32), codes.float() - 8 + 1)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("make", [int8, lambda weight: int4(weight, 64)], ids=["int8", "int4"])
def test_products_are_those_of_the_unpacked_weights(make, dtype, rows):
    generator = torch.Generator().manual_seed(0)
    weight_OI, x = torch.randn(200, 128, generator=generator), torch.randn(rows, 128, generator=generator).to(dtype)
    small = make(weight_OI)
    expected = x.double() @ small.weight(torch.float64).T
    assert small.linear(x).dtype == dtype and small.linear(x[0]).shape == (200,)
    bound = (0.01 if dtype == torch.bfloat16 else 1e-4) * expected.abs().max()  # bf16 rounds weights and sums
    assert (small.linear(x).double() - expected).abs().max() < bound
    assert (small.linear(x[0]).double() - expected[0]).abs().max() < bound


def test_without_a_kernel_weights_are_unpacked(monkeypatch):
    """As on a GPU, or a CPU that packs in another way."""
    weight_OI, x = torch.randn(64, 64), torch.randn(2, 64).bfloat16()
    made = [int8(weight_OI), int4(weight_OI, 32)]
    quick = [one.linear(x) for one in made]
    monkeypatch.setattr("remoe_cli.offload.small.has_kernel", lambda *_: False)
    for one, before in zip(made, quick, strict=True):
        assert torch.equal(one.linear(x), x @ one.weight(torch.bfloat16).T)
        assert (one.linear(x) - before).abs().max() < 0.2
    assert not has_kernel("cuda", torch.bfloat16) and not has_kernel("cpu", torch.float32)


# ---- stores


@pytest.mark.parametrize("form", [pack.Form("int8"), pack.Form("int4", 64)], ids=["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_store_holds_the_checkpoints_experts(wide, tmp_path, family, form):
    checkpoint = wide(family)
    layers = experts_on_disk(checkpoint)
    pack.write(layers, checkpoint, tmp_path / "store", form=form)
    found = pack.packed(layers, checkpoint, tmp_path / "store")
    assert sum(path.stat().st_size for path in (tmp_path / "store").glob("*.bin")) == pack.packed_bytes(layers, form)
    stored, small = (Layout(of, torch.bfloat16, direct=False) for of in (layers, found))
    transposed = layers[0].module.is_transposed
    for layer, expert in ((0, 0), (1, 5)):
        before, after = (read(layout, layer, expert) for layout in (stored, small))
        for part, pieces in before.items():
            if pieces[0].dim() == 1:
                assert torch.equal(pieces[0], after[part][0])
                continue
            whole = torch.cat(pieces).float()
            (made,) = after[part]
            assert isinstance(made, Small)
            assert error_of(made, whole.T if transposed else whole) < (0.02 if form.experts == "int8" else 0.15)


def read(layout, layer, expert):
    row = torch.zeros(layout.row_bytes, dtype=torch.uint8)
    for window in layout.images[layer][expert].windows:
        with open(window.file, "rb") as stream:
            stream.seek(window.offset)
            content = stream.read(window.nbytes)
        row[window.start : window.start + len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
    return {part: [*pieces] for part, pieces in layout.tensors(row, layer, expert).items()}


@pytest.mark.parametrize("form", [pack.Form("int8"), pack.Form("int4", 32)], ids=["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_from_a_store(wide, tmp_path, family, form):
    """Tokens are those with all experts resident, counts those of the replay, bytes those of the blocks."""
    checkpoint = wide(family)
    layers = experts_on_disk(checkpoint)
    pack.write(layers, checkpoint, tmp_path / "store", form=form)
    for dtype in (torch.bfloat16, torch.float32):
        with OffloadedDecoder(checkpoint, EXPERTS, dtype=dtype, pack=tmp_path / "store") as decoder:
            resident = decoder.decode(PROMPT, NEW, keep_logits=True)
            decoder.configure(4)
            done = decoder.decode(PROMPT, NEW, keep_logits=True)
            assert torch.equal(done.logits, resident.logits) and done.ids == resident.ids
            assert decoder.small and decoder.expert_bytes < 0.6 * sum(p.nbytes for p in layers[0].pieces(0))
            simulated = replay(done.trace, "lru", 4)
            assert (simulated.hits, simulated.misses) == (done.counts.hits, done.counts.misses)
            assert done.counts.decode.bytes == done.counts.misses * decoder.expert_bytes
    stock = replaced(
        checkpoint, tmp_path, Layout(pack.packed(layers, checkpoint, tmp_path / "store"), torch.float32, direct=False)
    )
    with OffloadedDecoder(stock, EXPERTS, dtype=torch.float32) as decoder:
        expected = decoder.decode(PROMPT, NEW, forced=resident.ids, keep_logits=True)
    assert (expected.logits - resident.logits).abs().max() < 1e-3 * expected.logits.abs().max()


def replaced(checkpoint, tmp_path, small):
    """The checkpoint in fp32 with the numbers that a store's codes stand for: what the codes must compute."""
    from remoe_cli.families.loader import load_resident

    model = load_resident(checkpoint, torch.float32, "cpu")
    layers = experts_on_disk(checkpoint)
    parameters = dict(model.named_parameters())
    for index, layer in enumerate(layers):
        for name in [part.name for part in layer.parts]:
            (key,) = [k for k in parameters if k.endswith(f"experts.{name}") and f"layers.{layer.layer}." in k]
            for expert in range(layer.n_experts):
                (piece,) = read(small, index, expert)[name]
                if isinstance(piece, Small):
                    weight = piece.weight(torch.float32)
                    parameters[key].data[expert] = weight.T if layer.module.is_transposed else weight
    model.save_pretrained(tmp_path / "replaced")
    return Checkpoint.open(tmp_path / "replaced")


# ---- the commands


@pytest.fixture
def model(tmp_path):
    return make_model(tmp_path / "model", **WIDE, moe_intermediate_size=64)


def test_pack_and_decode_by_command(remoe, model):
    done = report_of(remoe("pack", model, "--experts", "int4", "--out", "four", "--json"))
    assert (done["experts_as"], done["group"]) == ("int4", 64) and done["bytes"] < 0.3 * done["stored_bytes"]
    said = remoe("pack", model, "--experts", "int8", "--out", "eight").out
    assert "in int8" in said and "as stored" in said and "remoe decode" in said
    asked = ("decode", model, "--cache", 4, "--tokens", 4)
    row = report_of(remoe(*asked, "--pack", "four", "--experts", "int4", "--json"))
    assert row["rows"][0]["bytes"] > 0 and any("unpacked before each product" in note for note in row["notes"])


def test_what_is_refused(remoe, model):
    refused(remoe("pack", model, "--experts", "int3", "--out", "x"), "--experts is stored, int8 or int4, not 'int3'")
    refused(
        remoe("pack", model, "--experts", "int4", "--group", 48, "--out", "x"), "--group is 32, 64, 128 or 256, not 48"
    )
    assert not Path("x").exists()
    assert remoe("pack", model, "--experts", "int4", "--out", "four").code == 0
    asked = ("decode", model, "--cache", 4)
    refused(
        remoe(*asked, "--pack", "four", "--experts", "int8"),
        "four holds the experts as int4, not as int8",
        "--experts int4",
    )
    refused(
        remoe(*asked, "--experts", "int8"), "--pack names a folder that has them so", "remoe pack MODEL --experts int8"
    )
    refused(remoe(*asked, "--experts", "int3", "--pack", "four"), "--experts is stored, int8 or int4")
    other = make_model(Path("other"), **WIDE, moe_intermediate_size=64, hidden_act="gelu")
    facts = json.loads(Path("four/pack.json").read_text())
    Path("four/pack.json").write_text(json.dumps({**facts, "samples": ["0", "0"]}))
    refused(remoe(*asked, "--pack", "four"), "packed from another model, or damaged since")
    refused(remoe("decode", other, "--cache", 4, "--pack", "four"), "four")


# ---- mixed precision on a miss


def test_light_experts_by_hand():
    experts, weights = np.array([7, 2, 5, 1], np.int16), np.array([0.5, 0.3, 0.15, 0.05], np.float16)
    assert light_ones(experts, weights, 0.6) == {5, 1}  # 7 and 2 reach .8; before 5 stands .8
    assert light_ones(experts, weights, 0.0) == {7, 2, 5, 1} and light_ones(experts, weights, 1.0) == set()
    assert light_ones(experts, 3 * weights, 0.6) == {5, 1}, "shares, not sums"


@pytest.mark.parametrize("family", FAMILIES)
def test_heavy_misses_come_as_stored_and_light_ones_in_fewer_bits(wide, tmp_path, family):
    """Ends: all heavy is the stored model, bit for bit; all light is the small one. Between, bytes are those of a plain count."""
    checkpoint = wide(family)
    layers = experts_on_disk(checkpoint)
    pack.write(layers, checkpoint, tmp_path / "store", form=pack.Form("int4", 32))
    found: dict = {}
    for heavy in (1.0, 0.5, 0.0):
        how = Settings(heavy=heavy)
        with OffloadedDecoder(checkpoint, 3, pack=tmp_path / "store", settings=how) as decoder:
            found[heavy] = decoder.decode(PROMPT, NEW, keep_logits=True)
            small = sum(piece.nbytes for piece in decoder.light[0].pieces(0))
        done = found[heavy]
        assert (done.counts.hits, done.counts.misses) == replayed(done.trace, 3)
        light = slow_light(done.trace, 3, heavy)
        assert done.counts.light == light
        expected = (done.counts.misses - light) * decoder.expert_bytes + light * small
        assert done.counts.decode.bytes == expected
    with OffloadedDecoder(checkpoint, 3) as decoder:
        assert torch.equal(decoder.decode(PROMPT, NEW, keep_logits=True).logits, found[1.0].logits)
    assert found[1.0].counts.light == 0 and found[0.0].counts.light == found[0.0].counts.misses
    assert 0 < found[0.5].counts.light < found[0.5].counts.misses


def replayed(trace, capacity):
    simulated = replay(trace, "lru", capacity)
    return simulated.hits, simulated.misses


def slow_light(trace, capacity, heavy):
    """Misses of a plain LRU, a layer and a token at a time, that stand behind the heavy share of their token."""
    light = 0
    for layer in range(trace.n_layers):
        held: list[int] = []
        for experts, weights in zip(trace.decode().experts[:, layer], trace.decode().weights[:, layer]):
            total, before = float(weights.astype(np.float64).sum()), 0.0
            late = set()
            for expert, weight in zip(experts.tolist(), weights.astype(np.float64).tolist()):
                if before >= heavy * total:
                    late.add(expert)
                before += weight
            light += len(late - {*held})
            for expert in reversed(experts.tolist()):
                held = [one for one in held if one != expert] + [expert]
            held = held[-capacity:]
    return light


def test_heavy_is_refused_where_it_cannot_be(remoe, model, texts):
    asked = ("decode", model, "--cache", 4, "--heavy", 0.5)
    refused(
        remoe(*asked), "--heavy reads light misses in fewer bits: it needs a --pack", "remoe pack MODEL --experts int4"
    )
    assert remoe("pack", model, "--experts", "int4", "--out", "four").code == 0
    assert remoe("pack", model, "--force", "--out", "same").code == 0
    refused(remoe(*asked, "--pack", "same"), "--heavy needs a --pack in int8 or int4")
    refused(remoe(*asked[:4], "--pack", "four", "--heavy", 2), "--heavy is a share of the routing weight")
    refused(remoe(*asked, "--pack", "four", "--floor"), "it takes no --floor")
    row = report_of(remoe(*asked, "--pack", "four", "--json"))["rows"][0]
    assert 0 < row["light"] < row["misses"] and row["heavy"] == 0.5
    assert "of them in fewer bits" in remoe(*asked, "--pack", "four").out

"""remoe inspect and remoe diff: what they say of deltas, by hand, and as scripts read it."""

import json
from dataclasses import replace

import pytest
import tiny_models
import torch
from commands import refused, report_of
from test_delta import make_delta
from test_merge import delta_of

from remoe_cli.delta import Delta
from remoe_cli.delta.stored import digest, stored_bytes
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.report.summary import summary


@pytest.fixture
def delta(tmp_path):
    found = make_delta(Checkpoint.open(tiny_models.make("mixtral", tmp_path / "base", torch.bfloat16)))
    head = {"model.layers.0.block_sparse_moe.gate.temporal": torch.ones(8, 32)}
    return replace(
        found, base="org/base", commit="c" * 40, heads=head, report={"perplexity_change": -0.01234567, "cache": 8}
    )


def test_what_a_delta_is(delta, remoe, tmp_path):
    delta.save(tmp_path / "d")
    found = report_of(remoe("inspect", "d", "--json"))
    assert (found["base"], found["commit"], found["model_type"], found["recipe"]) == (
        "org/base",
        "c" * 40,
        "mixtral",
        "remoe",
    )
    assert found["bytes"] == 3 * 8 * 32 * 2 + 8 * 32 * 4 and found["report"] == delta.report
    assert list(found["gates"]) == sorted(delta.tensors)
    for name, gate in found["gates"].items():
        assert gate == {
            "shape": [8, 32], "dtype": "bfloat16", "base_dtype": "bfloat16", "base_sha256": delta.base_sha256[name],
            "base_sha256_f16": delta.base_sha256_f16[name], "sha256": digest(stored_bytes(delta.tensors[name])),
        }  # fmt: skip
    ran = remoe("inspect", "d")
    assert ran.code == 0 and not ran.err
    for words in (
        f"a delta of org/base@{'c' * 40} (mixtral), recipe remoe, 2.56 kB", "3 gates: 3 of [8, 32] bfloat16; 99.9 % of the elements",
        "Heads: 1 temporal", "perplexity_change -0.01235, cache 8", f"Next: remoe apply d org/base@{'c' * 40} --out DIR",
    ):  # fmt: skip
        assert words in ran.out, ran.out


def test_gates_kept_in_float32_and_an_unknown_share_are_said(delta, remoe, tmp_path):
    wide = {name: tensor.float() for name, tensor in delta.tensors.items()}
    replace(delta, tensors=wide, changed=None).save(tmp_path / "d")
    ran = remoe("inspect", "d")
    assert "3 of [8, 32] float32 (the base's are bfloat16); an unknown share" in ran.out
    assert Delta.load(tmp_path / "d").is_float32


def test_what_cannot_be_printed_is_marked(delta, remoe, tmp_path):
    replace(delta, base="\udcff\x1b[2Jbase", report={"a\nb": "c\td"}).save(tmp_path / "d")
    ran = remoe("inspect", "d")
    assert ran.code == 0 and "\x1b" not in ran.out and "a delta of \ufffd\ufffd[2Jbase" in ran.out
    assert "a\ufffdb c\ufffdd" in ran.out


def test_no_delta_is_told(remoe, tmp_path):
    (tmp_path / "empty").mkdir()
    for command in (("inspect", "empty"), ("diff", "empty", "empty")):
        refused(remoe(*command), "empty is not a delta")


def test_differences_by_hand(remoe, tmp_path):
    delta_of(3.0, 4.0, 0.0, 0.0).save(tmp_path / "a")
    delta_of(3.0, 4.0, 0.0, 1.0, recipe="ce-only").save(tmp_path / "b")
    found = report_of(remoe("diff", "a", "b", "--json"))
    assert found["gates"] == {"gate.weight": {"different": 0.25, "largest": 1.0, "relative": 0.2}}
    assert found["facts"] == {"recipe": ["remoe", "ce-only"]} and not found["same"] and found["apart"] == ""
    ran = remoe("diff", "a", "b")
    assert "1 of 1 gates that both have differ" in ran.out and "recipe: remoe | ce-only" in ran.out
    assert "gate.weight  25.0 % of its elements, by 1 at most, 0.2 of its norm" in ran.out
    assert "Next: remoe merge a b --out DIR" in ran.out
    same = remoe("diff", "a", "a")
    assert "0 of 1 gates" in same.out and "They are the same." in same.out
    assert report_of(remoe("diff", "a", "a", "--json"))["same"]


def test_deltas_of_different_bases_and_shapes(remoe, tmp_path):
    one = delta_of(0.0, 0.0)
    other = delta_of(1.0, base="org/other", base_sha256={"gate.weight": "1" * 64})
    one.save(tmp_path / "a")
    replace(other, heads={"gate.temporal": torch.ones(1, 1)}).save(tmp_path / "b")
    found = report_of(remoe("diff", "a", "b", "--json"))
    assert found["gates"] == {"gate.weight": None} and found["only_second"] == ["gate.temporal"] and not found["same"]
    assert found["apart"] == "they were made from different bases, org/base and org/other (gate gate.weight)"
    ran = remoe("diff", "a", "b")
    for words in (
        "of another shape",
        "1 only in b, such as gate.temporal",
        "base: org/base | org/other",
        "They cannot be merged: ",
    ):
        assert words in ran.out
    zero = delta_of(1.0, 2.0)
    zero.save(tmp_path / "c")
    assert report_of(remoe("diff", "a", "c", "--json"))["gates"]["gate.weight"]["relative"] is None, "of a norm of 0"


def test_a_long_table_is_cut(remoe, tmp_path):
    names = [f"layers.{i}.gate.weight" for i in range(20)]

    def many(value: float) -> Delta:
        tensors = {name: torch.full((1, 2), value + i) for i, name in enumerate(names)}
        return delta_of(1.0, base_sha256=dict.fromkeys(names, "0" * 64), base_dtypes={}, tensors=tensors)

    many(1.0).save(tmp_path / "a")
    many(2.0).save(tmp_path / "b")
    ran = remoe("diff", "a", "b")
    assert ran.out.count(" of its norm") == 12 and "and 8 more (--json has all)" in ran.out
    assert ran.out.index("layers.0.") < ran.out.index("layers.1."), "what differs most comes first"


def test_the_summary_of_a_report():
    def arm(role: str, perplexity: float | None, misses: int, change: float | None) -> dict:
        cells = [
            {
                "trace": "forced", "policy": "lru", "admission": "forced", "capacity": c, "misses": misses // c,
                "hit_ratio": 0.5, "misses_change": change,
            }
            for c in (4, 8)
        ]  # fmt: skip
        return {"role": role, "text": {"perplexity": perplexity, "perplexity_change": change}, "cache": cells}

    report = {
        "arms": [arm("base", 10.0, 80, None), arm("control", 1.0, 8, 0.0), arm("tuned", None, 40, -0.5)],
        "conditions": {"capacities": [4, 8]},
    }
    assert summary(report) == {
        "perplexity_base": 10.0, "perplexity_tuned": None, "perplexity_change": -0.5, "cache": 4, "hit_base": 0.5,
        "hit_tuned": 0.5, "misses_base": 20, "misses_tuned": 10, "misses_change": -0.5,
    }  # fmt: skip
    json.dumps(summary(report))

"""remoe merge: averages by hand, what cannot be averaged and why, and the command."""

import json
import math
from dataclasses import replace

import pytest
import tiny_models
import torch
from commands import refused, report_of
from hypothesis import given, settings
from hypothesis import strategies as st
from test_delta import make_delta

from remoe_cli.delta import Delta
from remoe_cli.delta.merge import apart, merged
from remoe_cli.delta.stored import stored_bytes
from remoe_cli.errors import DeltaError, UsageError
from remoe_cli.hub.checkpoint import Checkpoint


def delta_of(*values: float, dtype: torch.dtype = torch.bfloat16, **changes) -> Delta:
    """One gate of those values, of a bfloat16 base of zeros."""
    delta = Delta(
        {"gate.weight": torch.tensor([values], dtype=dtype)}, "org/base", "a" * 40, "mixtral", {"gate.weight": "0" * 64}, 0.5,
        "remoe", base_dtypes={"gate.weight": torch.bfloat16},
    )  # fmt: skip
    return replace(delta, **changes)


def averaged(deltas: list[Delta], weights: list[float]) -> Delta:
    return merged(deltas, weights, "abcde"[: len(deltas)])


def gate(delta: Delta) -> list[float]:
    return delta.tensors["gate.weight"].tolist()[0]


def test_averages_by_hand():
    one, other = delta_of(1.0, -2.0, 0.0), delta_of(3.0, 2.0, 8.0)
    assert gate(averaged([one, other], [1, 1])) == [2.0, 0.0, 4.0]
    assert gate(averaged([one, other], [3, 1])) == [1.5, -1.0, 2.0], "weights are scaled to sum 1"
    assert gate(averaged([one, other], [0, 2])) == gate(other)
    found = averaged([one, other, other], [2, 1, 1])
    assert gate(found) == [2.0, 0.0, 4.0] and found.changed is None and found.report == {}
    assert found.recipe == "merge of remoe 0.5, remoe 0.25, remoe 0.25"
    assert (found.base, found.commit, found.base_sha256) == (one.base, one.commit, one.base_sha256)


def test_rounded_once_to_the_deltas_dtype():
    step = 2**-8  # of bfloat16 at 1; halfway between goes to the even one
    one, other = delta_of(1.0), delta_of(1.0 + 2 * step)
    assert gate(averaged([one, other], [1, 1])) == [1.0]
    assert gate(averaged([one, other], [1, 1.01])) == [1.0 + 2 * step]
    wide = delta_of(1.0 + step, dtype=torch.float32)
    found = averaged([one, wide], [1, 1])
    assert gate(found) == [1.0 + step / 2] and found.is_float32


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=8),
    st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=5),
    st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_a_delta_averaged_with_itself_is_itself(bits, weights, dtype):
    values = torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    values = torch.where(values.isfinite(), values, 0)
    one = delta_of(dtype=dtype)
    one = replace(one, tensors={"gate.weight": (values.to(dtype) * 1.1).to(dtype)[None]})
    found = averaged([one] * len(weights), weights)
    assert torch.equal(found.tensors["gate.weight"], one.tensors["gate.weight"])
    assert found.tensors["gate.weight"].dtype == dtype


def test_heads_are_averaged_where_all_have_them():
    head = {"gate.temporal": torch.tensor([[2.0]])}
    one, other = delta_of(1.0, heads=head), delta_of(3.0, heads={"gate.temporal": torch.tensor([[4.0]])})
    assert averaged([one, other], [1, 1]).heads["gate.temporal"].item() == 3.0
    with pytest.raises(DeltaError, match=r"a and b cannot be averaged: only one of them has the head gate\.temporal"):
        averaged([one, delta_of(3.0)], [1, 1])
    longer = {"gate.temporal": torch.ones(1, 2)}
    with pytest.raises(DeltaError, match="heads differ in shape"):
        averaged([one, delta_of(3.0, heads=longer)], [1, 1])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_sha256": {"gate.weight": "1" * 64}}, "different bases, org/base and org/base"),
        ({"model_type": "olmoe"}, "one is of a mixtral, the other of a olmoe"),
        ({"base_dtypes": {"gate.weight": torch.float32}}, "differs in shape or dtype"),
        ({"base_sha256": {"gate.weight": "0" * 64, "q.weight": "2"}}, "only one of them changes q.weight"),
    ],
)
def test_what_cannot_be_averaged(changes, words):
    other = delta_of(2.0, dtype=torch.float32, **changes)
    if "q.weight" in other.base_sha256:
        other = replace(other, tensors={**other.tensors, "q.weight": torch.ones(1)})
    with pytest.raises(DeltaError, match=words):
        averaged([delta_of(1.0), delta_of(1.0), other], [1, 1, 1])
    assert apart(delta_of(1.0), delta_of(1.0)) == ""


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [0, 0], [-1, 2], [math.nan, 1], [math.inf, 1], [1e308, 1e308]])
def test_weights_that_cannot_be(weights):
    with pytest.raises(UsageError, match="--weights"):
        averaged([delta_of(1.0), delta_of(2.0)], weights)


@pytest.fixture
def base(tmp_path):
    return Checkpoint.open(tiny_models.make("mixtral", tmp_path / "base", torch.bfloat16))


def test_the_command(base, remoe, tmp_path):
    one, other = make_delta(base, 0.5), make_delta(base, 0.1)
    one.save(tmp_path / "a")
    other.save(tmp_path / "b")
    done = report_of(remoe("merge", "a", "b", "--weights", "3,1", "--out", "m", "--json"))
    assert done == {
        "folder": "m", "merged": [{"delta": "a", "weight": 3.0}, {"delta": "b", "weight": 1.0}], "base": str(base.folder), "commit": None,
        "recipe": "merge of remoe 0.75, remoe 0.25", "gates": 3, "heads": 0,
    }  # fmt: skip
    found = Delta.load(tmp_path / "m")
    for name in one.tensors:
        expected = (0.75 * one.tensors[name].double() + 0.25 * other.tensors[name].double()).bfloat16()
        assert stored_bytes(found.tensors[name]) == stored_bytes(expected)
    assert not found.is_applied(base)
    assert json.loads((tmp_path / "m/remoe.json").read_text())["changed"] is None
    ran = remoe("merge", "a", "b", "--out", "half")
    assert ran.code == 0 and f"Next: remoe apply half {base.folder} --out DIR" in ran.out
    before = {path: path.read_bytes() for path in (tmp_path / "m").iterdir()}
    for arguments, words in (
        (("a", "b", "--out", "m"), "exists and is not an empty folder"),
        (("a", "--out", "n"), "two deltas or more"),
        (("a", "b", "--weights", "1", "--out", "n"), "one number a delta"),
        (("a", "b", "--weights", "1,x", "--out", "n"), "takes numbers"),
        (("a", "b", "--weights", "1,-1", "--out", "n"), "0 or more"),
        (("a", "base", "--out", "n"), "base is not a delta"),
    ):
        refused(remoe("merge", *arguments), words)
    assert not (tmp_path / "n").exists()
    assert before == {path: path.read_bytes() for path in (tmp_path / "m").iterdir()}

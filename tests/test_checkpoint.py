"""Model folders that are damaged, in every place: named in one line, never a traceback."""

import json
import shutil

import pytest
import tiny_models
from hypothesis import given, settings
from hypothesis import strategies as st

from remoe_cli.errors import CheckpointError
from remoe_cli.hub.checkpoint import Checkpoint, INDEX, read_header
from remoe_cli.hub.resolve import resolve


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return tiny_models.make("mixtral", tmp_path_factory.mktemp("whole") / "model")


@pytest.fixture
def model(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "model")


def refused(model, words: str) -> None:
    for read in (Checkpoint.open, lambda folder: resolve(str(folder))):
        with pytest.raises(CheckpointError, match=words) as raised:
            read(model)
        assert "\n" not in raised.value.message


DEEP = "[" * 200_000


@pytest.mark.parametrize("text", ["", "[]", "null", '"text"', "{", DEEP, "\xff", "{'a': 1}"], ids=lambda text: text[:8])
def test_a_config_that_is_no_object(model, text):
    (model / "config.json").write_bytes(text.encode("latin-1"))
    refused(model, r"config\.json is damaged")


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", "{", DEEP, '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"w": 1}}', '{"weight_map": {"w": ["a"]}}',
     '{"weight_map": {"w": "../other/model.safetensors"}}', '{"weight_map": {"w": "/etc/passwd"}}', '{"weight_map": {"w": ".."}}'],
    ids=lambda text: text[:40],
)  # fmt: skip
def test_an_index_that_names_no_files(model, text):
    (model / INDEX).write_text(text)
    refused(model, f"{INDEX} is")


@pytest.mark.parametrize(
    "header",
    [[], {"w": 1}, {"w": {}}, {"w": {"dtype": "F32", "shape": [1]}}, {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4]}},
     {"w": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, {"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
     {"w": {"dtype": "F32", "shape": [1], "data_offsets": [-8, 4]}}, {"w": {"dtype": "F32", "shape": [1], "data_offsets": ["a", 4]}},
     {"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}, {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}],
    ids=str,
)  # fmt: skip
def test_a_shard_whose_header_is_odd(model, header):
    shard = Checkpoint.open(model).files[1]
    text = json.dumps(header).encode()
    shard.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))
    refused(model, f"{shard.name} is truncated or damaged")


def test_missing_truncated_and_stray_shards(model):
    first, second, *_ = Checkpoint.open(model).files
    (model / "consolidated.safetensors").write_bytes(b"stray")
    assert len(Checkpoint.open(model).files) == tiny_models.SHARDS, "a stray shard is no part of the model"
    for length in (0, 5, 100, second.stat().st_size - 1):
        data = second.read_bytes()
        second.write_bytes(data[:length])
        refused(model, f"{second.name} is truncated or damaged")
        second.write_bytes(data)
    first.unlink()
    refused(model, f"lacks 1 of {tiny_models.SHARDS} weight files .*{first.name}")


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_header_whatever_gives_anything_but_a_reason(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    values = st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda inner: st.lists(inner, max_size=3))
    entry = st.dictionaries(st.sampled_from(["dtype", "shape", "data_offsets"]), values) | values
    header = json.dumps(data.draw(st.dictionaries(st.text(max_size=3), entry, max_size=3))).encode()
    body = data.draw(st.binary(max_size=40))
    path.write_bytes(data.draw(st.sampled_from([len(header).to_bytes(8, "little") + header + body, body])))
    try:
        read_header(path)
    except ValueError as error:
        assert str(error)

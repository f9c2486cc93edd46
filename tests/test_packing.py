"""Packing: nothing is lost, nothing crosses a border, and packed logits are those of the documents alone."""

import json
from functools import partial
from itertools import islice

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from remoe_cli.errors import DataError, FamilyError
from remoe_cli.objectives.remoe import Segments
from remoe_cli.train.packing import (
    Batch,
    batches,
    collate,
    Document,
    model_inputs,
    pack,
    Position,
    require_packable,
)

documents_of_ids = st.lists(st.lists(st.integers(3, 127), max_size=15), max_size=12)


def packed_rows(documents: list[list[int]], tokens: int) -> list[list[list[int]]]:
    placed = [(Position(document=i), Document(ids)) for i, ids in enumerate(documents)]
    return [[document.ids for document in row] for row, _ in pack(placed, tokens)]


@settings(max_examples=100, deadline=None)
@given(documents=documents_of_ids, tokens=st.integers(1, 10))
def test_rows_are_full_and_keep_every_token_in_order(documents, tokens):
    rows = packed_rows(documents, tokens)
    lengths = [sum(map(len, row)) for row in rows]
    assert all(n == tokens for n in lengths[:-1]) and all(0 < n <= tokens for n in lengths)
    flat = [token for row in rows for document in row for token in document]
    assert flat == [token for document in documents for token in document]
    assert all(document for row in rows for document in row)


@settings(max_examples=60, deadline=None)
@given(documents=documents_of_ids, tokens=st.integers(1, 10))
def test_a_border_lies_at_every_documents_end_and_every_rows_end_only(documents, tokens):
    ends, total = set(), 0
    for document in documents:
        total += len(document)
        ends.add(total)
    ends |= set(range(0, total + 1, tokens))
    found, total = {0}, 0
    for row in packed_rows(documents, tokens):
        for document in row:
            total += len(document)
            found.add(total)
    assert found | {0} == {end for end in ends if end <= total} | {0, total}


def test_a_long_document_is_cut_and_the_last_row_padded():
    rows = packed_rows([[1, 2], [3, 4, 5, 6, 7], []], 4)
    assert rows == [[[1, 2], [3, 4]], [[5, 6, 7]]]
    batch = collate(rows, 4)
    assert batch.ids_BT.tolist() == [[1, 2, 3, 4], [5, 6, 7, 0]]
    assert batch.document_BT.tolist() == [[0, 0, 1, 1], [0, 0, 0, -1]]
    segments = Segments.of(batch.document_BT)
    assert segments.document_N.tolist() == [0, 0, 1, 1, 2, 2, 2, -1]
    assert segments.position_N.tolist() == [0, 1, 0, 1, 0, 1, 2, 0]


def test_unpacked_rows_hold_one_document_each():
    (batch,) = batches([[1, 2, 3], [], [4]], 2, 8, packed=False)
    assert batch.ids_BT.tolist() == [[1, 2], [3, 0], [4, 0]]
    assert batch.document_BT.tolist() == [[0, 0], [0, -1], [0, -1]]


def test_batches_have_fewer_rows_at_the_end_and_repeat_when_told():
    documents = [[1, 2, 3], [4, 5]]
    shapes = [tuple(batch.ids_BT.shape) for batch in batches(documents, 2, 2)]
    assert shapes == [(2, 2), (1, 2)]
    endless = list(islice(batches(documents, 2, 2, repeat=True), 4))
    assert torch.cat([b.ids_BT for b in endless]).flatten().tolist() == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1]
    numbers = endless[1].document_BT.tolist()[0]
    assert numbers[0] != numbers[1]  # 5, then 1 of the next round: two documents


class Skipping:
    """Texts of which some are left out, as a tokeniser leaves out rows; each keeps its place."""

    def __init__(self, documents: list[Document], left_out: set[int]) -> None:
        self.documents, self.left_out = documents, left_out

    def numbered(self, start: int = 0):
        return ((i, self.documents[i]) for i in range(start, len(self.documents)) if i not in self.left_out)


@settings(max_examples=80, deadline=None)
@given(
    documents=documents_of_ids.filter(lambda found: any(found)),
    masked=st.booleans(),
    tokens=st.integers(1, 10),
    rows=st.integers(1, 3),
    packed=st.booleans(),
    repeat=st.booleans(),
    data=st.data(),
)
def test_batches_go_on_from_any_batch_as_if_never_stopped(documents, masked, tokens, rows, packed, repeat, data):
    texts = [Document(ids, [id % 2 == 0 for id in ids] if masked else None) for ids in documents]
    full = [i for i, ids in enumerate(documents) if ids]
    left_out = data.draw(st.sets(st.sampled_from(full), max_size=len(full) - 1)) if len(full) > 1 else set()
    for source in (Skipping(texts, left_out), texts):
        make = partial(batches, source, tokens, rows, packed=packed, repeat=repeat)
        whole = list(islice(make(), 12))  # several rounds, where they repeat
        for k, batch in enumerate(whole):
            place = Position(*json.loads(json.dumps(batch.next)))
            rest = list(islice(make(start=place), 11 - k))
            assert len(rest) == len(whole) - k - 1
            for got, expected in zip(rest, whole[k + 1 :], strict=True):
                assert all(torch.equal(a, b) for a, b in zip(got[:3], expected[:3], strict=True))
                assert got.next == expected.next


def test_a_place_counts_rounds_documents_and_tokens():
    places = [batch.next for batch in islice(batches([[1, 2, 3], [4, 5]], 2, 1, repeat=True), 5)]
    assert places == [(0, 0, 2), (0, 1, 1), (1, 0, 1), (1, 1, 0), (1, 2, 0)]


def test_masks_are_cut_and_padded_like_their_ids():
    texts = [Document([1, 2, 3], [False, True, True]), [4, 5]]
    (batch,) = batches(texts, 4, 2)
    assert batch.ids_BT.tolist() == [[1, 2, 3, 4], [5, 0, 0, 0]]
    assert batch.learned_BT.tolist() == [[False, True, True, True], [True, False, False, False]]
    assert collate([texts], 6, left=True).learned_BT.tolist() == [[False, False, True, True, True, True]]


@pytest.mark.parametrize("repeat", [False, True])
@pytest.mark.parametrize("documents", [[], [[], []]])
def test_no_token_at_all_is_a_data_error(documents, repeat):
    with pytest.raises(DataError):
        list(batches(documents, 4, 1, repeat=repeat))


# --- against the models -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    model_type, attention = request.param
    folder = tiny_models.make(model_type, tmp_path_factory.mktemp(model_type), max_position_embeddings=4096)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention).eval()


def documents_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def logits_of(model, batch: Batch) -> torch.Tensor:
    return model(**model_inputs(model, batch, Segments.of(batch.document_BT))).logits.flatten(0, 1)


def assert_packed_equals_alone(model, batch: Batch) -> None:
    packed, segments = logits_of(model, batch), Segments.of(batch.document_BT)
    assert torch.isfinite(packed).all()  # padding too
    with torch.no_grad():
        for number in range(len(segments.length_S)):
            at = segments.document_N == number
            alone = model(batch.ids_BT.flatten()[at][None], use_cache=False).logits[0]
            torch.testing.assert_close(packed[at], alone, atol=1e-4, rtol=1e-4)


FAMILIES = [(name, "sdpa") for name in tiny_models.MODEL_TYPES if name != "gpt_oss"]
FAMILIES += [(name, "eager") for name in ("deepseek_v2", "gpt_oss")]


@pytest.mark.parametrize("model", FAMILIES, indirect=True, ids="-".join)
def test_packed_logits_equal_the_logits_of_the_documents_alone(model):
    # several rows, one-token documents at a row's start and end, a cut, padding; longer than gpt_oss's window of 8
    (batch,) = batches(documents_of(1, 13, 7, 30, 1, 1, 5, 20), 32, 4)
    assert batch.ids_BT.shape == (3, 32) and (batch.document_BT == -1).any()
    assert_packed_equals_alone(model, batch)


@pytest.mark.parametrize("model", [("deepseek_v2", "sdpa"), ("gpt_oss", "eager")], indirect=True, ids="-".join)
def test_left_padding_and_rows_of_one_document_change_no_logit(model):
    (right,) = batches(documents_of(9, 4), 12, 2, packed=False)
    assert_packed_equals_alone(model, right)
    left = collate([[ids] for ids in documents_of(9, 4)], 12, left=True)
    assert left.document_BT[:, 0].tolist() == [-1, -1] and left.document_BT[:, -1].tolist() == [0, 0]
    assert_packed_equals_alone(model, left)


@pytest.mark.parametrize("model", [("gpt_oss", "eager")], indirect=True, ids="-".join)
def test_a_row_without_borders_needs_no_mask_of_ours(model):
    (batch,) = batches(documents_of(24), 24, 1)
    torch.testing.assert_close(logits_of(model, batch), model(batch.ids_BT).logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("model", [("qwen3_moe", "sdpa")], indirect=True, ids="-".join)
def test_attention_and_layers_that_ignore_borders_are_refused(model, monkeypatch):
    require_packable(model)
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "linear_attention"], raising=False)
    with pytest.raises(FamilyError, match="linear_attention"):
        require_packable(model)
    monkeypatch.setattr(model.config, "layer_types", None)
    monkeypatch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
    with pytest.raises(FamilyError, match="flash_attention_2"):
        require_packable(model)

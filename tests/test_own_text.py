"""--data self: texts that the base writes itself, from the whole distribution, the same for the same seed."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from commands import QUICK, refused
from training import documents_of, load

from remoe_cli.errors import DataError
from remoe_cli.recipe import Data
from remoe_cli.run import Run
from remoe_cli.train.own_text import own_documents
from remoe_cli.train.packing import Document

DATA = Data(own_samples=70, own_prompt_tokens=5, own_tokens=40)
TOKENIZER = SimpleNamespace(eos_token_id=2)
TEXTS = [Document(ids) for ids in documents_of(400, 3, 5, 1000)]


def written(path, model=None, data=DATA, seed=0):
    return own_documents(model or load("qwen3_moe").eval(), TOKENIZER, TEXTS, data, seed, path)


def test_prompts_are_stretches_of_the_texts_and_a_text_ends_at_its_end_token(tmp_path):
    found = written(tmp_path / "own.jsonl")
    prompts = [tuple(document.ids[:5]) for document in found]
    starts = [(0, 0), (2, 0), (3, 0), *((d, 45 * i) for i in range(1, 23) for d in (0, 3))]
    wanted = [tuple(TEXTS[d].ids[at : at + 5]) for d, at in starts if len(TEXTS[d].ids) >= at + 5]
    assert prompts == wanted  # fewer than asked for: the texts hold no more
    for document in found:
        new = document.ids[5:]
        assert 1 <= len(new) <= 40 and 2 not in new[:-1]
        assert len(new) == 40 or new[-1] == 2
        assert document.learned is None
    assert len({tuple(document.ids[5:]) for document in found}) == len(found)


def test_the_same_seed_writes_the_same_and_a_written_file_is_read_again(tmp_path):
    first, again = written(tmp_path / "a"), written(tmp_path / "b")
    assert first == again
    assert written(tmp_path / "c", seed=1) != first
    assert own_documents(None, TOKENIZER, None, DATA, 9, tmp_path / "a") == first


def test_answers_are_what_the_base_wrote(tmp_path):
    for document in written(tmp_path / "a", data=replace(DATA, labels="answers")):
        assert document.learned == [False] * 5 + [True] * (len(document.ids) - 5)


def test_tokens_are_drawn_from_the_whole_distribution(tmp_path):
    """The mean surprise of a sampled token is the entropy it was drawn from: not greedy, nothing cut off, no other temperature."""
    model = load("qwen3_moe").eval()
    model.generation_config.update(
        do_sample=True, temperature=0.1, top_k=3, repetition_penalty=2.0
    )  # as a chat model's
    surprise, entropy = [], []
    for document in written(tmp_path / "a", model):
        with torch.no_grad():
            logp_TV = model(torch.tensor([document.ids])).logits[0, 4:-1].float().log_softmax(-1)
        surprise.append(-logp_TV.gather(1, torch.tensor(document.ids[5:])[:, None])[:, 0])
        entropy.append(-(logp_TV.exp() * logp_TV).sum(-1))
    difference = torch.cat(surprise) - torch.cat(entropy)
    assert len(difference) > 500
    assert abs(difference.mean()) < 4 * difference.std() / len(difference) ** 0.5
    assert torch.cat(surprise).mean() > 1


def test_texts_shorter_than_a_prompt_are_refused(tmp_path):
    with pytest.raises(DataError, match="5 tokens of a prompt"):
        own_documents(load("mixtral"), TOKENIZER, [Document([3, 4])], DATA, 0, tmp_path / "a")
    assert not list(tmp_path.iterdir())


def test_the_command(remoe, model, texts):
    own = ["--set", "data.own_samples=8", "--set", "data.own_prompt_tokens=4", "--set", "data.own_tokens=30"]
    asked = ["finetune", model, "--steps", 2, *QUICK, *own]
    ran = remoe(*asked, "--data", f"self:{texts}", "--out", "one")
    assert ran.code == 0 and "sample from the base" in ran.err, ran.err
    run = Run(texts.parent / "one")
    assert len(run.own_text.read_text().splitlines()) == 8
    assert run.recipe.data.source == f"self:{texts}" and run.facts["data"] == str(texts)
    assert "texts.jsonl" in ran.err
    ran = remoe(*asked, "--set", f"data.source={texts}", "--data", "self", "--out", "two")
    assert ran.code == 0, ran.err
    assert Run(texts.parent / "two").recipe.data.source == f"self:{texts}"
    assert json.loads((texts.parent / "two/own_text.jsonl").read_text().splitlines()[0])["prompt"] == 4
    again = remoe(*asked, "--recipe", Run(texts.parent / "two").recipe_file, "--data", "self", "--out", "three")
    assert again.code == 0 and Run(texts.parent / "three").recipe.data.source == f"self:{texts}", again.err
    refused(remoe(*asked, "--data", "self:nowhere.jsonl"), "nowhere.jsonl")
    refused(remoe(*asked, "--data", "selfies.jsonl"), "selfies.jsonl")
    assert remoe("eval", "one", "--cache", "2").code == 0


def test_stretches_of_the_texts_are_mixed_in(tmp_path):
    own = written(tmp_path / "a")
    mixed = written(tmp_path / "a", data=replace(DATA, own_beside=6))
    beside = [(0, 0), (1, 0), (2, 0), (3, 0), (0, 45), (3, 45)]
    added = [Document(TEXTS[d].ids[at : at + 45]) for d, at in beside]
    key = str
    assert sorted(mixed, key=key) == sorted([*own, *added], key=key) and mixed != [*own, *added]
    assert mixed == written(tmp_path / "a", data=replace(DATA, own_beside=6))
    assert mixed != written(tmp_path / "a", data=replace(DATA, own_beside=6), seed=1)

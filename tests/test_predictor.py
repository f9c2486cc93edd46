"""remoe predictor train: it foretells what can be foretold, its file is read as it was written, and mistakes have one line."""

import json

import numpy as np
import pytest
from policy_traces import as_trace
from typer.testing import CliRunner

from remoe_cli.cache import replay
from remoe_cli.cache.prefetch.predictor import Predictor
from remoe_cli.cli import app
from remoe_cli.errors import CacheError, RunError, UsageError
from remoe_cli.predictor import Asked, train
from remoe_cli.replay import Asked as Replayed
from remoe_cli.replay import replay as replay_command
from remoe_cli.routing import RoutingTrace, write

pytestmark = pytest.mark.usefixtures("one_thread")


def foretellable(n_tokens=400, revision="r1") -> RoutingTrace:
    """Top-1 of 4 in 2 layers: the hidden state of a layer is a sign for what the next one chooses, in layer 0 at the next token."""
    rng = np.random.default_rng(0)
    experts = rng.integers(0, 4, size=(n_tokens, 2, 1))
    following = np.stack([experts[:, 1, 0], np.roll(experts[:, 0, 0], -1)], 1)
    hidden = np.eye(4)[following] + rng.normal(size=(n_tokens, 2, 4)) * 0.05
    borders = np.arange(0, n_tokens + 1, 20)
    trace = as_trace(experts, 4, borders, hidden=hidden.astype(np.float16))
    trace.provenance.update({"model": "m", "revision": revision, "kind": "forced"})
    return trace


def test_it_learns_and_saves_the_misses(tmp_path):
    trace, out = foretellable(), tmp_path / "p.npz"
    write(trace, tmp_path / "t.trace")
    done = train(tmp_path / "t.trace", out, Asked(width=16, epochs=60))
    assert done["recall_mean"] > 0.97 > 0.5 > done["recall_of_token_before"]
    assert done["parameters"] == 2 * (4 * 16 + 16 + 16 * 4 + 4)
    predictor = Predictor.read(out)
    found = replay(trace, "lru+promoe:1", 1, predictor=predictor)
    assert found.hit_ratio > 0.9 and found.loads <= 1.05 * replay(trace, "lru", 1).loads
    again = train(tmp_path / "t.trace", tmp_path / "q.npz", Asked(width=16, epochs=60))
    assert again["recall"] == done["recall"]
    shown = replay_command(
        tmp_path / "t.trace", Replayed(capacities=[1], policies=["lru+promoe:1"], admission="forced", predictor=out)
    )
    assert shown["cells"][0]["prefetch_bytes"] == done["bytes"] == predictor.held_bytes


def test_the_command(tmp_path):
    write(foretellable(), tmp_path / "t.trace")
    words = ["predictor", "train", str(tmp_path / "t.trace"), "-o", str(tmp_path / "p.npz"), "--epochs", "1"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0 and "Recall of the K experts on" in done.stdout
    words = ["predictor", "train", str(tmp_path / "t.trace"), "-o", str(tmp_path / "q.npz"), "--epochs", "1", "--json"]
    assert json.loads(CliRunner().invoke(app, words).stdout)["width"] == 16


def test_what_is_refused(tmp_path):
    plain, path = tmp_path / "plain.trace", tmp_path / "t.trace"
    write(as_trace(np.zeros((30, 2, 1), int), 4), plain)
    write(foretellable(), path)
    write(foretellable(10 * 20).decode(), tmp_path / "other.trace")
    short = as_trace(np.zeros((5, 2, 1), int), 4, hidden=np.zeros((5, 2, 3), np.float16))
    write(short, tmp_path / "short.trace")
    for trace, asked, message in (
        (plain, Asked(), "has no hidden states to train on"),
        (path, Asked(ahead=4), "--ahead is 1 to 3, not 4"),
        (path, Asked(ahead=3), "--ahead 3: the trace has 2 MoE layers"),
        (path, Asked(epochs=0), "--epochs is 1 to 10000, not 0"),
        (path, Asked(width=0), "--width is 1 to 65536, not 0"),
        (path, Asked(seed=-1), "--seed is 0 to"),
        (tmp_path / "short.trace", Asked(), "20 are the fewest"),
    ):
        with pytest.raises(UsageError) as caught:
            train(trace, tmp_path / "p.npz", asked)
        assert message in caught.value.message and not (tmp_path / "p.npz").exists()
    with pytest.raises(RunError, match="exists; nothing was written"):
        train(path, plain, Asked())


def test_a_file_that_is_no_predictor(tmp_path):
    with pytest.raises(CacheError, match="there is no predictor"):
        Predictor.read(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(CacheError, match="is no predictor of remoe, or damaged"):
        Predictor.read(tmp_path / "text.npz")
    facts = {
        "format": 1,
        "model": None,
        "revision": None,
        "ahead": 1,
        "n_layers": 1,
        "n_experts": 2,
        "hidden": 3,
        "width": 4,
    }
    weights = {
        "into": np.zeros((1, 3, 4)),
        "into_bias": np.zeros((1, 4)),
        "out": np.zeros((1, 4, 2)),
        "out_bias": np.zeros((1, 2)),
    }
    Predictor({**facts, "format": 2}, weights).write(tmp_path / "later.npz")
    with pytest.raises(CacheError, match="another version"):
        Predictor.read(tmp_path / "later.npz")
    Predictor({**facts, "width": 5}, weights).write(tmp_path / "bent.npz")
    with pytest.raises(CacheError, match="have not the shapes"):
        Predictor.read(tmp_path / "bent.npz")
    Predictor(facts, weights).write(tmp_path / "good.npz")
    trace = foretellable()
    for predictor, message in (
        (None, "promoe needs a trained predictor"),
        (Predictor.read(tmp_path / "good.npz"), "was trained for 1 layers of 2 experts and 3 hidden"),
        (Predictor({**facts, "model": "m", "revision": "r2"}, weights), r"was trained on m \(r2\), not on m \(r1\)"),
    ):
        with pytest.raises(CacheError, match=message):
            replay(trace, "lru+promoe:1", 1, predictor=predictor)

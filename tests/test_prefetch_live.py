"""Prefetchers in the offloaded decoder: no token changes, each load is counted, and all of it as replay says."""

import numpy as np
import pytest
import torch
from decoding import DEVICES, NEW, PROMPT
from test_offload_heads import counted, OTHER, require_all_paid, simulated
from tiny_models import EXPERTS

from remoe_cli.cache.prefetch.predictor import Predictor
from remoe_cli.errors import CacheError, UsageError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, Settings
from remoe_cli.routing import RoutingTrace

pytestmark = pytest.mark.usefixtures("one_thread")

CELLS = [
    ("lru+st_moe:4", "forced", 3),
    ("lfu+st_moe:8:2", "bypass", 4),
    ("lru+step:4", "forced", 2),
    ("lfu+moe_infinity:3", "forced", 4),
    ("held+option:3:0", "bypass", 3),
    ("lru+option:2:0", "forced", 2),
    ("lru+gate_next:3", "forced", 4),
    ("lru+gate_next_shared:3", "forced", 3),
    ("lfu+finemoe:4:1", "bypass", 4),
    ("lru+promoe:4:2", "forced", 3),
]


def predictor_for(decoder: OffloadedDecoder, **changed: object) -> Predictor:
    """Drawn, not trained."""
    L, E, H, W = decoder.n_layers, EXPERTS, decoder.gates[0].weight.shape[-1], 4
    draw = np.random.default_rng(3)
    facts = {"format": 1, "model": decoder.checkpoint.id, "revision": decoder.checkpoint.commit, "ahead": 2}
    facts |= {"n_layers": L, "n_experts": E, "hidden": H, "width": W, **changed}
    shapes = {"into": (L, H, W), "into_bias": (L, W), "out": (L, W, E), "out_bias": (L, E)}
    return Predictor(facts, {name: draw.normal(size=shape) for name, shape in shapes.items()})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v2", "gpt_oss"])
@pytest.mark.parametrize("settings", [Settings(readers=1), Settings(ram=160_000, readers=3)], ids=["files", "RAM tier"])
def test_tokens_are_the_resident_ones_and_counts_those_of_replay(folders, family, settings, device):
    """Requests one after the other: what a prefetcher learned from the first serves the second."""
    checkpoint = Checkpoint.open(folders(family, torch.bfloat16))
    with OffloadedDecoder(checkpoint, EXPERTS, settings=settings, device=device) as decoder:
        resident = [decoder.decode(prompt, NEW, keep_logits=True) for prompt in (PROMPT, OTHER)]
        for policy, admission, capacity in CELLS:
            if "shared" in policy and any(gate.shared is None for gate in decoder.gates):
                with pytest.raises(UsageError, match="needs shared experts"):
                    decoder.configure(capacity, policy, admission=admission)
                continue
            predictor = predictor_for(decoder) if "promoe" in policy else None
            decoder.configure(capacity, policy, admission=admission, predictor=predictor)
            done = [decoder.decode(prompt, NEW, keep_logits=True) for prompt in (PROMPT, OTHER)]
            for own, stock in zip(done, resident):
                assert torch.equal(own.logits, stock.logits), policy
                assert np.array_equal(own.trace.experts, stock.trace.experts)
                require_all_paid(decoder, own)
            both = RoutingTrace.concat([one.trace for one in done])
            found = tuple(map(sum, zip(*map(counted, done))))
            assert found == simulated(both, policy, capacity, admission=admission, predictor=predictor), policy
            assert found[3] > 0


def test_one_cache_for_all_prompts_is_carry_in_replay(folders):
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 4, settings=Settings(warm="carry")) as decoder:
        for policy in ("lru", "lru+st_moe:4", "lfu+moe_infinity:4"):
            decoder.configure(4, policy)
            done = [decoder.decode(prompt, NEW) for prompt in (PROMPT, OTHER)]
            both = RoutingTrace.concat([one.trace for one in done])
            assert tuple(map(sum, zip(*map(counted, done)))) == simulated(both, policy, 4, warm="carry")


def test_what_is_refused(folders):
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 4) as decoder:
        for options in ({"batch": 2}, {"settings": Settings(warm="batch")}, {"settings": Settings(guess=1)}):
            with pytest.raises(UsageError, match="lists experts token by token"):
                decoder.configure(4, "lru+st_moe", **options)
        decoder.n_layers = 2
        with pytest.raises(UsageError, match="looks further ahead than the 2 MoE layers"):
            decoder.configure(4, "lru+st_moe:4:3")


def test_a_predictor_of_another_model_or_other_layers(folders):
    with OffloadedDecoder(Checkpoint.open(folders("qwen3_moe")), 4) as decoder:
        for changed, message in (
            ({"model": "other"}, "was trained on other"),
            ({"revision": "abc"}, "(abc), not on"),
            ({"n_layers": 9}, "was trained for 9 layers of 8 experts"),
            ({"hidden": 7}, "7 hidden, and the model has"),
            ({"ahead": 1}, "looks 1 layers ahead, and promoe was asked for 2"),
        ):
            with pytest.raises(CacheError) as caught:
                decoder.configure(4, "lru+promoe:4:2", predictor=predictor_for(decoder, **changed))
            assert message in caught.value.message
        with pytest.raises(CacheError, match="needs a trained predictor"):
            decoder.configure(4, "lru+promoe:4:2")

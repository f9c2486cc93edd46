"""Misses that are computed in the RAM tier: the same tokens, the same cache, exact counts."""

import json

import pytest
import torch
from commands import refused
from decoding import DEVICES, NEW, PROMPT
from test_offload_tiers import PROMPTS
from tiny_models import EXPERTS, TOP_K

from remoe_cli.errors import UsageError
from remoe_cli.hub.checkpoint import Checkpoint
from remoe_cli.offload import OffloadedDecoder, Settings
from remoe_cli.offload.in_place import Costs, InPlace
from remoe_cli.report.renderers.decode import _in_place

pytestmark = pytest.mark.usefixtures("one_thread")
ALWAYS, NEVER = Costs((0.0,), (1.0,), 1.0), Costs((9.0,), (1.0,), 1.0)
RAM = Settings(ram=1 << 30, in_place=True)  # all experts


class Shelf:
    """A RAM tier that holds these experts."""

    def __init__(self, experts):
        self.held, self.shelf = [], experts

    def lying(self, _layer, expert):
        if expert not in self.shelf:
            return None
        self.held.append(expert)
        return torch.zeros(1)

    def let_go(self, _layer, expert):
        self.held.remove(expert)


def taken(costs, missing, shelf):
    tiers = Shelf(shelf)
    found, in_ram = InPlace(tiers, costs).take(0, missing)
    assert sorted(found) == sorted(tiers.held), "what is not computed from is let go"
    return [*found], in_ram


def test_an_expert_stays_where_it_lies_if_that_is_quicker_by_hand():
    costs = Costs(host=(3.0,), device=(1.0,), copy=2.5)  # 3 < 2.5 + 1
    assert taken(costs, [(7, 1)], [7]) == ([7], 1)
    assert taken(costs._replace(copy=2.0), [(7, 1)], [7]) == ([], 1)  # 3 = 2 + 1: no reason to
    assert taken(costs, [(7, 1)], []) == ([], 0)  # on disk
    # the CPU has one (until 3), so the second is brought (by 3.5 < 6), and the third as well: at 6 either way
    assert taken(costs, [(7, 1), (8, 1), (9, 1)], [7, 8, 9]) == ([7], 3)
    # the link has two on their way from disk, so both wait less on the CPU: 3 < 6 + 1 - 1, 6 < 5 + 3.5
    assert taken(costs, [(1, 1), (2, 1), (8, 1), (9, 1)], [8, 9]) == ([8, 9], 2)


def test_rows_cost_what_the_next_power_of_two_does():
    costs = Costs(host=(1.0, 2.0, 4.0), device=(0.1, 0.2, 0.4), copy=2.0)
    assert [costs.there(rows) for rows in (1, 2, 3, 4, 9)] == [1, 2, 4, 4, 4]
    assert costs.brought(3) == pytest.approx(2.4)
    assert taken(costs, [(0, 1)], [0]) == ([0], 1) and taken(costs, [(0, 3)], [0]) == ([], 1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("policy", "admission"), [("lru", "forced"), ("lfu", "bypass")])
@pytest.mark.parametrize("family", ["deepseek_v2", "gpt_oss", "mixtral"])
def test_tokens_and_cache_are_those_of_the_resident_run(folders, family, policy, admission, device):
    checkpoint = Checkpoint.open(folders(family, torch.bfloat16))
    with OffloadedDecoder(checkpoint, EXPERTS, device=device, settings=Settings(ram=1 << 30)) as decoder:
        resident = decoder.decode(PROMPT, NEW, keep_logits=True)
        decoder.configure(TOP_K, policy, admission=admission)
        plain = decoder.decode(PROMPT, NEW, forced=resident.ids, keep_logits=True)
        assert plain.counts.in_place.in_ram == 0 < plain.counts.decode.ram
        for costs in (ALWAYS, NEVER, None):
            decoder.configure(TOP_K, policy, admission=admission, settings=RAM, costs=costs)
            done = decoder.decode(PROMPT, NEW, forced=resident.ids, keep_logits=True)
            counts, its = done.counts, done.counts.in_place
            if device == "cpu":
                assert torch.equal(done.logits, resident.logits)
            assert counts[:4] == plain.counts[:4]
            assert counts.decode.reads == counts.misses - its.spared == sum(map(len, done.loads))
            assert counts.decode.bytes == counts.decode.reads * decoder.expert_bytes
            assert its.spared <= its.computed <= its.in_ram <= counts.misses
            if costs is ALWAYS:
                # but for those whose slot someone who left is still on the way to
                assert 0 < its.in_ram / 2 < its.computed and its.brought_s == 2.0 * its.computed and its.seconds > 0
                assert (its.spared > 0) == (admission == "bypass")
            if costs is NEVER:
                assert its.computed == 0 < its.in_ram and its.brought_s == its.seconds == 0


def test_what_stays_comes_behind_and_is_a_hit_of_the_next_token(folders):
    """With all experts in RAM and a cache that never evicts, an expert is computed there once and then in its slot."""
    checkpoint = Checkpoint.open(folders("mixtral", torch.float32))
    with OffloadedDecoder(checkpoint, EXPERTS, settings=RAM) as decoder:
        decoder.configure(EXPERTS, settings=RAM, costs=ALWAYS)
        done = decoder.decode(PROMPT, NEW)
        assert done.counts.misses == done.counts.decode.reads and done.counts.evictions == 0
        assert len({load for step in done.loads for load in step}) == done.counts.misses


@pytest.mark.parametrize("warm", ["cold", "batch", "carry"])
def test_batches_and_warm_caches(folders, warm):
    checkpoint = Checkpoint.open(folders("deepseek_v2", torch.bfloat16))
    settings = Settings(ram=1 << 30, warm=warm)
    with OffloadedDecoder(checkpoint, TOP_K + 1, batch=3, settings=settings) as decoder:
        plain = [decoder.decode_batch(PROMPTS[:3], 10, keep_logits=True) for _ in range(2)]
        decoder.configure(TOP_K + 1, batch=3, settings=Settings(ram=1 << 30, warm=warm, in_place=True), costs=ALWAYS)
        done = [decoder.decode_batch(PROMPTS[:3], 10, keep_logits=True) for _ in range(2)]
        for one, other in zip(done, plain, strict=True):
            assert torch.equal(one.logits, other.logits) and one.counts[:4] == other.counts[:4]
            assert one.counts.decode.reads == one.counts.misses - one.counts.in_place.spared
        assert sum(one.counts.in_place.computed for one in done) > 0


@pytest.mark.parametrize("policy", ["lru+st_moe:3", "gate_ahead:3"])
def test_beside_loads_ahead_of_need(folders, policy):
    checkpoint = Checkpoint.open(folders("mixtral", torch.bfloat16))
    with OffloadedDecoder(checkpoint, TOP_K, policy, settings=Settings(ram=1 << 30)) as decoder:
        plain = decoder.decode(PROMPT, NEW, keep_logits=True)
        decoder.configure(TOP_K, policy, settings=RAM, costs=ALWAYS)
        done = decoder.decode(PROMPT, NEW, keep_logits=True)
        assert torch.equal(done.logits, plain.logits) and done.counts[:5] == plain.counts[:5]
        assert done.counts.decode.reads == done.counts.misses + done.counts.proactive - done.counts.in_place.spared


def test_a_guess_beside_it(folders):
    checkpoint = Checkpoint.open(folders("mixtral", torch.bfloat16))
    with OffloadedDecoder(checkpoint, TOP_K, settings=Settings(ram=1 << 30, guess=2)) as decoder:
        plain = decoder.decode(PROMPT, NEW, keep_logits=True)
        decoder.configure(TOP_K, settings=Settings(ram=1 << 30, guess=2, in_place=True), costs=ALWAYS)
        done = decoder.decode(PROMPT, NEW, keep_logits=True)
        assert torch.equal(done.logits, plain.logits) and done.counts[:4] == plain.counts[:4]


def test_the_measured_costs_are_of_this_machine_and_the_link(folders):
    checkpoint = Checkpoint.open(folders("mixtral", torch.bfloat16))
    with OffloadedDecoder(checkpoint, TOP_K, batch=5, settings=RAM) as decoder:
        costs = decoder._blocks[0].in_place.costs
        assert len(costs.host) == len(costs.device) == 4 and min(*costs.host, *costs.device, costs.copy) > 0
        decoder.configure(TOP_K, settings=Settings(ram=1 << 30, in_place=True, throttle=1e6))
        costs = decoder._blocks[0].in_place.costs
        assert costs.copy == decoder.expert_bytes / 1e6 and len(costs.host) == 1


def test_without_a_ram_tier_nothing_lies_anywhere():
    with pytest.raises(UsageError, match="there is none"):
        Settings(in_place=True)
    with pytest.raises(UsageError, match="two precisions"):
        Settings(ram=1, in_place=True, heavy=0.5)


def test_the_command_says_how_often_and_what_it_won(remoe):
    asked = ["decode", "demo", "--cache", "6", "--tokens", "6", "--ram", "1GB", "--in-place", "--throttle", "5MB/s"]
    asked += ["--policy", "lfu", "--admission", "bypass"]
    row = json.loads(remoe(*asked, "--json").out)["rows"][0]
    its = row["in_place"]
    assert 0 < its["spared"] <= its["computed"] <= its["in_ram"] <= row["misses"]
    assert row["reads"] == row["misses"] - its["spared"] and its["ms"] > 0 < its["won_ms"]
    text = remoe(*asked).out
    assert "in place: " in text and "lay in RAM" in text and "ms won" in text and "--in-place" in text
    assert json.loads(remoe(*asked[:8], "--json").out)["rows"][0]["in_place"] is None


def test_the_command_says_when_nothing_is_won():
    its = {"in_ram": 5, "computed": 0, "spared": 0, "ms": 0.0, "won_ms": 0.0}
    assert _in_place(its, 9) == "in place: none of 9 misses; 5 lay in RAM, and bringing these is quicker"
    lost = _in_place({**its, "computed": 2, "ms": 3.0, "won_ms": -1.0}, 9)
    assert (
        lost
        == "in place: 2 of 9 misses (5 lay in RAM), 0 of them never brought; 3.0 ms in all, 1.0 ms lost by measured costs"
    )


def test_it_needs_a_ram_tier(remoe):
    refused(remoe("decode", "demo", "--cache", "6", "--in-place"), "needs --ram", "--ram 8GB --in-place")
    asked = ["decode", "demo", "--cache", "6", "--ram", "8GB", "--in-place", "--heavy", "0.5"]
    refused(remoe(*asked), "--heavy")

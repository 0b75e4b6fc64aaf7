"""Conversations over tiers of KV: what is computed, what comes back, and how long turns take."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.simulator.cluster.latency import LinearLatency
from farsight.simulator.cluster.memory_below import MemoryBelow
from farsight.simulator.cluster.tiered import TieredReplica
from farsight.simulator.experiment import Experiment
from farsight.simulator.replay import ALL_KEPT, ONE_TIER, TIERS, ReplaySettings, of_conversations, ratios, replay
from farsight.simulator.run import run_source
from farsight.simulator.traffic.conversations import AFTER_TOOL, FIRST, Trace, TracedConversation, Turn

LATENCY = LinearLatency(StepCost(5e-3, 1e-3, 1e-4, 1e-6), kv_bytes=1000, copy_bandwidth=1e8)
BELOW = MemoryBelow(host_tokens=4_000, disk_tokens=100_000, disk_bandwidth=2e7, token_bytes=1000)
EXPERIMENT = Experiment(latency=LATENCY, kv_tokens=8_192, max_batch_tokens=128)


def conversations(num: int = 16, num_turns: int = 6, block: int = 16) -> Trace:
    """Chains that grow by 100 to 400 tokens a turn."""
    rng = np.random.default_rng(3)
    found = []
    for number in range(1, num + 1):
        lengths = np.cumsum(rng.integers(100, 400, num_turns)).tolist()
        turns = [Turn(n, int(rng.integers(5, 40)), ((1, n // block),), 5.0, AFTER_TOOL) for n in lengths]
        found.append(TracedConversation(f"c{number}", number, (replace(turns[0], gap_s=0.0, kind=FIRST), *turns[1:])))
    return Trace(tuple(found), block)


@pytest.mark.parametrize("preset", ["fcfs", "farsight"])
def test_what_comes_back_is_not_computed_again(preset: str) -> None:
    traffic = of_conversations(conversations())
    settings = ReplaySettings(EXPERIMENT.under(preset), BELOW, 0.2)
    found = {each.name: each for each in replay(settings, traffic)}
    one, tiers, kept = found[ONE_TIER], found[TIERS], found[ALL_KEPT]
    assert {each.turns for each in found.values()} == {traffic.num_turns, 96}
    assert {each.sessions for each in found.values()} == {16}
    assert one.computed_again > 0.3 * one.new_tokens, "the pool holds about four of sixteen conversations"
    assert kept.computed_again < 0.2 * kept.new_tokens
    assert tiers.computed_tokens < 1.1 * kept.computed_tokens
    assert tiers.hits["host"] > 0 and tiers.hits["disk"] > 0 and one.hits["host"] == one.hits["disk"] == 0
    for each in found.values():
        known = sum(each.hits.values()) + each.computed_tokens
        assert known >= each.prompt_tokens - each.turns, "the last token of a prompt may count as a decoding step"
        assert set(each.by_class) == {FIRST, AFTER_TOOL}
    assert tiers.turn_s.mean is not None and one.turn_s.mean is not None and tiers.turn_s.mean < one.turn_s.mean
    assert ratios(found)["turn_mean_to_one_tier"] == tiers.turn_s.mean / one.turn_s.mean


def test_a_run_leaves_memory_in_order_and_nothing_on_its_way() -> None:
    traffic = of_conversations(conversations())
    experiment = replace(EXPERIMENT, block_size=16)
    fleet = run_source(experiment, traffic.begin(0.2), traffic.max_new_tokens, below=BELOW)
    [replica] = fleet.replicas
    assert isinstance(replica, TieredReplica) and replica.tiers is not None
    replica.executor.check_integrity()
    replica.tiers.check_integrity()
    assert fleet.sessions is not None
    fleet.sessions.check_integrity()
    assert replica.executor.blocks.num_free == replica.executor.blocks.num_blocks
    assert not replica._returns and not replica.executor.num_held
    counts = replica.tiers.counts
    assert counts.host_brought and counts.disk_brought and counts.damaged == 0
    assert replica.written_bytes == counts.disk_saved * 16_000


def test_the_same_settings_give_the_same_run() -> None:
    settings = ReplaySettings(EXPERIMENT.under("farsight"), BELOW, 0.2)
    traffic = of_conversations(conversations(4))
    assert replay(settings, traffic, [TIERS]) == replay(settings, traffic, [TIERS])


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="disk_bandwidth"):
        MemoryBelow(disk_tokens=10)
    with pytest.raises(InvalidValueError, match="host_tokens"):
        MemoryBelow(host_tokens=-1)
    with pytest.raises(InvalidValueError, match="every"):
        ReplaySettings(EXPERIMENT, BELOW, -1.0)

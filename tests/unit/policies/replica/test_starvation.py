"""Under lasting overload by short requests a long one ends within its bound: a closed loop under virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.policies.settings import MlfqRules, PolicySettings
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest
from tests.unit.policies.closed_loops import CLIENTS, LONG, PLACES, one_replica, run_beside

COST = StepCost(base_s=0.010, prefill_token_s=0.1e-3, decode_seq_s=0.1e-3, context_token_s=0.0)
CONFIG = SchedulerConfig(quantum_s=0.02, starve_limit_s=0.5, watermark=1.0, max_gap_ms=0.0)
OUTPUT_LEN = 6
TURN_S = CLIENTS / PLACES * (CONFIG.quantum_s + COST.prefill_s(PLACES * 32))
"""Who is promoted waits for a quantum of everybody else, so many at once, each after its prefill."""


@pytest.mark.parametrize("preset", ["fastserve", "fastserve-defer", "fastserve-reactive", "fastserve-recompute"])
def test_a_long_request_ends_within_its_bound(preset: str) -> None:
    settings = PolicySettings(CONFIG, cost=COST, mlfq=MlfqRules(follows_cost=False))
    fleet = one_replica(preset, settings, standby_slots=8, clients=CLIENTS)
    long, overloaded_until = run_beside(fleet, 400, replace(LONG, output_len=OUTPUT_LEN))
    assert long.finished_at < overloaded_until, "the overload has to last"
    assert max(long.ttft_s, long.max_gap_s) <= CONFIG.starve_limit_s + TURN_S
    assert long.jct_s <= OUTPUT_LEN * (CONFIG.starve_limit_s + TURN_S)


SLOW = StepCost(base_s=0.040, prefill_token_s=0.4e-3, decode_seq_s=0.4e-3, context_token_s=0.0)
PATIENCE_S = 80.0


def one_among_short(preset: str, gamma: float) -> tuple[Record, float]:
    """60 clients, short requests and one of 700 output tokens that no forecast announces."""
    shape = ReplicaShape(4000, 16, num_host_blocks=4000, max_num_seqs=PLACES, look_every=1)
    settings = PolicySettings(SchedulerConfig(gamma=gamma, max_gap_ms=0.0), cost=SLOW)
    long, short = SimRequest("long", 0.0, 100, 700, 2048), SimRequest("short", 0.0, 20, 20, 2048)
    return run_beside(one_replica(preset, settings, shape, standby_slots=8, clients=60), 450, long, short, 60)


@pytest.mark.parametrize("preset", ["farsight", "farsight-mean"])
def test_no_preset_of_ours_starves_a_long_request(preset: str) -> None:
    record, overloaded_until = one_among_short(preset, SchedulerConfig().gamma)
    assert overloaded_until > record.arrival.arrived_at + PATIENCE_S, "the overload has to last"
    assert record.ttft_s < PATIENCE_S / 4
    assert record.max_gap_s < PATIENCE_S / 4


@pytest.mark.nightly
def test_farsight_mean_without_ageing_starves_it() -> None:
    """What the test above would miss without the default: no token while short requests come."""
    record, overloaded_until = one_among_short("farsight-mean", gamma=0.0)
    assert record.ttft_s > PATIENCE_S
    assert record.first_token_at > overloaded_until - 1.0

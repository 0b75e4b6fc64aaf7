"""Under lasting overload by short requests a long one ends within its bound: a closed loop under virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from core.config.scheduling import SchedulerConfig
from core.costs import StepCost
from policies.compose import build_router, build_scheduler, configured_settings
from policies.replica.scheduler import SchedulerLimits
from policies.settings import MlfqRules, PolicySettings
from simulator.cluster.fleet import Fleet, FleetShape
from simulator.cluster.latency import LinearLatency
from simulator.cluster.records import Record
from simulator.cluster.replica import ReplicaShape
from simulator.traffic.workload import SimRequest

COST = StepCost(base_s=0.010, prefill_token_s=0.1e-3, decode_seq_s=0.1e-3, context_token_s=0.0)
RULES = MlfqRules(quantum_s=0.02, starve_limit_s=0.5)
CLIENTS, PLACES, OUTPUT_LEN = 24, 4, 30
"""Six times as many requests as run at once, all the time."""

TURN_S = CLIENTS / PLACES * (RULES.quantum_s + COST.prefill_s(PLACES * 32))
"""Who is promoted waits for a quantum of everybody else, so many at once, each after its prefill."""

PRESETS = ("fastserve", "fastserve-defer", "fastserve-reactive", "fastserve-recompute")


def run(preset: str, starve_limit_s: float, num_short: int = 1500) -> tuple[Record, float]:
    """The long request, and when the last of the short ones ended."""
    replica = ReplicaShape(40, 16, num_host_blocks=40, max_num_seqs=PLACES, look_every=1)
    rules = MlfqRules(quantum_s=RULES.quantum_s, starve_limit_s=starve_limit_s)
    settings = PolicySettings(watermark=1.0, cost=COST, mlfq=rules)
    fleet = Fleet(
        FleetShape(replica, LinearLatency(COST)),
        build_router(preset),
        lambda _: build_scheduler(preset, SchedulerLimits(PLACES, 8), settings),
        clients=CLIENTS,
    )
    long = SimRequest("long", 0.0, 200, OUTPUT_LEN, 100)
    done = fleet.run([long, *(SimRequest(f"short{i}", 0.0, 32, 3, 100) for i in range(num_short))]).done
    assert len(done) == num_short + 1
    (record,) = (each for each in done if each.arrival.request_id == "long")
    return record, max(each.finished_at for each in done if each is not record)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_long_request_ends_within_its_bound(preset: str) -> None:
    long, overloaded_until = run(preset, RULES.starve_limit_s)
    assert long.finished_at < overloaded_until, "the overload has to last"
    assert max(long.ttft_s, long.max_gap_s) <= RULES.starve_limit_s + TURN_S
    assert long.jct_s <= OUTPUT_LEN * (RULES.starve_limit_s + TURN_S)


SLOW = StepCost(base_s=0.040, prefill_token_s=0.4e-3, decode_seq_s=0.4e-3, context_token_s=0.0)
PATIENCE_S = 120.0


def one_among_short(preset: str, settings: PolicySettings) -> tuple[Record, float]:
    """60 clients, short requests and one of 1,500 output tokens that no forecast announces; as ``run``."""
    fleet = Fleet(
        FleetShape(
            ReplicaShape(4000, 16, num_host_blocks=4000, max_num_seqs=PLACES, look_every=1), LinearLatency(SLOW)
        ),
        build_router(preset),
        lambda _: build_scheduler(preset, SchedulerLimits(PLACES, 8), replace(settings, cost=SLOW)),
        clients=60,
    )
    short = [SimRequest(f"short{i}", 0.0, 20, 20, 2048) for i in range(700)]
    done = fleet.run([*short[:60], SimRequest("long", 0.0, 100, 1500, 2048), *short[60:]]).done
    assert len(done) == 701
    (long,) = (each for each in done if each.arrival.request_id == "long")
    return long, max(each.finished_at for each in done if each is not long)


@pytest.mark.parametrize("preset", ["farsight", "farsight-mean"])
def test_no_preset_of_ours_starves_a_long_request(preset: str) -> None:
    assert configured_settings(SchedulerConfig()).gamma == PolicySettings().gamma, "live and simulated"
    long, overloaded_until = one_among_short(preset, PolicySettings())
    assert overloaded_until > long.arrival.arrived_at + PATIENCE_S, "the overload has to last"
    assert long.ttft_s < PATIENCE_S / 4
    assert long.max_gap_s < PATIENCE_S / 4

"""FastServe's figures: the worked example exactly, the order of systems on a small load."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from core.costs import StepCost
from policies.builders import PolicySettings, build_router, build_scheduler
from policies.replica_scheduler import SchedulerLimits
from policies.skip_join_mlfq import MlfqRules
from simulator.fleet import Fleet, FleetShape
from simulator.latency import LinearLatency
from simulator.replica import ReplicaShape
from simulator.reproduce.fast_serve import a100s, fig6_jct_s
from simulator.reproduce.fast_serve_systems import Load, serve
from simulator.reproduce.register import REPRODUCTIONS
from simulator.workload import Arrival


def test_figure_6_job_by_job() -> None:
    assert fig6_jct_s("fcfs") == {"J1": 6, "J2": 8, "J3": 11}
    assert fig6_jct_s("fastserve", skip_join=False) == {"J1": 9, "J2": 10, "J3": 11}
    assert fig6_jct_s("fastserve") == {"J1": 11, "J2": 4, "J3": 5}


def test_figure_6_rows_are_all_ok() -> None:
    rows = list(REPRODUCTIONS["fastserve_fig6"].rows())
    assert [row.ours for row in rows] == pytest.approx([25 / 3, 10, 20 / 3, 6])
    assert {row.verdict for row in rows} == {"ok"}


def test_preemption_helps_where_orca_has_to_queue() -> None:
    bed, load = a100s("gpt-3-175b", 16, 2, batch_size=16), Load(2.0, 4.0, 0.9, 2048, 2048, 150)
    ours, orca = serve(bed, load, "fastserve"), serve(bed, load, "fcfs", admission="conservative")
    assert len(ours.done) == len(orca.done) == 150
    assert sum(r.jct_s for r in ours.done) < 0.8 * sum(r.jct_s for r in orca.done)


def test_skip_join_mlfq_stands_a_burst_of_long_prompts() -> None:
    """Of 80 prompts that come at once 20 fit the device and 40 the host: nothing is dropped and computed again."""
    latency = LinearLatency(StepCost(base_s=0.010, prefill_token_s=0.11e-3, decode_seq_s=0.02e-3, context_token_s=0.0))
    burst = [Arrival(f"r{i}", 0.0, 2000, 10 + i % 40, 64) for i in range(80)]
    shape = FleetShape(ReplicaShape(2500, 16, 5000, max_num_seqs=64, max_batch_tokens=512, look_every=4), latency)
    means = {}
    for preset in ("fastserve", "fcfs"):
        settings = PolicySettings(mlfq=MlfqRules(starve_limit_s=math.inf), cost=latency.cost)
        make = partial(build_scheduler, preset, SchedulerLimits(64, 0), settings)
        recorder = Fleet(shape, build_router("fcfs"), lambda _, make=make: make()).run(burst)
        assert recorder.usage["0"].num_prompt_tokens <= 80 * 2000
        means[preset] = np.mean([record.jct_s for record in recorder.done])
    assert means["fastserve"] < 1.05 * means["fcfs"]

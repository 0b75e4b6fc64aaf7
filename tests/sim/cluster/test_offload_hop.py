"""A KV offload manager behind a hop: the same policy object decides, later or not at all."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.run import RunOutcome, run

NIGHTLY = [pytest.param(name, marks=pytest.mark.nightly) for name in ("fcfs", "fastserve")]
EACH_PRESET = pytest.mark.parametrize("preset", ["farsight-mean", *NIGHTLY])
SCARCE, AMPLE = 1, 20
"""Tokens of the host pool for each of the device's."""


@functools.cache
def outcome(preset: str, hop_s: float | None, host: int) -> RunOutcome:
    """By day outputs are short."""
    daily = preset == "farsight-mean"
    workload, num, rate, kv = ("gsm8k-like", 100, 40.0, 1500) if daily else ("sharegpt-like", 60, 20.0, 3000)
    experiment = Experiment(workload, num, rate, kv_tokens=kv, host_kv_tokens=host * kv, max_num_seqs=24)
    experiment = replace(experiment, scheduler=SchedulerConfig(preset=preset), offload_hop_s=hop_s)
    return run(experiment, make_arrivals(experiment))


def ends(found: RunOutcome) -> dict[str, tuple[float, int, int]]:
    return {
        each.arrival.request_id: (each.finished_at, each.num_evictions, each.num_swaps) for each in found.recorder.done
    }


@EACH_PRESET
def test_orders_that_take_no_time_are_the_schedulers_own_decisions(preset: str) -> None:
    """To the bit: a question says all that the policy reads, and no order is refused unless something has changed."""
    alone, asked = ends(outcome(preset, None, SCARCE)), ends(outcome(preset, 0.0, SCARCE))
    assert asked == alone
    assert any(evictions + swaps for _, evictions, swaps in alone.values()), "nothing had to move"


@pytest.mark.parametrize("hop_s", [0.002, 0.5], ids=["in time", "always late"])
@EACH_PRESET
def test_a_hop_costs_no_request_and_little_time(preset: str, hop_s: float) -> None:
    alone, asked = outcome(preset, None, AMPLE), outcome(preset, hop_s, AMPLE)
    assert ends(asked).keys() == ends(alone).keys()
    means = [np.mean([each.jct_s for each in found.recorder.done]) for found in (asked, alone)]
    assert means[0] < 1.1 * means[1]


@EACH_PRESET
def test_a_hop_does_not_make_jobs_drop_each_others_kv_without_end_where_the_host_is_short(preset: str) -> None:
    """``fastserve`` took 4.6 times as long while any number might start above a share of free host memory."""
    alone, asked = outcome(preset, None, SCARCE), outcome(preset, 0.002, SCARCE)
    means = [np.mean([each.jct_s for each in found.recorder.done]) for found in (asked, alone)]
    assert means[0] < 2 * means[1]

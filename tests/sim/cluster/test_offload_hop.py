"""A KV offload manager behind a hop: the same policy object decides, later or not at all."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.experiment import Experiment, make_arrivals
from simulator.run import RunOutcome, run

PRESETS = ("fcfs", "fastserve", "farsight", "past-future")


def outcome(preset: str, hop_s: float | None, kv_tokens: int = 6000) -> RunOutcome:
    experiment = Experiment(
        preset, num_requests=120, rate=20.0, kv_tokens=kv_tokens, host_kv_tokens=8000, offload_hop_s=hop_s
    )
    return run(experiment, make_arrivals(experiment))


def ends(found: RunOutcome) -> dict[str, tuple[float, int, int]]:
    return {
        each.arrival.request_id: (each.finished_at, each.num_evictions, each.num_swaps) for each in found.recorder.done
    }


@pytest.mark.parametrize("preset", PRESETS)
def test_orders_that_take_no_time_are_the_schedulers_own_decisions(preset: str) -> None:
    """Bit for bit: ENST and ranks survive the question, and an order is refused only if something has changed."""
    alone, asked = ends(outcome(preset, None)), ends(outcome(preset, 0.0))
    assert asked == alone
    assert any(evictions + swaps for _, evictions, swaps in alone.values()), "nothing had to move"


@pytest.mark.parametrize("hop_s", [0.002, 0.5], ids=["in time", "always late"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_hop_costs_no_request_and_little_time(preset: str, hop_s: float) -> None:
    alone, asked = outcome(preset, None), outcome(preset, hop_s)
    assert {each.arrival.request_id for each in asked.recorder.done} == set(ends(alone))
    late = np.mean([each.jct_s for each in asked.recorder.done]) / np.mean([each.jct_s for each in alone.recorder.done])
    assert late < 1.1

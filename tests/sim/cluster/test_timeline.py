"""Samples of a fleet over time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.simulator.cluster.records import SERIES, Timeline
from tests.sim.runs import arrivals, make_fleet


def test_states_by_hand() -> None:
    """One place; r0 runs from 0.1 to 4.1 over 4, 5, 6, 7 tokens of KV, r1 from 4.1 to 6.1 over 10 and 11."""
    timeline = Timeline(interval_s=0.5)
    fleet, _ = make_fleet(max_num_seqs=1, timeline=timeline)
    fleet.run(arrivals((0.1, 4, 4), (1.1, 10, 2)))
    assert timeline.times_s().tolist() == [i / 2 for i in range(13)]
    running, waiting = timeline.series("running")[:, 0], timeline.series("waiting")[:, 0]
    assert running.tolist() == [0] + [1] * 12
    assert waiting.tolist() == [0] * 3 + [1] * 6 + [0] * 4
    assert timeline.series("used_tokens")[:, 0].tolist() == [0, 4, 4, 5, 5, 6, 6, 7, 7, 10, 10, 11, 11]
    assert np.isnan(timeline.series("predicted_tokens")).all()
    timeline = Timeline(interval_s=0.5)
    fleet, _ = make_fleet(timeline=timeline, clients=2)
    fleet.replicas[0].scheduler.admission.predicted_peak = 77  # type: ignore[attr-defined]
    fleet.run(arrivals(*[(0.0, 4, 3)] * 6))
    assert timeline.series("running")[1:, 0].tolist() == [2.0] * (len(timeline.times_s()) - 1), "a closed loop"
    assert set(timeline.series("predicted_tokens").flatten()) == {77}


def test_steps_that_are_taken_at_once_are_seen_one_by_one() -> None:
    """A hundred steps are one event, and memory grows in between all the same."""
    timeline = Timeline(interval_s=1.0)
    fleet, _ = make_fleet(timeline=timeline)
    fleet.run(arrivals((0, 4, 100)))
    used = timeline.series("used_tokens")[:, 0]
    assert len(used) == 101 and (np.diff(used[2:]) == 1).all()


def test_steps_that_the_scheduler_has_heard_of_are_seen() -> None:
    """At 50.3 another one comes: the scheduler hears of 50 steps, the one under way ends at 51.1."""
    timeline = Timeline(interval_s=0.5)
    fleet, _ = make_fleet(timeline=timeline)
    fleet.run(arrivals((0.1, 4, 100), (50.3, 7, 1)))
    used = timeline.series("used_tokens")[:, 0]
    assert used[[99, 100, 101, 102, 103]].tolist() == [53, 53, 54, 54, 55 + 7]


def test_offloaded() -> None:
    timeline = Timeline(interval_s=0.5)
    fleet, _ = make_fleet(12, kv="swap-newest", timeline=timeline)
    recorder = fleet.run(arrivals((0, 4, 5), (0, 4, 5)))
    assert sum(record.num_swaps for record in recorder.done) == 1
    total = sum(timeline.series(name) for name in ("running", "waiting", "offloaded"))
    assert timeline.series("offloaded").max() == 1 and np.max(total) == 2


def test_looking_changes_nothing_and_the_interval_doubles_when_it_is_full() -> None:
    """The thinned out samples are those that a wider interval would have taken."""
    requests = [(i * 0.7, 5 + i % 7, 1 + i * 13 % 29) for i in range(60)]
    narrow, wide = Timeline(0.25, 16), Timeline(8.0, 1000)
    lives = []
    for timeline in (None, narrow, wide):
        fleet, _ = make_fleet(120, num_replicas=2, timeline=timeline, kv="swap-newest")
        done = fleet.run(arrivals(*requests)).done
        lives.append([(record.arrival.request_id, record.finished_at, record.max_gap_s) for record in done])
    assert lives[0] == lives[1] == lives[2]
    assert narrow.interval_s == 8.0 and narrow.num_samples <= 16
    for name in SERIES:
        np.testing.assert_array_equal(narrow.series(name), wide.series(name))


def test_a_long_silence_costs_few_samples() -> None:
    timeline = Timeline(interval_s=0.01, max_samples=8)
    make_fleet(timeline=timeline)[0].run(arrivals((0, 4, 1), (1e9, 4, 1)))
    assert timeline.num_samples <= 8 and timeline.times_s()[-1] > 4e8
    assert Timeline().series("running").shape == (0, 0) and Timeline().times_s().size == 0
    for interval_s, max_samples in ((0.0, 8), (math.inf, 8), (math.nan, 8), (1.0, 7), (1.0, 0)):
        with pytest.raises(InvalidValueError):
            Timeline(interval_s, max_samples)

"""What would have been, against runs under the other preset."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from core.errors import InvalidValueError
from simulator.counterfactual import MAX_WINDOW, Change, parse_change, what_if, window
from simulator.experiment import Experiment, make_arrivals
from simulator.run import run, run_until
from simulator.traffic.workload import Workload

EXPERIMENT = Experiment(preset="fcfs", num_requests=120, rate=12.0, kv_tokens=20_000, max_num_seqs=16, seed=4)


def completion_times(experiment: Experiment, arrivals: Workload) -> list[float]:
    times = {record.arrival.request_id: record.jct_s for record in run(experiment, arrivals).recorder.done}
    return [times[each.request_id] for each in arrivals]


def test_another_preset_is_answered_like_a_run_under_it() -> None:
    arrivals = make_arrivals(EXPERIMENT)
    as_served = completion_times(EXPERIMENT, arrivals)
    truth = completion_times(dataclasses.replace(EXPERIMENT, preset="past-future"), arrivals)
    errors = []
    for index in range(20, 120, 20):
        found = what_if(EXPERIMENT, arrivals, as_served, index, Change(preset="past-future"))
        errors.append(abs(found.jct_s / truth[index] - 1))
    assert np.median(errors) < 0.05


def test_more_replicas_and_a_higher_priority_end_a_request_sooner() -> None:
    arrivals = make_arrivals(EXPERIMENT)
    as_served = completion_times(EXPERIMENT, arrivals)
    slowest = int(np.argmax([took_s / each.output_len for took_s, each in zip(as_served, arrivals, strict=True)]))
    for change in (Change(replicas=3), Change(priority=-1)):
        assert what_if(EXPERIMENT, arrivals, as_served, slowest, change).jct_s < 0.9 * as_served[slowest]


def test_without_a_change_it_is_what_was() -> None:
    arrivals = make_arrivals(EXPERIMENT)
    as_served = completion_times(EXPERIMENT, arrivals)
    assert what_if(EXPERIMENT, arrivals, as_served, 60, Change()).jct_s == pytest.approx(as_served[60])


def test_the_window_is_bounded_and_holds_the_request() -> None:
    arrivals = make_arrivals(dataclasses.replace(EXPERIMENT, num_requests=3 * MAX_WINDOW))
    for index in (0, MAX_WINDOW, 3 * MAX_WINDOW - 1):
        chosen = window(arrivals, [1e6] * len(arrivals), index)
        assert len(chosen) <= MAX_WINDOW and arrivals[index] in chosen
    near = window(arrivals, [0.001] * len(arrivals), 1000)
    assert arrivals[1000] in near and len(near) < 10


def test_a_run_ends_with_the_request_that_is_asked_for() -> None:
    arrivals = make_arrivals(EXPERIMENT)
    first = run_until(EXPERIMENT, arrivals, arrivals[0].request_id)
    assert first.arrival is arrivals[0]
    with pytest.raises(InvalidValueError, match="request: got 'x'"):
        run_until(EXPERIMENT, arrivals, "x")


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("preset=fcfs", Change(preset="fcfs")),
        ("replicas=3", Change(replicas=3)),
        ("priority=-1", Change(priority=-1)),
        ("preset=fastserve, replicas=2", Change(preset="fastserve", replicas=2)),
    ],
)
def test_changes_are_read(text: str, change: Change) -> None:
    assert parse_change(text) == change


@pytest.mark.parametrize(
    "text",
    ["", "preset=", "preset=x", "replicas=0", "replicas=65", "replicas=1e3", "replicas=²", "priority=", "speed=2"],
)
def test_other_changes_are_refused_with_what_would_be_right(text: str) -> None:
    with pytest.raises(InvalidValueError, match=r"--if: got .*expected preset=NAME \("):
        parse_change(text)

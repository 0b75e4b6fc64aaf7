"""What would have been, against runs under the other preset."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import InvalidValueError
from farsight.simulator.counterfactual import Change, Life, most_requests, parse_change, what_if, window
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.run import run, run_until
from farsight.simulator.traffic.workload import Workload

EXPERIMENT = Experiment(
    scheduler=SchedulerConfig(preset="fcfs"), num_requests=120, rate=12.0, kv_tokens=20_000, max_num_seqs=16, seed=4
)


@functools.cache
def lived(experiment: Experiment = EXPERIMENT) -> tuple[Workload, list[Life]]:
    """Arrivals, and how they were served; run once for all tests."""
    arrivals = make_arrivals(experiment)
    done = run(experiment, arrivals).recorder.done
    found = {each.arrival.request_id: Life(each.ttft_s, each.jct_s) for each in done}
    return arrivals, [found[each.request_id] for each in arrivals]


def took(times_s: list[float]) -> list[Life]:
    """Lives of these durations; the first token comes half way."""
    return [Life(each / 2, each) for each in times_s]


def test_another_preset_is_answered_like_a_run_under_it() -> None:
    arrivals, as_served = lived()
    _, truth = lived(EXPERIMENT.under("past-future"))
    places = (20, 60, 100)
    found = [what_if(EXPERIMENT, arrivals, as_served, each, Change(preset="past-future")).jct_s for each in places]
    assert np.median([abs(jct_s / truth[each].jct_s - 1) for each, jct_s in zip(places, found, strict=True)]) < 0.05


def test_more_replicas_and_a_higher_priority_end_a_request_sooner() -> None:
    arrivals, as_served = lived()
    slowest = int(np.argmax([life.jct_s / each.output_len for life, each in zip(as_served, arrivals, strict=True)]))
    assert what_if(EXPERIMENT, arrivals, as_served, 60, Change()).jct_s == pytest.approx(as_served[60].jct_s)
    for change in (Change(replicas=3), Change(priority=-1)):
        assert what_if(EXPERIMENT, arrivals, as_served, slowest, change).jct_s < 0.9 * as_served[slowest].jct_s


def test_a_window_begins_at_the_last_idle_instant() -> None:
    arrivals = make_arrivals(EXPERIMENT)
    gaps = [after.arrived_at - each.arrived_at for each, after in itertools.pairwise(arrivals)] + [1.0]
    took_s = [2 * gap for gap in gaps]  # Each overlaps the next, but for two that end before.
    took_s[49] = took_s[79] = 0.0
    took_s[48], took_s[78] = gaps[48], gaps[78]
    chosen = window(arrivals, took(took_s), 60, 1000)
    assert chosen.requests[0] is arrivals[50] and chosen.is_whole and chosen.next_at == math.inf


def test_a_window_is_bounded_and_says_what_it_leaves_out() -> None:
    arrivals = make_arrivals(EXPERIMENT)
    for index in (0, 60, len(arrivals) - 1):
        chosen = window(arrivals, took([1e6] * len(arrivals)), index, 20)
        assert len(chosen.requests) <= 20 and arrivals[index] in chosen.requests
        assert chosen.is_whole == (index == 0)
        assert chosen.holds_until(1e6) is False
    alone = window(arrivals, took([0.0] * len(arrivals)), 60, 20)
    assert alone.requests[0] is arrivals[60] and alone.is_whole
    assert alone.next_at == arrivals[80].arrived_at
    assert alone.holds_until(arrivals[80].arrived_at) and not alone.holds_until(arrivals[81].arrived_at)
    fcfs, farsight = (SchedulerConfig(preset=name) for name in ("fcfs", "farsight"))  # it looks often: smaller windows
    assert most_requests(fcfs, fcfs) > most_requests(fcfs, farsight) > most_requests(farsight, farsight) > 0


def test_a_window_in_the_midst_begins_with_what_was_under_way() -> None:
    arrivals = make_arrivals(EXPERIMENT)
    chosen = window(arrivals, took([1.0] * len(arrivals)), 100, 60)
    now = chosen.requests[0].arrived_at
    carried = {each.request_id: each for each in chosen.requests if each.arrived_at == now}
    under_way = [each for each in arrivals if now - 1.0 < each.arrived_at <= now]
    assert list(carried) == [each.request_id for each in under_way] and len(carried) > 1
    assert len(chosen.requests) <= 60 and arrivals[100] in chosen.requests and not chosen.is_whole
    for each in under_way:
        has_begun = now - each.arrived_at >= 0.5
        assert has_begun == (carried[each.request_id].generated > 0)
        assert carried[each.request_id].generated < each.output_len


def test_runs_from_the_midst_go_as_the_whole_one() -> None:
    arrivals, as_served = lived()
    found = what_if(EXPERIMENT, arrivals, as_served, 115, Change(), most=100)
    assert found.num_requests == 100 and not found.is_whole
    assert found.as_simulated.jct_s == pytest.approx(as_served[115].jct_s, rel=0.1)


def test_a_whole_window_gives_the_answer_of_the_whole_run() -> None:
    calm = dataclasses.replace(EXPERIMENT, rate=0.5)
    arrivals, as_served = lived(calm)
    sizes = []
    for index in range(15, 120, 15):
        found = what_if(calm, arrivals, as_served, index, Change(priority=-1))
        urgent = [dataclasses.replace(each, priority=-(place == index)) for place, each in enumerate(arrivals)]
        whole = run_until(calm, urgent, arrivals[index].request_id)
        assert found.is_whole
        assert found.as_simulated.jct_s == pytest.approx(as_served[index].jct_s, rel=1e-9)
        assert found.changed.jct_s == pytest.approx(whole.jct_s, rel=1e-9)
        sizes.append(found.num_requests)
    assert max(sizes) > 1


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
    for wrong in ("", "preset=", "preset=x", "replicas=0", "replicas=65", "replicas=1e3", "replicas=²", "speed=2"):
        with pytest.raises(InvalidValueError, match=r"--if: got .*expected preset=NAME \("):
            parse_change(wrong)

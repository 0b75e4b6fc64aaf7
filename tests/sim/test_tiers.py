"""Tiers and deadlines in closed loops with random arrivals, under presets of every kind of order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pytest

from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.request import FLEX, Slo
from farsight.simulator.cluster.latency import StepRun
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import Replica
from farsight.simulator.experiment import Experiment
from farsight.simulator.run import run
from farsight.simulator.traffic.workload import SimRequest

PRESETS = ("fcfs", "past-future", "fastserve", "farsight")
EXPERIMENT = Experiment(kv_tokens=6_000, max_num_seqs=8, max_batch_tokens=512)


class Step(NamedTuple):
    began_at: float
    seconds: float
    flex: bool


def traffic(seed: int, num: int, rate: float) -> list[SimRequest]:
    rng = np.random.default_rng(seed)
    at = np.cumsum(rng.exponential(1 / rate, num))
    prompts, outputs = rng.integers(10, 900, num), np.minimum(400, 1 + rng.geometric(0.01, num))
    return [SimRequest(f"r{i}", float(at[i]), int(prompts[i]), int(outputs[i]), 500) for i in range(num)]


def as_flex(arrival: SimRequest) -> SimRequest:
    return dataclasses.replace(arrival, request_id=f"flex-{arrival.request_id}", priority=FLEX)


def told(arrival: SimRequest, **fields: float) -> SimRequest:
    """With a forecast that is right, and targets."""
    forecast = Forecast(arrival.output_len, (float(arrival.output_len),) * len(QUANTILES), 100, "test", 0)
    return dataclasses.replace(arrival, forecast=forecast, **fields)  # type: ignore[arg-type]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """Each step of a replica, when it ends."""
    found: list[Step] = []
    book = Replica._book

    def noted(replica: Replica, of: StepRun) -> bool:
        flex = any(item.request_id.startswith("flex") for item in of.batch.items)
        for number in range(of.num_steps):
            began_at = of.began_at + of.seconds(number)
            found.append(Step(began_at, of.began_at + of.seconds(number + 1) - began_at, flex))
        return book(replica, of)

    monkeypatch.setattr(Replica, "_book", noted)
    return found


def lives(preset: str, arrivals: Sequence[SimRequest]) -> dict[str, Record]:
    ordered = sorted(arrivals, key=lambda each: each.arrived_at)
    done = run(EXPERIMENT.under(preset), ordered).recorder.done
    return {record.arrival.request_id: record for record in done}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_at_most_one_step_with_flex_work_passes_before_a_first_token(
    preset: str, rate: float, steps: list[Step]
) -> None:
    """The step that is under way when a request comes; after that flex requests hold neither places nor memory."""
    firm = traffic(1, 40, rate)
    flex = [as_flex(each) for each in traffic(2, 40, 8.0)]
    done = lives(preset, [*firm, *flex])
    assert len(done) == 80, "flex requests get what is left, and end"
    assert sum(step.flex for step in steps) > 100
    for each in firm:
        record = done[each.request_id]
        met = [
            step
            for step in steps
            if step.flex and step.began_at + step.seconds > each.arrived_at and step.began_at < record.first_token_at
        ]
        assert len(met) <= 1, (each, met)
        assert all(step.began_at <= each.arrived_at + 1e-9 for step in met), (each, met, record)


def served_alone_s(arrival: SimRequest, step_s: float) -> float:
    """Beside as many others as there are places, prompts of newcomers included."""
    return 0.2 + arrival.output_len * step_s


@pytest.mark.parametrize("preset", PRESETS)
def test_a_deadline_that_can_be_met_is_met_and_no_sooner_than_needed(preset: str) -> None:
    """Overload: without deadlines most of these requests would end too late."""
    plain = traffic(3, 80, 16.0)
    by_s = {each.request_id: 1.5 + 1.5 * served_alone_s(each, 0.02) for each in plain[40::6]}
    with_targets = [told(each, deadline_s=by_s[each.request_id]) if each.request_id in by_s else each for each in plain]
    roomy = dataclasses.replace(EXPERIMENT.under(preset), kv_tokens=30_000)
    done = {record.arrival.request_id: record for record in run(roomy, with_targets).recorder.done}
    late = [name for name, most_s in by_s.items() if done[name].jct_s > most_s]
    assert not late, [(done[name].jct_s, by_s[name]) for name in late]
    if preset in ("fcfs", "past-future"):
        without = {record.arrival.request_id: record for record in run(roomy, plain).recorder.done}
        assert sum(without[name].jct_s > most_s for name, most_s in by_s.items()) > len(by_s) / 2
        slack = [by_s[name] - done[name].jct_s for name in by_s]
        assert np.median(slack) < 0.5 * np.median(list(by_s.values())), "service is just enough, not first"


@pytest.mark.parametrize("preset", PRESETS)
def test_a_time_to_the_first_token_that_can_be_met_is_met(preset: str) -> None:
    plain = traffic(4, 60, 12.0)
    names = {each.request_id for each in plain[::8]}
    with_targets = [
        dataclasses.replace(each, slo=Slo(ttft_s=1.0)) if each.request_id in names else each for each in plain
    ]
    roomy = dataclasses.replace(EXPERIMENT.under(preset), kv_tokens=30_000)
    records = run(roomy, with_targets).recorder.done
    assert max(record.ttft_s for record in records if record.arrival.request_id in names) <= 1.0

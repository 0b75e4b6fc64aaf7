"""What is drawn up of a scheduler for the operator's pages: states, the predicted memory, what has ended."""

from __future__ import annotations

import dataclasses

import pytest

from core.forecast import QUANTILES, Forecast
from core.messages.forecasts import ForecastMade
from core.messages.live import MemoryPoint
from core.messages.plans import FinishedSequence
from core.request import Origin, SequenceStatus
from policies.presets import PRESETS
from policies.replica.events import AccountClosed, ForecastsArrived, RequestEnded, RequestsAborted, WorkerLost
from policies.replica.live_view import MAX_ENDED, MAX_POINTS, SchedulerWatch
from tests.unit.policies.replica.scheduler_harness import Harness, request, running

CONTINUOUS = [name for name, preset in PRESETS.items() if preset.mode == "continuous"]


def view_of(h: Harness) -> SchedulerWatch:
    return SchedulerWatch("0", h.scheduler)


def forecast(mean: float) -> Forecast:
    return Forecast(mean, tuple(mean + level for level in QUANTILES), 5, "history", 3)


def end(number: int, output_len: int = 2) -> RequestEnded:
    finished = FinishedSequence(f"r-{number}", 0, SequenceStatus.FINISHED_STOPPED, output_len)
    return RequestEnded(finished, 1.0, 3.5, forecast(4.0))


@pytest.mark.parametrize("preset", CONTINUOUS)
def test_every_order_shows_its_requests(preset: str) -> None:
    h = Harness(max_num_seqs=2, preset=preset)
    h.arrive(request("a"), request("b"), request("c"))
    h.report(1, running("a", 2, 2), running("b", 0, 1))
    live = view_of(h).of(h.now, 10)
    assert (live.num_running, live.num_waiting, live.capacity_tokens) == (2, 1, 38)  # 2 tokens at the end of a block
    assert {row.request_id for row in live.requests} == {"a", "b", "c"}
    states = {row.request_id: row.state for row in live.requests}
    assert states["a"] in ("decode", "paused")
    assert states["c"] == "waiting" or preset != "fcfs"
    assert all(row.age_s > 0 and row.max_new_tokens == 4 for row in live.requests)


def test_a_limit_of_rows_and_none() -> None:
    h = Harness(max_num_seqs=2)
    h.arrive(*(request(f"r{number}") for number in range(9)))
    assert len(view_of(h).of(h.now, 4).requests) == 4
    sums = view_of(h).of(h.now, 0)
    assert (sums.requests, sums.num_running, sums.num_waiting) == ((), 2, 7)


def test_without_a_worker_there_is_no_pool() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.handle(WorkerLost())
    live = view_of(h).of(h.now, 10)
    assert (live.capacity_tokens, live.curve, live.requests, live.peak_tokens) == (0, (), (), 0)


def test_the_predicted_memory_is_past_futures_curve() -> None:
    """a holds 6 tokens and will be 8 long, b holds 4 and will be 2 long: b ends after 2 steps, a after 6."""
    h = Harness()
    h.arrive(request("a", out=20), request("b", out=20))
    h.report(1, running("a", 2, 2), running("b", 0, 1))
    h.handle(ForecastsArrived((ForecastMade("a", 0, forecast(8.0)), ForecastMade("b", 0, forecast(2.0)))))
    live = view_of(h).of(h.now, 0)
    assert live.curve == (MemoryPoint(0, 10), MemoryPoint(2, 14), MemoryPoint(6, 12))
    assert live.peak_tokens == 14


def test_without_a_forecast_the_mean_of_those_that_ended_counts() -> None:
    h = Harness()
    h.arrive(request("a", out=20))
    view = view_of(h)
    assert view.of(h.now, 0).curve[-1].steps == 20
    view.ended(end(0, output_len=5))
    assert view.of(h.now, 0).curve[-1].steps == 5
    h.report(1, running("a", 9, 4))  # longer than the mean: as much again, not one token
    assert view.of(h.now, 0).curve[-1].steps == 5
    h.handle(ForecastsArrived((ForecastMade("a", 0, forecast(8.4)),)))  # longer than its mean: to the next quantile
    assert view.of(h.now, 0).curve[-1].steps == 1


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    h = Harness(max_num_seqs=200, standby_slots=0)
    h.arrive(*(request(f"r{number}", prompt=1, out=number + 1) for number in range(39)))
    live = view_of(h).of(h.now, 0)
    assert len(live.curve) <= MAX_POINTS
    steps = [point.steps for point in live.curve]
    assert steps == sorted(set(steps))
    lengths = sorted((number + 1 for number in range(live.num_running)), reverse=True)
    assert live.peak_tokens == max((rank + 1) * (1 + ahead) for rank, ahead in enumerate(lengths))


def test_the_last_that_ended_are_kept() -> None:
    h = Harness()
    view = view_of(h)
    for number in range(3 * MAX_ENDED):
        view.ended(end(number))
        view.closed(AccountClosed(f"r-{number}", 0, Origin(f"cmpl-{number}", 1), b"", b"", 0))
    ended = view.of(h.now, 1).ended
    assert len(ended) == MAX_ENDED
    newest = ended[0]
    assert (newest.response_id, newest.choice, newest.reason) == (f"cmpl-{3 * MAX_ENDED - 1}", 1, "stop")
    assert (newest.output_len, newest.predicted_len, newest.took_s, newest.ago_s) == (2, 4.0, 2.5, h.now - 3.5)


def test_a_request_whose_client_left_is_among_those_that_ended() -> None:
    h = Harness(max_num_seqs=1)
    view = view_of(h)
    own = [dataclasses.replace(request(name), origin=Origin(f"cmpl-{name}", 0)) for name in "ab"]
    h.arrive(*own)
    h.handle(ForecastsArrived((ForecastMade("b", 0, forecast(8.0)),)))
    h.report(1, running("a", 2, 2))
    h.handle(RequestsAborted((("b", 0), ("a", 0))))
    for account in h.closed:
        view.closed(account)
    told = [(each.response_id, each.reason, each.output_len, each.predicted_len) for each in view.of(h.now, 1).ended]
    assert told == [("cmpl-a", "abort", 2, None), ("cmpl-b", "abort", 0, 4.0)]
    assert [each.took_s for each in view.of(h.now, 1).ended] == [3.0, 3.0]
    h.arrive(dataclasses.replace(own[0], attempt=1))
    h.arrive(dataclasses.replace(own[0], attempt=2))
    view.closed(h.closed[-1])
    assert len(h.closed) == 3 and len(view.of(h.now, 1).ended) == 2, "a later attempt goes on: no client has left"


def test_requests_that_cannot_be_explained_are_not_kept_for_ever() -> None:
    h = Harness()
    view = view_of(h)
    for number in range(3 * MAX_ENDED):
        view.ended(end(number))
    assert len(view._just_ended) == MAX_ENDED


def test_no_forecast_is_shown_above_the_limit_of_its_request() -> None:
    h = Harness()
    h.arrive(request("a", out=8))
    h.handle(ForecastsArrived((ForecastMade("a", 0, forecast(18.5)),)))
    (row,) = view_of(h).of(h.now, 10).requests
    assert (row.predicted_len, row.most_len) == (8.0, 8.0)
    assert h.scheduler._mirror.requests["a"].forecast == forecast(18.5), "policies know the whole law"


def test_the_progress_of_a_prompt_is_shown_and_counted_once() -> None:
    h = Harness()
    h.arrive(request("a", prompt=8), request("b", prompt=8))
    shown = []
    for seq, computed in enumerate((3, 6, 2, 8), 1):  # its KV is dropped in between
        h.report(seq, dataclasses.replace(running("a", 0, 2), computed_len=computed))
        live = view_of(h).of(h.now, 10)
        (row,) = (row for row in live.requests if row.request_id == "a")
        shown.append((row.prefilled_len, live.prompt_tokens))
    assert shown == [(3, 3), (6, 6), (6, 6), (8, 8)]
    assert h.scheduler.progress("a", h.now)["prefilled_tokens"] == 8
    assert h.scheduler.progress("b", h.now)["prefilled_tokens"] == 0

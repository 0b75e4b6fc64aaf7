"""The order for what clients see: readers, first tokens, guards, ends; and the places that a step's price asks for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from farsight.core.costs import StepCost, priced_rows
from farsight.core.forecast import Forecast
from farsight.policies.interfaces import Job
from farsight.policies.order.gittins import DecodePrice
from farsight.policies.order.readers import LEAST_ENDS as LEAST_PAIRS
from farsight.policies.order.readers import PairAccuracy, ReadersFirst
from farsight.policies.order.shadow import LEAST_ENDS, ShadowFcfs
from farsight.simulator.experiment import Experiment, make_arrivals
from farsight.simulator.run import run

PROCESSOR = StepCost(base_s=0.005, prefill_token_s=0.0024, decode_seq_s=0.0032, context_token_s=0.0)
GPU = StepCost(base_s=0.020, prefill_token_s=0.1e-3, decode_seq_s=0.15e-3, context_token_s=0.0)


def job(name: str, length: float, arrived_at: float = 0.0, **fields: object) -> Job:
    forecast = Forecast(mean=length, quantiles=(length,) * 6, num_samples=1, source="test", version=0)
    values = {"prompt_len": 100, "max_new_tokens": 256, "forecast": forecast} | fields
    return Job(request_id=name, arrived_at=arrived_at, **values)  # type: ignore[arg-type]


def order_of(*jobs: Job) -> ReadersFirst:
    order = ReadersFirst(DecodePrice(PROCESSOR, 128, 100_000), reading_rate=10.0)
    for each in jobs:
        order.add(each, each.arrived_at)
    return order


def names(order: ReadersFirst, now: float) -> list[str]:
    order.check_integrity()
    return [each.request_id for each in order.ranked(now)]


def report(order: ReadersFirst, each: Job, output_len: int, now: float) -> None:
    each.output_len, each.computed_len = output_len, each.prompt_len + output_len - 1
    order.changed(each)
    order.ran(each, 0.1, now)


def test_places_are_those_that_a_step_pays_for() -> None:
    assert priced_rows(PROCESSOR, 200.0, 128) == math.ceil(9 * 0.005 / 0.0032) == 15
    assert priced_rows(GPU, 200.0, 4096) == 1200
    assert priced_rows(GPU, 200.0, 256) == 256, "the engine's limit"
    assert priced_rows(StepCost(1e-6, 1e-3, 1e-3, 0.0), 200.0, 128) == 4, "the floor"


def test_a_stream_without_a_first_token_has_a_place_beyond_those_by_price() -> None:
    order = order_of(job("whole", 200.0))
    assert order.num_places(128, 0.0) == 128, "before a step has been measured"
    order.price(PROCESSOR, 100_000)
    assert order.num_places(128, 0.0) == 15
    order.add(stream := job("stream", 200.0, reading_rate=0.0), 0.0)
    assert order.num_places(128, 0.0) == 16
    assert order.num_places(12, 0.0) == 12, "the engine's limit"
    report(order, stream, 1, 1.0)
    names(order, 1.0)
    assert order.num_places(128, 1.0) == 15


@pytest.mark.parametrize(("num_wholes", "most"), [(20, 8), (60, 4)])
def test_streams_that_are_due_go_first_while_they_have_no_more_than_their_share(num_wholes: int, most: int) -> None:
    streams = [job(f"stream{number}", 200.0, reading_rate=0.0) for number in range(20)]
    wholes = [job(f"whole{number}", 200.0) for number in range(num_wholes)]
    order = order_of(*streams, *wholes)
    order.price(PROCESSOR, 100_000)
    for number, each in enumerate(streams):
        report(order, each, 1, 90.0 + number / 10)
    ranked = names(order, 100.0)
    assert ranked[:most] == [each.request_id for each in streams[:most]], "their part of 15 places"
    assert set(ranked[most:][: len(wholes)]) == {each.request_id for each in wholes}
    assert ranked[most + len(wholes) :] == [each.request_id for each in streams[most:]]


def test_a_stream_goes_first_until_its_reader_is_ahead_and_again_before_he_has_read_all() -> None:
    stream, whole = job("stream", 200.0, reading_rate=0.0), job("whole", 200.0)
    order = order_of(whole, stream)
    assert names(order, 0.0) == ["stream", "whole"], "its first token goes before an end"
    report(order, stream, 1, 1.0)
    assert names(order, 1.0) == ["stream", "whole"], "a reader who has read all but one"
    report(order, stream, 41, 2.0)
    assert names(order, 2.0) == ["whole", "stream"], "he reads for four seconds"
    assert names(order, 4.5) == ["whole", "stream"]
    assert names(order, 5.4) == ["stream", "whole"], "before he has read all"


def test_first_tokens_go_by_what_is_left_to_compute_and_no_one_is_passed_for_long() -> None:
    new = job("new", 200.0, prompt_len=20_000, reading_rate=0.0)
    turn = job("turn", 200.0, 1.0, prompt_len=60_000, cached_len=59_000, reading_rate=0.0)
    order = order_of(new, turn)
    order.price(PROCESSOR, 100_000)
    assert names(order, 1.0) == ["turn", "new"], "its work counts, not its length"
    turn.cached_len = 0
    order.changed(turn)
    assert names(order, 1.0) == ["new", "turn"], "its beginning has been evicted"
    late = job("late", 200.0, 3600.0, prompt_len=60_000, cached_len=59_990, reading_rate=0.0)
    order.add(late, late.arrived_at)
    assert names(order, 3600.0) == ["new", "turn", "late"]


def test_a_full_step_is_one_of_the_places_by_price() -> None:
    order = ReadersFirst(DecodePrice(PROCESSOR, 128, 100_000), tail=1e6)
    order.price(PROCESSOR, 100_000)
    order.add(long := job("long", 250.0), 0.0)
    names(order, 0.0)
    expected_s = 250 * PROCESSOR.step_s(0, 15, 0)
    assert float(order.explain(long, 0.0)["boost_s"]) == pytest.approx(expected_s, rel=0.05), "not of 128 rows"


def test_a_reader_who_waited_is_not_owed_what_he_missed() -> None:
    stream = job("stream", 200.0, reading_rate=20.0)
    order = order_of(stream)
    report(order, stream, 1, 1.0)
    report(order, stream, 11, 9.0)
    assert order.explain(stream, 9.0)["reader_ahead_s"] == pytest.approx(10 / 20.0 - 0.1)


def test_lengths_that_are_not_predicted_leave_the_order_of_arrival() -> None:
    accuracy = PairAccuracy()
    for number in range(LEAST_PAIRS):
        assert accuracy.share is None
        accuracy.observe(float(number % 7), float(-(number % 7)))
    assert accuracy.share == 0.0, "pairs of equal works do not count"
    order = order_of()
    for number in range(LEAST_PAIRS):
        ended = job(str(number), 200.0 if number % 2 else 10.0, output_len=10 if number % 2 else 200)
        order.learn(ended, censored=False)
    old, young = job("old", 250.0, 0.0), job("young", 1.0, 1.0)
    for each in (old, young):
        order.add(each, each.arrived_at)
    assert order.accuracy is not None and order.accuracy < 0.6
    assert names(order, 1.0) == ["old", "young"]


def test_the_shadow_shares_each_step_and_counts_who_ends_behind_its_guard() -> None:
    shadow = ShadowFcfs(StepCost(0.01, 0.1, 0.01, 0.0), places=2)
    for name in ("a", "b", "c", "gone"):
        shadow.arrived(name, 1, 1, 0.0)
    shadow.left("gone")
    shadow.ended("a", 10, 0.4, 0.4)  # two prompts of 0.1 s, ten steps of 0.03 s: 0.5 s
    shadow.ended("b", 20, 0.8, 0.8)  # and the prompt of c, which waited for a place, and ten steps: 0.9 s
    shadow.ended("c", 15, 1.2, 1.2)  # ten steps beside b, five of 0.02 s: 1.0 s
    shadow.arrived("d", 1, 1, 9.0)
    tally = shadow.tally
    assert (tally.num_ended, tally.num_violations) == (3, 0)
    assert (tally.earlier_s, tally.later_s) == pytest.approx((0.2, 0.2))
    shadow.left("d")
    for number in range(LEAST_ENDS + 8):
        shadow.arrived(str(number), 1, 1, 10.0 + number)
        shadow.ended(str(number), 10, 0.3, 10.3 + number)
    assert shadow.guard_s == pytest.approx(1.0, rel=0.1), "the slowest of them"
    shadow.arrived("late", 1, 1, 100.0)
    shadow.ended("late", 10, 5.0, 105.0)
    assert shadow.tally.num_violations == 1


def test_where_kv_is_short_what_has_kv_goes_before_what_has_none() -> None:
    """Else each newcomer pushes out the KV of one that stands still, which then pushes out another's."""
    order = order_of(job("read", 200.0, reading_rate=0.0), job("lost", 200.0, reading_rate=0.0), job("new", 10.0))
    order.add(job("stream", 200.0, reading_rate=0.0), 1.0)
    order.price(GPU, 100_000)
    jobs = {each.request_id: each for each in order.ranked(1.0)}
    report(order, jobs["read"], 200, 2.0)
    report(order, jobs["lost"], 20, 2.0)
    jobs["lost"].computed_len = 0
    order.changed(jobs["lost"])
    assert names(order, 2.5)[-1] == "read", "it is 20 s ahead of its reader"
    order.price(GPU, 600)
    assert names(order, 2.5) == ["read", "lost", "stream", "new"]


def test_few_kv_is_not_moved_to_and_fro() -> None:
    experiment = Experiment("sharegpt-like", 60, 12.0, kv_tokens=4000, host_kv_tokens=4000, max_num_seqs=32)
    arrivals = [replace(each, reading_rate=12.0 if i % 2 else None) for i, each in enumerate(make_arrivals(experiment))]
    found = {name: run(experiment.under(name), arrivals).summary for name in ("fcfs", "farsight")}
    assert found["farsight"].num_evictions + found["farsight"].num_swaps <= found["fcfs"].num_evictions

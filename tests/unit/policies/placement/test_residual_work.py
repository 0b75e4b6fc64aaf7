"""What is still to be done on each replica: the clock of tokens, forecasts that change, the wait for memory."""

from __future__ import annotations

import pytest

from core.costs import StepCost
from core.errors import IntegrityError
from policies.lengths.law import MIN_REMAINING
from policies.placement.residual_work import MORE_SEATS, RequestLengths, ResidualWork

COST = StepCost(base_s=0.01, prefill_token_s=1e-3, decode_seq_s=0.01, context_token_s=0.0)
"""A step of n sequences takes 10 ms and 10 ms for each."""

ANY = RequestLengths(prompt_len=10, had_len=0, most=1000)


def work_of(num_replicas: int = 1) -> ResidualWork:
    work = ResidualWork(COST)
    for _ in range(num_replicas):
        work.add_replica()
    return work


def running(work: ResidualWork, name: str, left: float, own_len: int = 10, slot: int = 0) -> None:
    work.add(name, slot, ANY, left, own_len, prefill_s=0.5)
    work.start(name, own_len)
    work.check_integrity()


def left_of(work: ResidualWork, slot: int = 0) -> list[float]:
    return sorted(value for value in work.remaining()[slot].tolist() if value)


def test_a_running_request_comes_nearer_to_its_end_step_by_step() -> None:
    work = work_of()
    running(work, "a", 100.0)
    work.advance(1.0)
    assert left_of(work) == [pytest.approx(50.0)], "20 ms a step"
    running(work, "b", 100.0)
    work.advance(1.3)
    assert left_of(work) == pytest.approx([40.0, 90.0]), "30 ms a step of two"
    work.remove("a")
    work.advance(1.5)
    assert left_of(work) == pytest.approx([80.0])


def test_who_has_not_started_produces_nothing_and_is_queued() -> None:
    work = work_of(2)
    work.add("a", 1, ANY, 100.0, 10, prefill_s=0.5)
    work.add("b", 1, ANY, 50.0, 10, prefill_s=0.25)
    work.advance(1.0)
    work.check_integrity()
    assert left_of(work, 1) == [50.0, 100.0] and left_of(work, 0) == []
    assert work.queued_s.tolist() == [0.0, 0.75] and work.num_requests.tolist() == [0, 2]
    work.start("a", 10)
    work.start("a", 10)  # said again
    work.check_integrity()
    assert work.queued_s.tolist() == [0.0, 0.25] and work.num_requests.tolist() == [0, 2]
    work.remove("b")
    work.check_integrity()
    assert work.queued_s.tolist() == [0.0, 0.0]


def test_who_outlives_the_forecast_goes_on_for_a_quarter_of_what_it_has() -> None:
    work = work_of()
    running(work, "a", 10.0)
    work.advance(0.4)
    assert left_of(work) == [MIN_REMAINING]
    work.advance(4.0)
    assert left_of(work) == [pytest.approx(50.0)]


def test_a_forecast_that_comes_later_counts_from_the_placement_on() -> None:
    work = work_of()
    work.add("a", 0, RequestLengths(prompt_len=10, had_len=20, most=300), 40.0, 10, 0.0)
    work.start("a", 10)
    work.advance(0.2)
    work.predict("a", 130.0)
    assert left_of(work) == [pytest.approx(100.0)], "130 tokens, of which it came with 20 and has got 10"
    work.predict("a", 4000.0)
    assert left_of(work) == [pytest.approx(290.0)], "it may have 300"
    work.predict("unknown", 5.0)


@pytest.mark.parametrize(("predicted", "left"), [(130.0, 110.0), (5.0, 1.0), (4000.0, 300.0)])
def test_a_resumed_request_has_the_rest_before_it(predicted: float, left: float) -> None:
    assert RequestLengths(prompt_len=50, had_len=20, most=300).left_of(predicted) == left


def test_requests_meet_for_as_long_as_the_shorter_lasts() -> None:
    work = work_of(2)
    running(work, "a", 30.0, slot=1)
    running(work, "b", 200.0, slot=1)
    steps, contexts = work.meetings(50.0)
    assert steps.tolist() == [0.0, 80.0] and contexts.tolist() == [0.0, 800.0], (
        "30 + 50 steps, 10 tokens of context each"
    )


def test_memory_is_waited_for_until_those_that_end_first_have_freed_enough() -> None:
    """Past-Future's example: (7, 2) and (5, 4) with (4, 3) peak at 22 tokens."""
    work = work_of()
    running(work, "a", 2.0, own_len=7)
    running(work, "b", 4.0, own_len=5)
    assert work.memory_wait_s(0, 4, 3.0, capacity=22) == 0.0
    assert work.memory_wait_s(0, 4, 3.0, capacity=21) == pytest.approx(2 * 0.03), "a ends after two steps"
    assert work.memory_wait_s(0, 4, 3.0, capacity=12) == pytest.approx(4 * 0.03), "a frees 9 of 10"
    assert work_of().memory_wait_s(0, 4, 3.0, capacity=1) == 0.0, "alone it does not wait"


def test_another_price_is_another_pace() -> None:
    work = work_of()
    running(work, "a", 100.0)
    work.price(StepCost(0.09, 1e-3, 0.01, 0.0))
    work.advance(1.0)
    assert left_of(work) == [pytest.approx(90.0)]


def test_there_is_room_for_as_many_as_come_and_a_cleared_replica_is_empty() -> None:
    work = work_of(2)
    for i in range(3 * MORE_SEATS):
        running(work, f"r{i}", 100.0 + i, slot=i % 2)
    assert len(left_of(work, 0)) == len(left_of(work, 1)) == 12
    work.clear(0)
    work.check_integrity()
    assert left_of(work, 0) == [] and len(left_of(work, 1)) == 12
    running(work, "new", 7.0)
    assert left_of(work) == [7.0]


def test_what_does_not_add_up_is_noticed() -> None:
    work = work_of()
    running(work, "a", 10.0)
    work.queued_s[0] += 1.0
    with pytest.raises(IntegrityError, match="prefill"):
        work.check_integrity()
    work = work_of()
    running(work, "a", 10.0)
    work.num_requests[0] += 1
    with pytest.raises(IntegrityError, match="running"):
        work.check_integrity()

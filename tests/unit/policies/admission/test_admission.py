"""Admission: what may start beside what runs, by what is held now, by limits, and by drawn lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Forecast
from farsight.policies.admission.conservative import Conservative
from farsight.policies.admission.past_future import (
    HistoryLengths,
    PastFuture,
    PeakIndex,
    TrueLengths,
    future_memory,
)
from farsight.policies.admission.watermark import Aggressive
from farsight.policies.interfaces import Admission, Job
from farsight.policies.lengths.history import IntArray, LengthHistory

ENTRIES = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 50)), min_size=1, max_size=12)


def job(
    name: str, prompt: int, total: int | None = None, generated: int = 0, limit: int = 1000, version: int = 0
) -> Job:
    """A job; ``total``: the length that its forecast foresees."""
    forecast = None if total is None else Forecast(total, (total,) * 6, 1, "test", version)
    return Job(name, 0.0, prompt, limit, forecast=forecast, output_len=generated)


def arrays(entries: list[tuple[int, int]]) -> tuple[IntArray, IntArray]:
    both = np.array(entries, dtype=np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def oracle(**options: bool) -> PastFuture:
    return PastFuture(TrueLengths(), reserve_ratio=0, max_lists=1, **options)


def with_history(*lengths: int, seed: int = 0, reserve_ratio: float = 0, max_lists: int = 5) -> PastFuture:
    source = HistoryLengths(LengthHistory(initial=lengths), np.random.default_rng(seed))
    return PastFuture(source, reserve_ratio=reserve_ratio, max_lists=max_lists)


def batch_of_example_1(step: int) -> list[Job]:
    """A holds 7 tokens and has 2 to go, B 5 and 4, at step 0; A ends at 2."""
    batch = [job("B", 5, 4 + 1, generated=step + 1)]
    batch[0].prompt_len = 4
    if step < 2:
        batch.insert(0, job("A", 6, 2 + 1, generated=step + 1))
    return batch


@pytest.mark.parametrize(
    ("step", "strict", "admitted"), [(0, False, False), (1, False, True), (1, True, False), (2, True, True)]
)
def test_example_1_admits_one_step_later_and_strictly_two(step: int, strict: bool, admitted: bool) -> None:
    admission = oracle(strict=strict)
    admission.begin(batch_of_example_1(step), 21)
    assert admission.admits(job("C", 4, 3)) is admitted
    if admitted:
        admission.add(job("C", 4, 3))
        assert admission.predicted_peak == {1: 21, 2: 15}[step]


def test_no_entries_need_nothing() -> None:
    empty = PeakIndex(np.array([], np.int64), np.zeros((2, 0), np.int64))
    assert future_memory(*arrays([])) == 0
    assert empty.peaks_with(np.array([4, 5]), np.array([[6, 1], [2, 3]])).tolist() == [10, 8]


def test_incremental_is_brute_force_on_many_random_batches() -> None:
    rng = np.random.default_rng(0)
    for n in range(40):
        base, remaining = rng.integers(1, 60, n), rng.integers(0, rng.integers(2, 60), (1 + n % 3, n))
        index = PeakIndex(base, remaining)
        new_base, new_remaining = rng.integers(1, 60, 120), rng.integers(0, 60, (1 + n % 3, 120))
        whole = [
            future_memory(np.append(base, b), np.column_stack([remaining, r])).max()
            for b, r in zip(new_base, new_remaining.T, strict=True)
        ]
        assert index.peaks_with(new_base, new_remaining).tolist() == whole


@settings(max_examples=100, deadline=None)
@given(ENTRIES, st.integers(1, 50), st.integers(0, 50))
def test_peak_is_the_highest_of_all_steps_and_grows_with_each_entry(
    entries: list[tuple[int, int]], base: int, remaining: int
) -> None:
    """Invariants (ii), (iii) and (iv)."""
    peak = future_memory(*arrays(entries))
    assert peak == max(sum(b + t for b, r in entries if r >= t) for t in range(52))
    assert future_memory(*arrays([*entries, (base, remaining)])) >= peak
    assert peak <= sum(b + r for b, r in entries)


def evictions(admission: Admission, lengths: list[tuple[int, int]], capacity: int, limit: int) -> tuple[int, int]:
    """A closed loop: one token per job and step, all queued at the start, the latest evicted. (evictions, steps)."""
    truth = {str(i): total for i, (_, total) in enumerate(lengths)}
    queue = [job(str(i), prompt, total, limit=limit) for i, (prompt, total) in enumerate(lengths)]
    running: list[Job] = []
    count = steps = 0
    while queue or running:
        admission.begin(running, capacity)
        while queue and admission.admits(queue[0]):
            admission.add(queue[0])
            running.append(queue.pop(0))
        while sum(each.known_len + 1 for each in running) > capacity:
            queue.insert(0, running.pop())
            count += 1
        for each in running:
            each.output_len += 1
        for each in running:
            if each.output_len == truth[each.request_id]:
                admission.learn(each.output_len, censored=False)
        running = [each for each in running if each.output_len < truth[each.request_id]]
        steps += 1
        assert steps < 20_000
    return count, steps


def random_lengths(seed: int, n: int = 60) -> list[tuple[int, int]]:
    rng = np.random.default_rng(seed)
    return list(zip(rng.integers(1, 40, n).tolist(), rng.integers(1, 80, n).tolist(), strict=True))


@pytest.mark.parametrize("seed", range(5))
def test_true_lengths_never_evict(seed: int) -> None:
    """Invariant (v)."""
    assert evictions(oracle(), random_lengths(seed), capacity=400, limit=80)[0] == 0


def test_more_reserve_and_more_lists_evict_less() -> None:
    def total(**options: Any) -> int:
        return sum(
            evictions(with_history(80, seed=seed, **options), random_lengths(seed, 120), 400, 80)[0]
            for seed in range(2)
        )

    one, five = total(max_lists=1), total(max_lists=5)
    assert 0 < five < one
    assert total(max_lists=5, reserve_ratio=0.2) < five


@pytest.mark.parametrize(
    ("num_running", "num_lists"),
    [(0, 1), (1, 5), (50, 5), (51, 4), (66, 4), (67, 3), (100, 3), (101, 2), (200, 2), (201, 1), (400, 1)],
)
def test_small_batches_are_drawn_several_times(num_running: int, num_lists: int) -> None:
    asked = []

    class Lengths(TrueLengths):
        def draw_one(self, job: Job, num_lists: int) -> list[int]:
            asked.append(num_lists)
            return [1] * num_lists

    admission = PastFuture(Lengths())
    admission.begin([job(str(i), 1, 5) for i in range(num_running)], 10**6)
    admission.add(job("new", 1, 5))
    assert asked == [num_lists]


def test_all_lists_must_fit() -> None:
    """One list of a short draw, one of a long one: the long one counts."""

    class Lengths(TrueLengths):
        def draw_one(self, job: Job, num_lists: int) -> list[int]:
            return [10, 40, 10, 10, 10]

    admission = PastFuture(Lengths(), reserve_ratio=0)
    admission.begin([job("a", 10, 1)], 49)
    assert not admission.admits(job("new", 10))
    admission.begin([job("a", 10, 1)], 50)
    assert admission.admits(job("new", 10))


def test_into_an_empty_batch_goes_what_can_make_a_step() -> None:
    admission = oracle()
    admission.begin([], 21)
    assert admission.admits(job("a", 20, 500))
    assert not admission.admits(job("b", 21, 1))
    assert admission.fits([job("a", 20, 500), job("b", 21, 1)]).tolist() == [True, False]
    assert admission.admits(job("paused", 15, 500, generated=5))
    assert not admission.admits(job("paused further", 15, 500, generated=6))
    admission.add(job("a", 20, 500))
    assert not admission.admits(job("c", 1, 1))


@pytest.mark.parametrize(("ratio", "limit"), [(0.03, 97), (0.05, 95), (0.1, 90), (0.0, 100)])
def test_reserve_lowers_the_limit(ratio: float, limit: int) -> None:
    admission = PastFuture(TrueLengths(), reserve_ratio=ratio)
    assert admission.reserve(100) == 100 - limit
    assert PastFuture(TrueLengths(), reserve_ratio=0.07).reserve(500) == 35, "0.93 * 500 is less than 465 in floats"
    for prompt, admitted in [(limit - 11, True), (limit - 10, False)]:
        admission.begin([job("a", 9, 1)], 100)
        assert admission.admits(job("new", prompt, 10)) is admitted


def test_a_paused_job_is_drawn_beyond_what_it_has_generated() -> None:
    """Every output was 5 or 50 long: after 6 tokens it is 50."""
    admission = with_history(5, 5, 5, 5, 5, 50, max_lists=1)
    for capacity, admitted in [(56, True), (55, False)] * 10:
        admission.begin([job("a", 9, generated=4, limit=5)], capacity)
        assert admission.admits(job("paused", 6, generated=6)) is admitted
        assert admission.fits([job("other", 6, generated=6), job("third", 7, generated=6)]).tolist() == [
            admitted,
            False,
        ]


def test_draws_are_fixed_within_a_point_and_new_at_the_next() -> None:
    admission = with_history(*range(1, 200), max_lists=1)
    answers = []
    for _ in range(40):
        admission.begin([job("a", 10, limit=10, generated=5)], 120)
        first = admission.admits(job("new", 10))
        assert all(admission.admits(job("new", 10)) is first for _ in range(5))
        admission.add(job("new", 10))
        assert (admission.predicted_peak <= 120) is first
        answers.append(first)
    assert 0 < sum(answers) < 40


def test_the_limit_of_a_job_bounds_its_draw() -> None:
    admission = with_history(500)
    admission.begin([job("a", 10, limit=20)], 60)
    assert admission.predicted_peak == 30
    assert admission.admits(job("new", 10, limit=20))
    assert not admission.admits(job("longer", 10, limit=51))


def test_what_ends_is_learnt_and_cuts_are_no_ends() -> None:
    history = LengthHistory(initial=[100])
    admission = PastFuture(HistoryLengths(history, np.random.default_rng(0)), reserve_ratio=0)
    for _ in range(50):
        admission.learn(10, censored=True)
    admission.begin([job("a", 10)], 1000)
    assert admission.predicted_peak == 110
    for _ in range(2000):
        admission.learn(10, censored=False)
    admission.begin([job("a", 10)], 1000)
    assert admission.predicted_peak == 20
    assert not admission.admits(job("new", 971))
    assert admission.admits(job("other", 970))


def test_true_lengths_go_to_the_limit_where_nothing_is_foreseen() -> None:
    lengths = TrueLengths().draw([job("a", 1, 7), job("b", 1), job("c", 1, 7, generated=7), job("d", 1, 2000)], 2)
    assert lengths.tolist() == [[7, 1000, 1000, 1000]] * 2


@pytest.mark.parametrize("num_running", [0, 3, 120, 250])
def test_a_whole_queue_at_once_is_answered_like_one_by_one(num_running: int) -> None:
    rng = np.random.default_rng(num_running)
    queue = [job(f"q{i}", p, generated=g) for i, (p, g) in enumerate(rng.integers(0, 90, (50, 2)).tolist())]
    running = [job(str(i), 10, generated=i % 80) for i in range(num_running)]
    for strict in (False, True):
        first, admission = (
            PastFuture(
                HistoryLengths(LengthHistory(initial=range(1, 100)), np.random.default_rng(1)),
                reserve_ratio=0,
                strict=strict,
            )
            for _ in range(2)
        )
        first.begin(running, 0)
        admission.begin(running, first.predicted_peak + 80)
        one_by_one = [admission.admits(each) for each in queue[:20]]
        at_once = admission.fits(queue).tolist()
        assert at_once[:20] == one_by_one
        assert at_once == [admission.admits(each) for each in queue]
        assert True in at_once
        assert False in at_once


def bounded(prompt: int, limit: int, generated: int = 0) -> Job:
    return Job(f"{prompt} {limit}", 0.0, prompt, limit, output_len=generated)


def test_example_1_waits_until_a_has_ended() -> None:
    """A and B need 9 each in all, C 7: 25 of 21 tokens at t and t+1, 16 at t+2."""
    admission = Conservative()
    for step in (0, 1):
        admission.begin([bounded(6, 3, 1 + step), bounded(4, 5, 1 + step)], 21)
        assert admission.predicted_peak == 18
        assert not admission.admits(bounded(4, 3))
    admission.begin([bounded(4, 5, 3)], 21)
    assert admission.admits(bounded(4, 3))
    admission.add(bounded(4, 3))
    assert admission.predicted_peak == 16


@pytest.mark.parametrize(("overcommit", "prompt"), [(1.0, 70), (1.5, 120), (0.8, 50), (1.15, 85)])
def test_overcommit_multiplies_the_pool(overcommit: float, prompt: int) -> None:
    admission = Conservative(overcommit)
    admission.begin([bounded(10, 10)], 100)
    assert admission.admits(bounded(prompt, 10))
    assert not admission.admits(bounded(prompt + 1, 10))
    assert admission.reserve(100) == max(0, round(100 - 100 * overcommit))


def test_conservative_admits_into_an_empty_batch_what_can_make_a_step() -> None:
    admission = Conservative()
    admission.begin([], 21)
    assert admission.admits(bounded(20, 500))
    assert not admission.admits(bounded(21, 1))
    admission.add(bounded(20, 500))
    assert not admission.admits(bounded(1, 1))


def test_it_learns_nothing_and_refuses_bad_parameters() -> None:
    admission = Conservative()
    admission.learn(5, censored=False)
    admission.begin([bounded(10, 10)], 100)
    assert admission.predicted_peak == 20
    for overcommit in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidValueError, match="overcommit"):
            Conservative(overcommit)


def held_job(prompt: int, generated: int = 0) -> Job:
    return Job("a", 0.0, prompt, 1000, output_len=generated)


def test_example_1_is_admitted_at_once() -> None:
    """12 tokens are held and 4 come, of 21: in it goes, and two steps later 22 are needed."""
    admission = Aggressive(0.99)
    admission.begin([held_job(6, 1), held_job(4, 1)], 21)
    assert admission.admits(held_job(4))


@pytest.mark.parametrize(
    ("watermark", "held", "new", "admitted"),
    [
        (0.95, 50, 45, True),
        (0.95, 50, 46, False),
        (0.9, 20, 70, True),
        (0.9, 20, 71, False),
        (1.0, 50, 50, True),
        (0.29, 20, 9, True),
    ],
)
def test_the_watermark_bounds_what_is_held_now(watermark: float, held: int, new: int, admitted: bool) -> None:
    admission = Aggressive(watermark)
    admission.begin([held_job(held - 5, 5)], 100)
    assert admission.admits(held_job(new - 3, 3)) is admitted
    assert admission.reserve(100) == round(100 - 100 * watermark)


def test_an_empty_pool_takes_what_fits_and_added_jobs_count() -> None:
    admission = Aggressive(0.5)
    admission.begin([], 100)
    assert admission.admits(held_job(100))
    assert not admission.admits(held_job(101))
    admission.add(held_job(30))
    assert admission.admits(held_job(20))
    assert not admission.admits(held_job(21))
    admission.learn(3, censored=True)
    admission.begin([], 100)
    assert admission.admits(held_job(100))

"""Bins, their edges and the queue of completed batches."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.policies.batching.multi_bin import (
    MIN_LENGTHS,
    LearnedBins,
    MultiBinBatcher,
    equal_mass_edges,
    exponential_edges,
    log_chain,
    sample_edges,
    uniform_edges,
)
from tests.unit.policies.batch_jobs import drain, exercise, made_forecast, make_job, names


def add(batcher: MultiBinBatcher, lengths: list[int], start: int = 0) -> None:
    """Jobs named by their place, one second apart."""
    for index, length in enumerate(lengths, start):
        batcher.add(make_job(str(index), 1, length, arrived_at=index), index)
        batcher.check_integrity()


def service_s(batches: list[list[str]], lengths: list[int]) -> int:
    return sum(max(lengths[int(name)] for name in batch) for batch in batches)


def test_figure_1b() -> None:
    """Section 2 example 1: 1, 5, 2, 6 in pairs take 11 s in order of arrival, 8 s from bins [1, 3] and [4, 6]."""
    lengths = [1, 5, 2, 6]
    standard, bins = MultiBinBatcher((1, 6), 2), MultiBinBatcher((1, 4, 6), 2)
    add(standard, lengths)
    add(bins, lengths)
    one, two = drain(standard, 4), drain(bins, 4)
    assert (one, service_s(one, lengths)) == ([["0", "1"], ["2", "3"]], 11)
    assert (two, service_s(two, lengths)) == ([["0", "2"], ["1", "3"]], 8)


def test_edges_of_uniform_lengths() -> None:
    """Section 2 example 3, k = 4."""
    assert uniform_edges(1, 20, 4) == (1, 5.75, 10.5, 15.25, 20)
    assert uniform_edges(3, 3, 2) == (3, 3, 3)


def test_edges_of_exponential_lengths() -> None:
    """Section 2 examples 4 and 5."""
    assert exponential_edges(1, 2, 2) == pytest.approx((0, 0.4055, math.inf), abs=5e-5)
    assert exponential_edges(1, 2, 3) == pytest.approx((0, 0.3404, 0.7458, math.inf), abs=5e-5)
    assert exponential_edges(0.1, 200, 3) == pytest.approx((0, 10.193, 27.905, math.inf), abs=5e-4)
    assert exponential_edges(0.1, 200, 1) == (0, math.inf)
    assert log_chain(200, 1) == pytest.approx((5.87803,), abs=5e-6)


@pytest.mark.parametrize(("batch_size", "num_bins"), [(2, 2), (2, 3), (200, 3), (200, 4)])
def test_exponential_edges_minimise_the_bound(batch_size: int, num_bins: int) -> None:
    """The bound of Lemma A.1 rises wherever an inner edge is moved."""
    harmonic = log_chain(batch_size, 1)[0]

    def bound(inner: np.ndarray) -> float:
        points = [0.0, *(float(each) for each in inner)]
        masses = [math.exp(-low) - math.exp(-high) for low, high in pairwise(points)]
        return sum(m * x for m, x in zip(masses, points[1:], strict=True)) + math.exp(-points[-1]) * (
            points[-1] + harmonic
        )

    best = np.array(exponential_edges(1, batch_size, num_bins)[1:-1])
    least = bound(best)
    assert least == pytest.approx(log_chain(batch_size, num_bins)[-1])  # which equals L_k
    for index in range(num_bins - 1):
        for shift in (-0.01, 0.01):
            moved = best.copy()
            moved[index] += shift
            assert bound(moved) > least


def test_edges_from_samples_hold_equal_mass() -> None:
    samples = np.random.default_rng(1).lognormal(4, 1, 4000)
    edges = sample_edges(samples.tolist(), 8)
    batcher = MultiBinBatcher(edges, 2)
    counts = np.bincount([batcher.bin_of(each) for each in samples], minlength=8)
    assert (edges[0], edges[-1]) == (samples.min(), samples.max())
    assert counts.min() >= 499 and counts.max() <= 501
    assert sample_edges([4, 1, 3, 2, 5], 2) == (1, 3, 5)
    assert equal_mass_edges(lambda level: 100 * level**2, 2) == (0, 25, 100)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=2, max_size=8).map(sorted), st.floats(-50, 150))
def test_bins_are_closed_below_and_the_ends_take_what_is_outside(edges: list[float], length: float) -> None:
    index = MultiBinBatcher(edges, 2).bin_of(length)
    last = len(edges) - 2
    assert 0 <= index <= last
    assert index == 0 or edges[index] <= length
    assert index == last or length < edges[index + 1]


def test_incomplete_batches_wait_for_ever_in_the_paper_until_flushed() -> None:
    batcher = MultiBinBatcher((1, 10, 20), 3)
    add(batcher, [15, 5, 15])
    assert batcher.next_due_at() is None
    assert batcher.pull(1e12) is None
    assert batcher.num_waiting == 3
    batcher.flush(1e12)
    assert drain(batcher, 1e12) == [["0", "2"], ["1"]]


def test_max_wait_seals_what_is_incomplete_in_the_order_in_which_it_was_due() -> None:
    batcher = MultiBinBatcher((1, 10, 20), 3, max_wait_s=10)
    add(batcher, [15, 5, 15])
    assert batcher.next_due_at() == 10
    assert batcher.pull(9.99) is None
    batch = batcher.pull(10)
    assert names(batch) == ["0", "2"]
    assert batch is not None and batch.sealed_at == 10
    assert batcher.next_due_at() == 11
    add(batcher, [5], start=20)
    assert names(batcher.pull(20)) == ["1", "20"], "a due bin takes jobs until it is pulled"
    assert batcher.num_waiting == 0


def test_due_batches_go_before_one_completed_later() -> None:
    batcher = MultiBinBatcher((1, 10, 20, 30), 2, max_wait_s=10)
    add(batcher, [15, 5])
    add(batcher, [25, 25, 5], start=12)  # two fill a bin; the third one fills a bin that has been due since 11
    assert drain(batcher, 14) == [["0"], ["1", "14"], ["12", "13"]]


def test_where_no_worker_is_idle_due_bins_go_on_filling() -> None:
    """Ten times as long as the wait: batches are full all the same, and go in the order in which they were due."""
    batcher = MultiBinBatcher((1, 10, 20), 4, max_wait_s=1)
    add(batcher, [5, 15, 5, 5, 15, 5, 5, 15, 15, 5])
    assert [len(batch) for batch in drain(batcher, 10)] == [4, 4, 2]


def test_of_two_due_bins_the_older_one_is_first_though_it_was_opened_last() -> None:
    batcher = MultiBinBatcher((1, 10, 20), 2, max_wait_s=10)
    batcher.add(make_job("young", 1, 5, arrived_at=3), 3)
    batcher.add(make_job("back", 1, 15, arrived_at=1), 4)
    assert drain(batcher, 20) == [["back"], ["young"]]


def test_a_requeued_job_is_due_from_its_arrival() -> None:
    batcher = MultiBinBatcher((1, 20), 3, max_wait_s=10)
    batcher.add(make_job("new", 1, 5, arrived_at=30), 30)
    batcher.add(make_job("back", 1, 5, arrived_at=22), 31)
    assert batcher.next_due_at() == 32
    batcher.remove("back")
    assert batcher.next_due_at() == 40


def test_the_most_urgent_batch_goes_first() -> None:
    batcher = MultiBinBatcher((1, 10, 20, 30), 2)
    add(batcher, [5, 5, 15])
    batcher.add(make_job("urgent", 1, 15, arrived_at=3, priority=-1), 3)
    batcher.add(make_job("x", 1, 25, arrived_at=4, deadline_at=50), 4)
    batcher.add(make_job("y", 1, 25, arrived_at=4), 4)
    assert drain(batcher, 5) == [["2", "urgent"], ["x", "y"], ["0", "1"]]


@pytest.mark.parametrize("max_wait_s", [0.0, 5.0, math.inf])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_lost_or_doubled(seed: int, max_wait_s: float) -> None:
    exercise(MultiBinBatcher((1, 10, 20, 40), 4, max_wait_s), seed)


@pytest.mark.parametrize("num_bins", [1, 3])
def test_every_sealed_batch_is_full_and_of_one_bin(num_bins: int) -> None:
    rng = np.random.default_rng(3)
    batcher = MultiBinBatcher(uniform_edges(1, 60, num_bins), 4)
    lengths = [int(each) for each in rng.integers(1, 61, 200)]
    add(batcher, lengths)
    batches = drain(batcher, 200)
    assert all(len(batch) == 4 for batch in batches)
    assert all(len({batcher.bin_of(lengths[int(name)]) for name in batch}) == 1 for batch in batches)
    assert len(batches) >= (200 - 3 * num_bins) // 4
    completed = [max(int(name) for name in batch) for batch in batches]
    assert completed == sorted(completed)


def test_integrity_notices_an_overfull_bin_and_a_lost_job() -> None:
    batcher = MultiBinBatcher((1, 20), 3)
    add(batcher, [5, 5])
    batcher.batch_size = 2
    with pytest.raises(IntegrityError, match="bin 0 holds 2"):
        batcher.check_integrity()


def test_bins_are_learnt_from_the_lengths_foreseen() -> None:
    batcher = LearnedBins(2, 3)
    assert batcher.bin_of(1) == batcher.bin_of(1000) == 0, "one bin until enough is known"
    lengths = [10, 90] * (MIN_LENGTHS // 2)
    add(batcher, lengths[:-1])
    assert batcher.edges == (0.0, math.inf)
    add(batcher, lengths[-1:], MIN_LENGTHS - 1)
    assert [batcher.bin_of(length) for length in (10, 49, 51, 90)] == [0, 0, 1, 1]
    drain(batcher, MIN_LENGTHS)
    add(batcher, [10, 90, 10, 90, 10, 90], MIN_LENGTHS)
    pulled = drain(batcher, 2 * MIN_LENGTHS)
    assert pulled
    assert all(len({int(name) % 2 for name in names}) == 1 for names in pulled), "short and long ones apart"


def test_jobs_that_wait_move_to_their_new_bins_and_fill_them_in_order_of_arrival() -> None:
    batcher = MultiBinBatcher((0, 50, 100), 2)
    add(batcher, [10, 60])
    batcher.rebin((0, 80, 100), 5.0)
    batcher.check_integrity()
    assert drain(batcher, 5.0) == [["0", "1"]]
    with pytest.raises(InvalidValueError, match="edges"):
        batcher.rebin((3, 2), 5.0)


@pytest.mark.parametrize("seed", range(5))
def test_learnt_bins_lose_nothing(seed: int) -> None:
    exercise(LearnedBins(3, 4, max_wait_s=5.0), seed, steps=400)


def test_a_full_batch_that_a_late_forecast_leaves_fills_its_bin_anew() -> None:
    batcher = MultiBinBatcher((0.0, 10.0, math.inf), 2)
    jobs = [make_job(f"r{index}", 5, 4.0, arrived_at=index) for index in range(3)]
    for job in jobs:
        batcher.add(job, 3.0)
    batcher.foresee([(jobs[1], made_forecast(6.0))], 4.0)
    assert [batch.predicted_len for batch in batcher._sealed] == [6], "of the same bin: it stays, and takes longer"
    batcher.foresee([(jobs[0], made_forecast(40.0))], 5.0)
    batcher.check_integrity()
    batch = batcher.pull(6.0)
    assert batch is not None and names(batch) == ["r2", "r1"] and batcher.num_waiting == 1
    batcher.split(batch, 6.0)
    batcher.foresee([(jobs[2], made_forecast(40.0))], 7.0)
    assert drain(batcher, 7.0) == [["r2"], ["r1"]], "parts of a batch stay as they are"


def test_bins_are_learned_from_forecasts_that_come_late() -> None:
    batcher = LearnedBins(2, 4)
    jobs = [make_job(f"r{index}", 5, 20.0, arrived_at=index) for index in range(MIN_LENGTHS - 1)]
    for job in jobs:
        batcher.add(job, 0.0)
    batcher.foresee([(job, made_forecast(10.0 if index % 2 else 50.0)) for index, job in enumerate(jobs)], 1.0)
    batcher.add(make_job("last", 5, 10.0), 2.0)
    assert batcher.edges == (10.0, 30.0, 50.0)
    batcher.foresee([(make_job("gone", 5, 7.0), made_forecast(8.0))], 3.0)
    batcher.check_integrity()
    assert batcher.edges == (10.0, 30.0, 50.0), "no job of that length was counted"

"""Arrival times of open loops."""

from __future__ import annotations

import itertools
import statistics

import pytest

from services.bench.arrivals import drawn_arrivals, replayed_arrivals


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_cv(cv: float) -> None:
    arrivals = drawn_arrivals(40_000, rate=20.0, cv=cv, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise([0.0, *arrivals])]
    assert min(gaps) >= 0
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
    assert statistics.pstdev(gaps) / statistics.fmean(gaps) == pytest.approx(cv, rel=0.1, abs=1e-6)


def test_a_seed_gives_one_process() -> None:
    assert drawn_arrivals(10, 5.0, 2.0, seed=3) == drawn_arrivals(10, 5.0, 2.0, seed=3)
    assert drawn_arrivals(10, 5.0, 2.0, seed=3) != drawn_arrivals(10, 5.0, 2.0, seed=4)


def test_a_trace_is_stretched() -> None:
    assert replayed_arrivals([10.0, 11.0, 14.0], None, 0.5) == [0.0, 0.5, 2.0]
    assert replayed_arrivals([10.0, 11.0, 14.0], 1.5, 1.0) == [0.0, 0.5, 2.0]


def test_a_trace_without_span() -> None:
    assert replayed_arrivals([3.0], 2.0, 1.0) == [0.0]
    assert replayed_arrivals([], None, 1.0) == []

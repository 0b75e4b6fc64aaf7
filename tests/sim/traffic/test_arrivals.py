"""Arrival instants against their closed forms."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import InvalidValueError
from simulator.traffic.arrivals import AllAtOnce, Gamma, Poisson, Replay, debatch, rescale


def _gaps(process: Gamma | Poisson) -> np.ndarray:
    return np.diff(process.sample(np.random.default_rng(1), 100_000), prepend=0.0)


def test_poisson_gaps_have_the_mean_and_spread_of_an_exponential() -> None:
    gaps = _gaps(Poisson(4.0))
    assert gaps.mean() == pytest.approx(0.25, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("cv", [0.5, 1.0, 4.0])
def test_gamma_gaps_have_the_asked_rate_and_cv(cv: float) -> None:
    gaps = _gaps(Gamma(2.0, cv))
    assert gaps.mean() == pytest.approx(0.5, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("process", [Poisson(3.0), Gamma(3.0, 4.0)])
def test_the_same_seed_gives_the_same_instants(process: Gamma | Poisson) -> None:
    first, again, other = (process.sample(np.random.default_rng(seed), 50) for seed in (7, 7, 8))
    assert (first == again).all()
    assert (first != other).any()


def test_all_at_once_is_zero_throughout() -> None:
    assert AllAtOnce().sample(np.random.default_rng(0), 3).tolist() == [0, 0, 0]


def test_replay_starts_at_zero_and_keeps_the_pace() -> None:
    assert Replay([5.0, 6.0, 9.0]).sample(np.random.default_rng(0), 2).tolist() == [0, 1]


def test_replay_at_a_rate_keeps_the_shape_of_the_gaps() -> None:
    instants = Replay([5.0, 6.0, 9.0], rate=1.0).sample(np.random.default_rng(0), 3)
    assert instants.tolist() == [0, 0.5, 2]


def test_a_sample_of_a_replay_is_a_copy() -> None:
    replay = Replay([0.0, 1.0])
    replay.sample(np.random.default_rng(0), 2)[:] = 9
    assert replay.sample(np.random.default_rng(0), 2).tolist() == [0, 1]


def test_replay_of_more_than_the_trace_holds_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="num_requests"):
        Replay([0.0, 1.0]).sample(np.random.default_rng(0), 3)


def test_debatch_spreads_each_batch_over_the_gap_to_the_next() -> None:
    assert debatch([0.0, 0.0, 0.0, 3.0, 9.0, 9.0]).tolist() == [0, 1, 2, 3, 9, 12]


def test_debatch_leaves_a_single_instant_alone() -> None:
    assert debatch([2.0, 2.0]).tolist() == [2, 2]


@pytest.mark.parametrize("instants", [[1.0, 0.5], [0.0, float("nan")], [float("inf")]])
def test_instants_that_fall_or_are_not_finite_are_refused(instants: list[float]) -> None:
    for use in (debatch, Replay):
        with pytest.raises(InvalidValueError, match="instants"):
            use(instants)


@pytest.mark.parametrize("instants", [[], [1.0], [2.0, 2.0]])
def test_a_trace_that_spans_no_time_cannot_be_rescaled(instants: list[float]) -> None:
    with pytest.raises(InvalidValueError, match="instants"):
        rescale(instants, 1.0)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_rates_and_cvs_are_refused(bad: float) -> None:
    with pytest.raises(InvalidValueError, match="rate"):
        Poisson(bad)
    with pytest.raises(InvalidValueError, match="rate"):
        Gamma(bad, 1.0)
    with pytest.raises(InvalidValueError, match="cv"):
        Gamma(1.0, bad)
    with pytest.raises(InvalidValueError, match="rate"):
        rescale([0.0, 1.0], bad)

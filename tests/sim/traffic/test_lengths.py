"""Length laws against their closed forms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.simulator.traffic.arrivals import AllAtOnce, Gamma, Poisson, debatch, rescale
from farsight.simulator.traffic.lengths import (
    D1,
    D2,
    D3,
    GSM8K_LIKE,
    SHAREGPT_LIKE,
    Exponential,
    LengthLaw,
    LogNormal,
    Uniform,
    ZipfLengths,
)

LAWS: list[LengthLaw] = [
    Uniform(3, 9),
    ZipfLengths(0.9, 100),
    ZipfLengths(1.3, 5000),
    Exponential(30.0, 4096),
    Exponential(30.0, 20),
    LogNormal(60.0, 0.5, 4096),
    LogNormal(60.0, 1.2, 80),
]


def law_name(law: LengthLaw) -> str:
    return type(law).__name__


@pytest.mark.parametrize("law", LAWS, ids=law_name)
def test_samples_have_the_stated_mean_and_bounds(law: LengthLaw) -> None:
    lengths = law.sample(np.random.default_rng(3), 200_000)
    error = lengths.std() / np.sqrt(len(lengths))
    assert abs(lengths.mean() - law.mean) < 4 * error
    assert lengths.min() >= 1
    assert lengths.max() <= law.longest
    first, again = (law.sample(np.random.default_rng(5), 100) for _ in range(2))
    assert (first == again).all()


def test_means_and_ends_are_those_of_the_laws() -> None:
    means = [ZipfLengths(theta, 100).mean for theta in (0.4, 0.9, 1.1, 1.3)]
    assert means == pytest.approx([39.4, 22.5, 16.3, 11.3], abs=0.06)
    assert Exponential(10.0, 10_000).mean == pytest.approx(1 / (1 - np.exp(-0.1))), "geometric, without a cap"
    assert set(Uniform(2, 4).sample(np.random.default_rng(0), 100).tolist()) == {2, 3, 4}


def test_named_pairs_are_the_published_ones() -> None:
    assert [(p.prompt, p.output, p.max_new_tokens) for p in (D1, D2, D3)] == [
        (Uniform(32, 4096), Uniform(2048, 4096), 4096),
        (Uniform(3000, 5000), Uniform(3000, 5000), 5000),
        (Uniform(2048, 4096), Uniform(32, 4096), 4096),
    ]
    assert not any(p.fitted for p in (D1, D2, D3))
    assert GSM8K_LIKE.fitted and SHAREGPT_LIKE.fitted
    assert SHAREGPT_LIKE.output.mean == pytest.approx(338, rel=0.03)


def test_the_gsm8k_stand_in_gives_the_published_thresholds() -> None:
    """Multi-Bin, Figure 6: 8 servers, batches of 8, equiprobable bins, 0.0366 s per token."""
    lengths = np.sort(np.random.default_rng(2).lognormal(np.log(42.4) - 0.47**2 / 2, 0.47, 320_000))
    assert GSM8K_LIKE.output == LogNormal(42.4, 0.47, 1024)
    for num_bins, reported in [(1, 22.71), (2, 27.48), (4, 31.91), (8, 35.27), (16, 37.87), (32, 39.65)]:
        longest = [_mean_of_longest(part, 8) for part in np.array_split(lengths, num_bins)]
        assert 8 * 8 / (0.0366 * np.mean(longest)) == pytest.approx(reported, rel=0.015)


def _mean_of_longest(ordered: np.ndarray, size: int) -> float:
    upper = np.arange(1, len(ordered) + 1) / len(ordered)
    return float(ordered @ (upper**size - (upper - 1 / len(ordered)) ** size))


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Uniform(0, 4), "shortest"),
        (lambda: Uniform(5, 4), "longest"),
        (lambda: ZipfLengths(1.0, 0), "longest"),
        (lambda: ZipfLengths(float("nan"), 5), "theta"),
        (lambda: Exponential(0.0, 5), "scale"),
        (lambda: Exponential(1.0, 0), "longest"),
        (lambda: LogNormal(-1.0, 1.0, 5), "scale"),
        (lambda: LogNormal(1.0, 0.0, 5), "sigma"),
        (lambda: LogNormal(1.0, 1.0, 0), "longest"),
    ],
)
def test_bad_parameters_name_the_field(build: Callable[[], LengthLaw], field: str) -> None:
    with pytest.raises(InvalidValueError) as error:
        build()
    assert error.value.field == field


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


def test_a_rate_keeps_the_shape() -> None:
    assert rescale([5.0, 6.0, 9.0], 1.0).tolist() == [0, 0.5, 2]
    assert AllAtOnce().sample(np.random.default_rng(0), 3).tolist() == [0, 0, 0]


def test_debatch_spreads_each_batch_over_the_gap_to_the_next() -> None:
    assert debatch([0.0, 0.0, 0.0, 3.0, 9.0, 9.0]).tolist() == [0, 1, 2, 3, 9, 12]
    assert debatch([2.0, 2.0]).tolist() == [2, 2]
    for instants in ([1.0, 0.5], [0.0, float("nan")], [float("inf")]):
        with pytest.raises(InvalidValueError, match="instants"):
            debatch(instants)
    for instants in ([], [1.0], [2.0, 2.0]):
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

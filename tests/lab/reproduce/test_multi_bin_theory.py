"""The numbers of Multi-Bin's theory, against the paper's and against simulation."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import InvalidValueError
from lab.reproduce.multi_bin_theory import (
    UniformService,
    exponential_service_bound_s,
    exponential_throughput_bound,
)
from policies.batching.multi_bin import uniform_edges

SMALL = UniformService(0, 6, 2)
PAPER = UniformService(1, 20, 128)


def test_pairs_of_uniform_times() -> None:
    """Section 2 example 2."""
    assert [SMALL.service_s(k) for k in (1, 2, 3)] == pytest.approx([4, 3.5, 10 / 3])
    assert [SMALL.throughput(k) for k in (1, 2, 3)] == pytest.approx([0.5, 4 / 7, 0.6])
    assert SMALL.max_throughput == pytest.approx(2 / 3)
    assert [SMALL.latency_s(k, 1) for k in (1, 2, 3)] == pytest.approx([4.5, 4.5, 4.8333], abs=5e-5)
    assert SMALL.bins_needed(0.1) == 2
    assert SMALL.throughput(1) < SMALL.max_throughput - 0.1 <= SMALL.throughput(2)


def test_the_system_of_figures_3_and_4() -> None:
    """Section 2 example 3."""
    bins = (1, 2, 3, 4, 5, 8, 16)
    assert [PAPER.service_s(k) for k in bins] == pytest.approx(
        [19.8527, 15.1764, 13.6176, 12.8382, 12.3705, 11.6691, 11.0845], abs=5e-5
    )
    assert [PAPER.throughput(k) for k in bins] == pytest.approx(
        [6.4475, 8.4342, 9.3996, 9.9703, 10.3472, 10.9692, 11.5476], abs=5e-5
    )
    assert PAPER.max_throughput == pytest.approx(12.19, abs=5e-3)
    assert [PAPER.bins_needed(short_by) for short_by in (1, 2, 4)] == [10, 5, 2]
    assert [PAPER.latency_s(k, 8) for k in (1, 2, 3)] == pytest.approx([27.790, 31.051, 37.430], abs=5e-4)
    assert [PAPER.latency_s(k, 4) for k in (1, 2, 3)] == pytest.approx([35.728, 46.926, 61.243], abs=5e-4)


def test_exponential_pairs() -> None:
    """Section 2 example 4."""
    assert [exponential_service_bound_s(1, 2, k) for k in (2, 3)] == pytest.approx([1.4055, 1.3404], abs=5e-5)


def test_exponential_times_of_figure_9() -> None:
    """Section 2 example 5."""
    bins = (1, 2, 3, 4, 5)
    assert [exponential_service_bound_s(0.1, 200, k) for k in bins] == pytest.approx(
        [58.780, 27.712, 20.193, 17.0275, 15.322], abs=5e-4
    )
    assert [exponential_throughput_bound(0.1, 200, k) for k in bins] == pytest.approx(
        [3.40, 7.22, 9.90, 11.75, 13.05], abs=5e-3
    )


@pytest.mark.parametrize(
    ("num_bins", "throughputs"),
    [
        (2, (8.434, 7.408, 6.658, 6.534, 6.447)),
        (4, (9.970, 8.880, 8.062, 7.925, 7.822)),
        (8, (10.969, 10.168, 9.523, 9.410, 9.323)),
    ],
)
def test_prediction_errors(num_bins: int, throughputs: tuple[float, ...]) -> None:
    """Section 2 example 6, p_e = 0, .01, .05, .1, .5."""
    computed = [128 / PAPER.service_with_errors_s(num_bins, rate) for rate in (0, 0.01, 0.05, 0.1, 0.5)]
    assert computed == pytest.approx(throughputs, abs=6e-4)


@pytest.mark.parametrize("num_bins", [1, 2, 5, 16])
def test_without_errors_the_error_model_is_theorem_4_2(num_bins: int) -> None:
    for system in (SMALL, PAPER, UniformService(3, 3, 4), UniformService(1, 9, 1)):
        assert system.service_with_errors_s(num_bins, 0) == pytest.approx(system.service_s(num_bins))


def test_one_bin_knows_no_errors() -> None:
    assert PAPER.service_with_errors_s(1, 0.5) == pytest.approx(PAPER.service_s(1))


@pytest.mark.parametrize("error_rate", [0.0, 0.2])
def test_service_times_against_simulation(error_rate: float) -> None:
    """Batches drawn from bins whose labels err as the model says."""
    system, num_bins, rng = UniformService(1, 20, 8), 4, np.random.default_rng(7)
    times = rng.uniform(1, 20, 400_000)
    labels = np.searchsorted(uniform_edges(1, 20, num_bins)[1:-1], times, side="right")
    draws = rng.uniform(size=times.size)
    labels = labels + np.where(draws < error_rate, -1, np.where(draws > 1 - error_rate, 1, 0))
    # At an end there is one neighbour: what would leave the range stays where it was.
    labels = np.clip(labels, 0, num_bins - 1)
    longest = []
    for index in range(num_bins):
        of_bin = times[labels == index]
        longest.append(of_bin[: of_bin.size // 8 * 8].reshape(-1, 8).max(axis=1))
    simulated = float(np.concatenate(longest).mean())
    assert system.service_with_errors_s(num_bins, error_rate) == pytest.approx(simulated, rel=0.005)


@pytest.mark.parametrize("short_by", [0.05, 0.3, 1.0, 5.0, 12.0, 100.0])
def test_bins_needed_is_enough_and_one_less_is_not(short_by: float) -> None:
    num_bins = PAPER.bins_needed(short_by)
    wanted = PAPER.max_throughput - short_by
    assert PAPER.throughput(num_bins) >= wanted
    assert num_bins == 1 or PAPER.throughput(num_bins - 1) < wanted


def test_throughput_rises_with_bins_towards_its_limit() -> None:
    rates = [PAPER.throughput(k) for k in range(1, 40)]
    assert rates == sorted(rates)
    assert PAPER.throughput(10**6) == pytest.approx(PAPER.max_throughput, rel=1e-5)


@pytest.mark.parametrize(
    ("field", "values"),
    [("low_s", (-1, 2, 2)), ("high_s", (3, 2, 2)), ("high_s", (0, 0, 2)), ("batch_size", (1, 2, 0))],
)
def test_bad_systems(field: str, values: tuple[float, float, int]) -> None:
    with pytest.raises(InvalidValueError) as raised:
        UniformService(*values)
    assert raised.value.field == field


def test_bad_arguments() -> None:
    for call in (
        lambda: SMALL.service_s(0),
        lambda: SMALL.throughput(0),
        lambda: SMALL.bins_needed(0),
        lambda: SMALL.latency_s(1, 0),
        lambda: SMALL.service_with_errors_s(0, 0.1),
        lambda: SMALL.service_with_errors_s(2, 0.6),
        lambda: exponential_service_bound_s(0, 2, 2),
    ):
        with pytest.raises(InvalidValueError):
            call()

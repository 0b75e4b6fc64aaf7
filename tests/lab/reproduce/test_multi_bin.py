"""Multi-Bin's theory to the last decimal, and its figures at a size that runs in seconds."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from farsight.core.errors import InvalidValueError
from farsight.policies.batching.multi_bin import uniform_edges
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.traffic.arrivals import AllAtOnce
from lab.reproduce.multi_bin import MULTI_BIN
from lab.reproduce.multi_bin_runs import (
    ACCURACY,
    UniformService,
    confuse,
    errors_run,
    exponential_run,
    exponential_service_bound_s,
    exponential_throughput_bound,
    gsm8k_run,
    neighbour_errors,
    predictor_gains,
    published_confusion,
    serve,
    uniform_run,
)
from lab.reproduce.rows import Row

BY_NAME = {each.name: each for each in MULTI_BIN}


def rows_of(name: str, cell: int) -> list[Row]:
    return BY_NAME[name].cells[cell]()


def test_every_value_of_the_theory_is_exact() -> None:
    rows = rows_of("multibin_theory", 0)
    expected = [row for row in rows if row.expected is not None]
    assert len(expected) > 40
    assert [row for row in expected if row.verdict != "ok"] == []
    # The verdicts look at the numbers: each is near what is expected, and none is near by being empty.
    assert all(row.ours == pytest.approx(row.expected.value, rel=1e-4) for row in expected if row.expected)


def test_of_the_theory_only_what_the_paper_prints_is_reported() -> None:
    printed = {row.setting: row for row in rows_of("multibin_theory", 0) if row.reported is not None}
    assert {setting: str(row.reported) for setting, row in printed.items()} == {
        "Fig 1b, first come": "11",
        "Fig 1b, bins [1, 3], [4, 6]": "8",
        "section 4, B=128, U(1, 20)": "12.3",
    }
    assert printed["section 4, B=128, U(1, 20)"].verdict == "off", "128 / 10.5 is 12.19"
    totals = {row.setting: row.ours for row in printed.values() if row.metric == "total s"}
    assert totals == pytest.approx({"Fig 1b, first come": 11.0, "Fig 1b, bins [1, 3], [4, 6]": 8.0})


def test_the_error_model_is_exact_and_never_worse_than_no_bins() -> None:
    rows = rows_of("multibin_errors", 0)
    assert [row for row in rows if row.verdict != "ok"] == []
    assert sum("analytic" in row.setting for row in rows) == 15


@pytest.mark.nightly
def test_served_throughput_levels_off_where_the_theory_says() -> None:
    theory = UniformService(1, 20, 128)
    ours = [uniform_run(k, 14.0, 12_800).throughput for k in (1, 2, 4)]
    assert ours == sorted(ours)
    for k, throughput in zip((1, 2, 4), ours, strict=True):
        assert throughput == pytest.approx(theory.throughput(k), rel=0.06)


@pytest.mark.nightly
def test_latency_where_a_server_is_free() -> None:
    ours = uniform_run(2, 4.0, 12_800, num_workers=64).latency_s
    assert ours == pytest.approx(UniformService(1, 20, 128).latency_s(2, 4.0), rel=0.04)


@pytest.mark.nightly
def test_more_bins_serve_more_of_the_fitted_lengths() -> None:
    ours = [gsm8k_run(k, 40.0, 3_000).throughput for k in (1, 2, 8)]
    assert ours[0] < ours[1] < ours[2]


@pytest.mark.nightly
def test_wrong_bins_cost_throughput() -> None:
    exact, few, many = (errors_run(4, p, 12_800) for p in (0.0, 0.01, 0.5))
    assert exact > few > many > uniform_run(1, 14.0, 12_800).throughput


@pytest.mark.nightly
def test_exponential_lengths_gain_from_bins() -> None:
    assert exponential_run(3, 16.0, 20_000).throughput > 1.8 * exponential_run(1, 16.0, 20_000).throughput


@pytest.mark.parametrize("num_bins", ACCURACY)
def test_the_published_accuracies_are_in_the_matrix(num_bins: int) -> None:
    matrix = published_confusion(num_bins)
    assert matrix.sum(axis=0) == pytest.approx(np.ones(num_bins))
    assert matrix.sum(axis=1) == pytest.approx(np.ones(num_bins))
    assert (matrix >= 0).all()
    exact, near = ACCURACY[num_bins]
    band = np.abs(np.subtract.outer(np.arange(num_bins), np.arange(num_bins)))
    assert matrix[band == 0].sum() / num_bins == pytest.approx(exact)
    assert matrix[band <= 1].sum() / num_bins == pytest.approx(near)


def test_confusion_draws_what_the_matrix_says() -> None:
    rng = np.random.default_rng(0)
    predicted = confuse(np.full(20_000, 1), neighbour_errors(4, 0.2), rng)
    assert np.bincount(predicted, minlength=4) / 20_000 == pytest.approx([0.2, 0.6, 0.2, 0.0], abs=0.02)


@pytest.mark.nightly
def test_a_predictor_gains_less_than_an_oracle() -> None:
    gains = predictor_gains(num_runs=2)
    assert all(0 < gains[k, False] < gains[k, True] for k in ACCURACY)


def test_the_same_seed_gives_the_same_numbers() -> None:
    lengths = np.arange(1, 101)
    args = (lengths, lengths, (1, 50, 101), 4, AllAtOnce(), A100_7B)
    assert serve(*args) == serve(*args)
    assert uniform_run(2, 8.0, 1_280) == uniform_run(2, 8.0, 1_280)
    assert uniform_run(2, 8.0, 1_280) != uniform_run(2, 8.0, 1_280, seed=4)


SMALL = UniformService(0, 6, 2)
PAPER = UniformService(1, 20, 128)


@pytest.mark.parametrize("num_bins", [1, 2, 5, 16])
def test_without_errors_the_error_model_is_theorem_4_2(num_bins: int) -> None:
    for system in (SMALL, PAPER, UniformService(3, 3, 4), UniformService(1, 9, 1)):
        assert system.service_with_errors_s(num_bins, 0) == pytest.approx(system.service_s(num_bins))
    assert PAPER.service_with_errors_s(1, 0.5) == pytest.approx(PAPER.service_s(1)), "one bin knows no errors"


@pytest.mark.parametrize("short_by", [0.05, 0.3, 1.0, 5.0, 12.0, 100.0])
def test_bins_needed_is_enough_and_one_less_is_not(short_by: float) -> None:
    num_bins = PAPER.bins_needed(short_by)
    wanted = PAPER.max_throughput - short_by
    assert PAPER.throughput(num_bins) >= wanted
    assert num_bins == 1 or PAPER.throughput(num_bins - 1) < wanted


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


def test_bounds_of_exponential_times() -> None:
    """Section 2 examples 4 and 5."""
    assert [exponential_service_bound_s(1, 2, k) for k in (2, 3)] == pytest.approx([1.4055, 1.3404], abs=5e-5)
    bounds = [exponential_throughput_bound(0.1, 200, k) for k in (1, 2, 3, 4, 5)]
    assert bounds == pytest.approx([3.40, 7.22, 9.90, 11.75, 13.05], abs=5e-3)


@pytest.mark.parametrize(
    ("field", "call"),
    [
        ("low_s", lambda: UniformService(-1, 2, 2)),
        ("high_s", lambda: UniformService(3, 2, 2)),
        ("high_s", lambda: UniformService(0, 0, 2)),
        ("batch_size", lambda: UniformService(1, 2, 0)),
        (None, lambda: SMALL.service_s(0)),
        (None, lambda: SMALL.throughput(0)),
        (None, lambda: SMALL.bins_needed(0)),
        (None, lambda: SMALL.latency_s(1, 0)),
        (None, lambda: SMALL.service_with_errors_s(0, 0.1)),
        (None, lambda: SMALL.service_with_errors_s(2, 0.6)),
        (None, lambda: exponential_service_bound_s(0, 2, 2)),
    ],
)
def test_what_means_nothing_is_refused(field: str | None, call: Callable[[], object]) -> None:
    with pytest.raises(InvalidValueError) as raised:
        call()
    assert field in (None, raised.value.field)

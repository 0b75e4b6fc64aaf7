"""The online correction of predicted quantiles."""

from __future__ import annotations

import numpy as np
import pytest

from policies.outlook.calibration import MIN_ALL, WINDOW, OnlineCalibration, Raw, survival_quantile


def test_coverage_holds_whatever_the_prediction_is_wrong_by() -> None:
    rng, calibration = np.random.default_rng(3), OnlineCalibration()
    below = []
    for number in range(4000):
        now = float(10_000 * number)
        raw = Raw(7.0, 8.0, waits=False)  # far too short, and far too sure
        below.append([*calibration.corrected(raw, now)])
        took_s = float(rng.lognormal(3.0, 1.0))
        below[-1] = [took_s <= limit for limit in below[-1]]
        calibration.begin(str(number), raw, now)
        calibration.end(str(number), now + took_s)
    p50, p90 = np.mean(below[WINDOW:], axis=0)
    assert p50 == pytest.approx(0.5, abs=0.03) and p90 == pytest.approx(0.9, abs=0.02)


def test_few_ends_correct_no_median_but_widen_the_interval() -> None:
    calibration = OnlineCalibration()
    assert calibration.corrected(Raw(1.0, 2.0, waits=False), 0.0) == (1.0, 2.0)
    for number in range(MIN_ALL - 1):
        calibration.begin(str(number), Raw(1.0, 2.0, waits=False), 0.0)
        calibration.end(str(number), 50.0)
    assert calibration.corrected(Raw(1.0, 2.0, waits=False), 50.0) == (1.0, 50.0)


@pytest.mark.parametrize(("first", "then"), [(1.0, 10.0), (10.0, 1.0)])
def test_after_a_change_of_load_the_next_hundred_hold_again(first: float, then: float) -> None:
    rng, calibration, raw, now = np.random.default_rng(5), OnlineCalibration(), Raw(10.0, 14.0, waits=False), 0.0
    below = []
    for number in range(700):
        p50_s, p90_s = calibration.corrected(raw, now)
        took_s = 10.0 * (first if number < 500 else then) * float(rng.lognormal(0.0, 0.4))
        below.append((took_s <= p50_s, took_s <= p90_s))
        calibration.begin(str(number), raw, now)
        calibration.end(str(number), now + took_s)
        now += took_s + 1.0
    p50, p90 = np.mean(below[600:], axis=0)
    assert 0.35 <= p50 <= 0.65 and p90 >= 0.85


def test_answers_that_become_late_widen_the_interval_within_a_few() -> None:
    rng, calibration, raw, now = np.random.default_rng(5), OnlineCalibration(), Raw(10.0, 14.0, waits=False), 0.0
    held, widths = [], []
    for number in range(520):
        p50_s, p90_s = calibration.corrected(raw, now)
        took_s = (10.0 if number < 500 else 100.0) * float(rng.lognormal(0.0, 0.4))
        held.append(took_s <= p90_s)
        widths.append(p90_s / p50_s)
        calibration.begin(str(number), raw, now)
        calibration.end(str(number), now + took_s)
        now += took_s + 1.0
    assert np.mean(held[200:500]) == pytest.approx(0.9, abs=0.03) and max(widths[200:500]) < 2.5
    assert not any(held[500:503]) and np.mean(held[503:]) >= 0.7


@pytest.mark.parametrize("waits", [False, True])
def test_an_interval_is_never_narrower_than_what_the_last_hundred_showed(waits: bool) -> None:
    """A prediction of a kind of its own that is sure of itself, after a hundred that were wrong by up to three."""
    calibration = OnlineCalibration()
    spread = np.geomspace(1 / 3, 3.0, 101)[1:]
    for number, factor in enumerate(spread):
        calibration.begin(str(number), Raw(10.0, 40.0, waits=False), 100.0 * number)
        calibration.end(str(number), 100.0 * number + 10.0 * float(factor))
    p50_s, p90_s = calibration.corrected(Raw(150.0, 150.5, waits=waits), 1e5)
    assert p90_s / p50_s >= float(np.quantile(spread, 0.9)) * 0.95


def test_jobs_that_are_past_what_they_were_told_widen_the_next_interval() -> None:
    """151 s were told, and after 400 s no token has come."""
    calibration, raw = OnlineCalibration(), Raw(151.0, 152.0, waits=True)
    for number in range(40):
        calibration.begin(str(number), raw, 0.0)
    for number in range(10):
        calibration.end(str(number), 151.5)
    p50_s, p90_s = calibration.corrected(raw, 400.0)
    assert p50_s == pytest.approx(151.0) and p90_s >= 400.0, "no end has shown more, but thirty are past it"
    for number in range(10, 16):
        calibration.end(str(number), 400.0 + number)
    p50_s, p90_s = calibration.corrected(raw, 420.0)
    assert p90_s >= 400.0


def test_what_a_job_took_before_the_last_hundred_ends_is_the_past() -> None:
    """Left truncation: nine that lasted 100 each began long ago, and say nothing of the first 90."""
    values = np.array([*np.linspace(1.0, 2.0, 11), *[100.0] * 9])
    exact, entered = np.ones(20, np.bool_), np.array([0.0] * 11 + [90.0] * 9)
    assert survival_quantile(values, exact, 0.5) == pytest.approx(1.95, abs=0.1)
    assert survival_quantile(values, exact, 0.5, entered) == pytest.approx(1.5, abs=0.1)


def test_kinds_are_corrected_by_themselves() -> None:
    calibration = OnlineCalibration()
    short, long = Raw(1.0, 2.0, waits=False), Raw(64.0, 90.0, waits=True)
    for number in range(100):
        for name, raw, took_s in (("s", short, 3.0), ("l", long, 32.0)):
            calibration.begin(f"{name}{number}", raw, 0.0)
            calibration.end(f"{name}{number}", took_s)
    assert calibration.corrected(short, 100.0)[0] == pytest.approx(3.0)
    assert calibration.corrected(long, 100.0)[0] == pytest.approx(32.0)


def test_jobs_that_go_on_count_by_their_age() -> None:
    """Half of the jobs take long and none of these has ended: without them the median would be that of the short."""
    calibration, raw = OnlineCalibration(), Raw(10.0, 20.0, waits=False)
    for number in range(200):
        calibration.begin(str(number), raw, 0.0)
        if number % 2:
            calibration.end(str(number), 10.0 + number / 100)
    without = calibration.corrected(raw, 10.0)
    later = calibration.corrected(raw, 500.0)
    assert without[0] == pytest.approx(11.0, abs=0.1)
    assert later[1] >= later[0] >= 11.9


def test_jobs_that_left_before_their_end_say_nothing() -> None:
    calibration, raw = OnlineCalibration(), Raw(10.0, 20.0, waits=False)
    for number in range(100):
        calibration.begin(str(number), raw, 0.0)
        if number % 2:
            calibration.end(str(number), 30.0)
        else:
            calibration.drop(str(number))
    calibration.drop("unknown")
    assert calibration.corrected(raw, 1e6)[0] == pytest.approx(30.0)


def test_quantiles_of_exact_values_are_those_of_the_sample() -> None:
    values = np.arange(1.0, 100.0)
    exact = np.ones(99, np.bool_)
    assert survival_quantile(values, exact, 0.5) == pytest.approx(50.0)
    assert survival_quantile(values, exact, 0.9) == pytest.approx(90.0)

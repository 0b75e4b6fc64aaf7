"""Aggressive admission in tokens."""

from __future__ import annotations

import pytest

from core.errors import InvalidValueError
from policies.admission.watermark import Aggressive
from policies.interfaces import Job


def job(prompt: int, generated: int = 0) -> Job:
    return Job("a", 0.0, prompt, 1000, output_len=generated)


def test_example_1_is_admitted_at_once() -> None:
    """12 tokens are held and 4 come, of 21: in it goes, and two steps later 22 are needed."""
    admission = Aggressive(0.99)
    admission.begin([job(6, 1), job(4, 1)], 21)
    assert admission.admits(job(4))


@pytest.mark.parametrize(
    ("watermark", "held", "new", "admitted"),
    [(0.95, 50, 45, True), (0.95, 50, 46, False), (0.9, 20, 70, True), (0.9, 20, 71, False), (1.0, 50, 50, True)],
)
def test_the_watermark_bounds_what_is_held_now(watermark: float, held: int, new: int, admitted: bool) -> None:
    admission = Aggressive(watermark)
    admission.begin([job(held - 5, 5)], 100)
    assert admission.admits(job(new - 3, 3)) is admitted
    assert admission.reserve(100) == round(100 - 100 * watermark)


def test_an_empty_pool_takes_what_fits_and_added_jobs_count() -> None:
    admission = Aggressive(0.5)
    admission.begin([], 100)
    assert admission.admits(job(100))
    assert not admission.admits(job(101))
    admission.add(job(30))
    assert admission.admits(job(20))
    assert not admission.admits(job(21))
    admission.learn(3, censored=True)
    admission.begin([], 100)
    assert admission.admits(job(100))


@pytest.mark.parametrize("watermark", [0.0, 1.01, -1.0])
def test_bad_parameters_are_refused(watermark: float) -> None:
    with pytest.raises(InvalidValueError, match="watermark"):
        Aggressive(watermark)


def test_the_watermark_is_exact() -> None:
    """0.29 * 100 is a little less than 29 in floating point."""
    assert Aggressive(0.29).reserve(100) == 71

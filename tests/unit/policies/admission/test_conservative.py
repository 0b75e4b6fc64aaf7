"""Conservative admission: the paper's text and LightLLM's weaker form."""

from __future__ import annotations

import numpy as np
import pytest

from core.errors import InvalidValueError
from policies.admission.conservative import Conservative
from policies.admission.past_future import future_memory
from policies.interfaces import Job


def job(prompt: int, limit: int, generated: int = 0) -> Job:
    return Job(f"{prompt} {limit}", 0.0, prompt, limit, output_len=generated)


def test_example_1_waits_until_a_has_ended() -> None:
    """A and B need 9 each in all, C 7: 25 of 21 tokens at t and t+1, 16 at t+2."""
    admission = Conservative()
    for step in (0, 1):
        admission.begin([job(6, 3, 1 + step), job(4, 5, 1 + step)], 21)
        assert admission.predicted_peak == 18
        assert not admission.admits(job(4, 3))
    admission.begin([job(4, 5, 3)], 21)
    assert admission.admits(job(4, 3))
    admission.add(job(4, 3))
    assert admission.predicted_peak == 16


def test_with_releases_it_is_past_future_with_every_limit_reached() -> None:
    admission = Conservative(counts_releases=True)
    admission.begin([job(6, 3, 1), job(4, 5, 1)], 21)
    assert not admission.admits(job(4, 3))
    admission.begin([job(6, 3, 2), job(4, 5, 2)], 21)
    assert admission.admits(job(4, 3))
    admission.add(job(4, 3))
    assert admission.predicted_peak == 21


@pytest.mark.parametrize(("overcommit", "prompt"), [(1.0, 70), (1.5, 120), (0.8, 50)])
@pytest.mark.parametrize("counts_releases", [False, True])
def test_overcommit_multiplies_the_pool(overcommit: float, prompt: int, counts_releases: bool) -> None:
    admission = Conservative(overcommit, counts_releases=counts_releases)
    admission.begin([job(10, 10)], 100)
    assert admission.admits(job(prompt, 10))
    assert not admission.admits(job(prompt + 1, 10))
    assert admission.reserve(100) == max(0, round(100 - 100 * overcommit))


@pytest.mark.parametrize("counts_releases", [False, True])
def test_into_an_empty_batch_goes_what_can_make_a_step(counts_releases: bool) -> None:
    admission = Conservative(counts_releases=counts_releases)
    admission.begin([], 21)
    assert admission.admits(job(20, 500))
    assert not admission.admits(job(21, 1))
    admission.add(job(20, 500))
    assert not admission.admits(job(1, 1))


def test_releases_never_ask_for_more_and_adding_is_beginning_with_more() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        jobs = [job(int(rng.integers(1, 50)), int(rng.integers(20, 90)), int(rng.integers(0, 20))) for _ in range(8)]
        text, peak = Conservative(), Conservative(counts_releases=True)
        for admission in (text, peak):
            admission.begin(jobs[:3], 400)
            for each in jobs[3:]:
                admission.add(each)
        base = np.array([each.known_len for each in jobs])
        remaining = np.array([each.max_new_tokens - each.output_len for each in jobs])
        assert text.predicted_peak == (base + remaining).sum()
        assert peak.predicted_peak == future_memory(base, remaining) <= text.predicted_peak


def test_it_learns_nothing_and_refuses_bad_parameters() -> None:
    admission = Conservative()
    admission.learn(5, censored=False)
    admission.begin([job(10, 10)], 100)
    assert admission.predicted_peak == 20
    for overcommit in (0.0, -1.0, float("nan")):
        with pytest.raises(InvalidValueError, match="overcommit"):
            Conservative(overcommit)


def test_the_overcommit_is_exact() -> None:
    """1.15 * 100 is a little less than 115 in floating point."""
    admission = Conservative(1.15)
    admission.begin([Job("a", 0.0, 10, 5)], 100)
    assert admission.admits(Job("new", 0.0, 50, 50))
    assert not admission.admits(Job("larger", 0.0, 51, 50))

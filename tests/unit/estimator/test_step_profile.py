"""The profile finds the prices of a made-up machine, follows it when it changes and shrugs off hiccups."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from typing import Any

import numpy as np
import pytest

from farsight.core.costs import StepCost, attention_pairs
from farsight.core.errors import InvalidValueError
from farsight.core.messages.step_times import StepSample
from farsight.estimator.step_profile import (
    MIN_SAMPLES,
    OUTLIER_FACTOR,
    SMALLEST_CHUNK,
    StepLimits,
    StepProfile,
    StepShape,
    step_grid,
)
from farsight.kvcache import StepBatch, StepItem
from farsight.kvcache.step_batch import step_sample
from tests.volumes import at_volume

TRUE = StepCost(4e-3, 2e-5, 1e-4, 3e-8, 1e-8)
"""A step of 4 ms, 20 us a prefill token, 100 us a decoding sequence, 30 ns a context token, 10 ns a prefill pair."""

WORK = (512, 16, 40_000, attention_pairs(512, 1000))


def steps(num: int, seed: int = 0, noise: float = 0.05, prefill: bool = True, factor: float = 1.0) -> list[StepSample]:
    """Mixed steps of a machine with the prices ``factor`` x ``TRUE`` and a relative noise."""
    rng = np.random.default_rng(seed)
    # The formulas are written for numbers and hold for arrays as well.
    decode_seqs: Any = rng.integers(1, 64, num)
    prefill_tokens: Any = rng.integers(1, 1024, num) * (rng.random(num) < 0.3) * prefill
    starts: Any = rng.integers(0, 2000, num)
    prefill_pairs: Any = attention_pairs(prefill_tokens, starts)
    context_tokens = decode_seqs * rng.integers(10, 4000, num)
    durations_s: Any = factor * TRUE.step_s(prefill_tokens, decode_seqs, context_tokens, prefill_pairs)
    durations_s *= 1 + noise * rng.uniform(-1, 1, num)
    columns = (prefill_tokens, decode_seqs, context_tokens, durations_s, prefill_pairs)
    return [StepSample(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def prices(profile: StepProfile) -> tuple[float, ...]:
    cost = profile.cost()
    assert cost is not None and astuple(cost) == profile.coefficients()
    return astuple(cost)


def sample(duration_s: float) -> StepSample:
    """``WORK`` that took so long."""
    prefill_tokens, decode_seqs, context_tokens, prefill_pairs = WORK
    return StepSample(prefill_tokens, decode_seqs, context_tokens, duration_s, prefill_pairs)


def time_s(profile: StepProfile, work: tuple[int, ...] = WORK) -> float:
    value = profile.step_time_s(*work)
    assert value is not None
    return value


def test_nothing_is_said_before_enough_was_measured() -> None:
    profile = StepProfile()
    assert StepProfile().coefficients() == (0, 0, 0, 0, 0)
    profile.observe([])
    profile.observe([sample(duration_s) for duration_s in (0.0, -1.0, math.nan, math.inf)])  # cannot be: passed over
    profile.observe(steps(MIN_SAMPLES - 1))
    assert profile.step_time_s(*WORK) is None
    assert profile.cost() is None
    profile.observe(steps(1, seed=1))
    assert profile.step_time_s(*WORK) == pytest.approx(TRUE.step_s(*WORK), rel=0.1)
    with pytest.raises(InvalidValueError, match="window"):
        StepProfile(0)


def test_nothing_is_said_of_a_device_that_has_only_seen_prompts() -> None:
    prompts = [StepSample(100 * n, 0, 0, 1e-3 * n, 0) for n in range(1, MIN_SAMPLES + 1)]
    profile = StepProfile()
    profile.observe(prompts)
    assert profile.num_samples == MIN_SAMPLES and profile.coefficients()[1] > 0
    assert profile.cost() is None, "a decode would take no time"
    profile.observe([StepSample(0, 8, 4000, 0.02)] * 5)
    cost = profile.cost()
    assert cost is not None and cost.step_s(0, 8, 4000) > 0.01


@pytest.mark.parametrize(("at_once", "noise"), [(1, 0.05), (7, 0.05), (5000, 0.05), (7, 0)])
def test_the_prices_are_recovered_however_the_steps_come(at_once: int, noise: float) -> None:
    profile = StepProfile()
    samples = steps(3000, noise=noise)
    for start in range(0, len(samples), at_once):
        profile.observe(samples[start : start + at_once])
    assert profile.num_samples == 3000
    assert prices(profile) == pytest.approx(astuple(TRUE), rel=0.1 if noise else 1e-3)


@pytest.mark.parametrize(("duration_s", "error"), [(10 * TRUE.step_s(*WORK), 0.01), (3600.0, 0.02), (1e-9, 0.05)])
def test_a_single_step_far_off_hardly_shows(duration_s: float, error: float) -> None:
    """A short step weighs more than a long one; one of a nanosecond would outweigh all others."""
    profile = StepProfile()
    profile.observe(steps(2000))
    before_s = time_s(profile)
    profile.observe([sample(duration_s)])
    assert time_s(profile) == pytest.approx(before_s, rel=error)


def test_an_outlier_counts_as_a_fixed_multiple_of_its_prediction() -> None:
    as_measured, as_clipped = StepProfile(), StepProfile()
    for profile in (as_measured, as_clipped):
        profile.observe(steps(2000))
    limit_s = OUTLIER_FACTOR * time_s(as_clipped)
    as_measured.observe([sample(3600.0)])
    as_clipped.observe([sample(limit_s)])
    assert as_measured.coefficients() == as_clipped.coefficients()


def test_many_hiccups_move_it_less_than_they_weigh() -> None:
    """Each 50th step takes ten times as long: a mean of 1.18, of which the cut leaves 1.04 and the weights nothing."""
    profile = StepProfile()
    profile.observe(steps(100))
    slow = [replace(s, duration_s=s.duration_s * (10 if i % 50 == 0 else 1)) for i, s in enumerate(steps(5000, seed=1))]
    profile.observe(slow)
    assert time_s(profile) == pytest.approx(TRUE.step_s(*WORK), rel=0.03)


@pytest.mark.parametrize("factor", [0.2, 2.0, 20.0])
def test_it_follows_a_machine_that_became_slower_or_faster(factor: float) -> None:
    profile = StepProfile(window=500)
    profile.observe(steps(3000))
    profile.observe(steps(10_000, seed=1, factor=factor))
    assert time_s(profile) == pytest.approx(factor * TRUE.step_s(*WORK), rel=0.05)


def test_work_of_a_new_kind_is_believed_at_once() -> None:
    """The first prompts after a long time of decoding alone are no outliers, however long they take."""
    profile = StepProfile()
    profile.observe(steps(2000, prefill=False))
    assert profile.coefficients()[1] == 0
    profile.observe([s for s in steps(100, seed=1) if s.prefill_tokens > 500])
    assert profile.coefficients()[1] == pytest.approx(TRUE.prefill_token_s, rel=0.1)
    assert profile.coefficients()[4] == pytest.approx(TRUE.prefill_pair_s, rel=0.1)


def test_a_price_that_is_not_measured_any_more_is_kept() -> None:
    profile = StepProfile(window=100)
    profile.observe(steps(2000))
    price = profile.coefficients()[1]
    profile.observe(steps(20_000, seed=1, prefill=False))
    assert profile.coefficients()[1] == pytest.approx(price, rel=0.05)


@at_volume(50_000, 1_000_000)
def test_it_stays_sound_over_many_steps_that_never_vary(volume: int) -> None:
    profile = StepProfile(window=100)
    profile.observe([StepSample(0, 8, 8000, 0.01)] * volume)
    assert profile.num_samples == volume
    assert time_s(profile, (0, 8, 8000)) == pytest.approx(0.01)
    assert all(math.isfinite(each) and each >= 0 for each in profile.coefficients())
    profile.observe(steps(2000))
    assert prices(profile) == pytest.approx(astuple(TRUE), rel=0.2), "and still learns"


@pytest.mark.parametrize("size", [1, 10**9])
def test_it_stays_sound_with_features_of_any_size(size: int) -> None:
    profile = StepProfile()
    for i in range(1000):
        profile.observe([StepSample(size * (i % 3), size * (i % 5), size * (i % 7), 0.01 + 0.001 * (i % 5))])
    assert all(math.isfinite(each) and each >= 0 for each in profile.coefficients())
    assert time_s(profile, (0, 4 * size, 0)) == pytest.approx(0.014, rel=0.05)


def test_no_step_is_said_to_be_shorter_than_the_shortest_measured() -> None:
    profile = StepProfile()
    profile.observe([StepSample(0, n, 0, 0.001 * n) for n in range(10, 60)])
    assert time_s(profile, (0, 1, 0)) == 0.01
    assert time_s(profile, (0, 20, 0)) == pytest.approx(0.02, rel=0.01)


def test_more_work_never_takes_less_time() -> None:
    """Steps that get shorter with their context: the best fit would be negative far out."""
    profile = StepProfile()
    profile.observe([StepSample(0, 1, 1000 * n, 0.1 - 0.001 * n) for n in range(1, 60)] * 10)
    assert min(profile.coefficients()) >= 0
    assert time_s(profile, (0, 1, 10**7)) >= time_s(profile, (0, 1, 1000)) > 0.04


def test_short_steps_are_not_given_up_for_long_ones_that_were_interrupted() -> None:
    """Prompts of 100 ms beside decoding, some three times as long; least squares of seconds would lose the decodes."""
    rng = np.random.default_rng(0)
    seqs = rng.integers(1, 32, 4000).tolist()
    decodes = [StepSample(0, n, 100 * n, 1e-4 + 1e-5 * n) for n in seqs[:2000]]
    prompts = [
        StepSample(512, n, 100 * n, 0.1 * float(rng.uniform(1, 3)), attention_pairs(512, 0)) for n in seqs[2000:]
    ]
    mixed = [step for pair in zip(decodes, prompts, strict=True) for step in pair]
    profile = StepProfile()
    profile.observe(mixed)
    for num_seqs in (1, 8, 31):
        assert time_s(profile, (0, num_seqs, 100 * num_seqs)) == pytest.approx(1e-4 + 1e-5 * num_seqs, rel=0.05)


def test_a_prompt_is_the_dearer_the_more_context_it_has() -> None:
    """ex: 4 tokens after 10 attend to 11, 12, 13 and 14 tokens."""
    assert attention_pairs(4, 10) == 11 + 12 + 13 + 14
    cost = StepCost(1.0, 10.0, 0.0, 0.0, 100.0)
    assert cost.prefill_s(4, 10) == 1 + 4 * 10 + 50 * 100
    assert cost.prefill_s(2) == 1 + 2 * 10 + 3 * 100
    profile = StepProfile()
    profile.observe(steps(2000))
    learned = profile.cost()
    assert learned is not None
    assert learned.prefill_s(512, 1500) == pytest.approx(TRUE.prefill_s(512, 1500), rel=0.05)
    assert learned.prefill_s(512, 1500) > 1.4 * learned.prefill_s(512)


def test_what_a_step_did() -> None:
    """A chunk of 4 tokens from position 10, a prompt of 2 and sequences that decode at lengths 8 and 20."""
    items = (StepItem("a", 10, 4, True, []), StepItem("b", 7, 1, True, []), StepItem("c", 0, 2, False, []))
    batch = StepBatch((*items, StepItem("d", 19, 1, True, [])))
    assert step_sample(batch, 0.5) == StepSample(6, 2, 8 + 20, 0.5, 50 + 3)


USUAL = StepLimits(max_num_seqs=128, max_batch_tokens=1024, max_model_len=2048, block_size=32, num_blocks=8192)


def features(grid: list[StepShape]) -> np.ndarray:
    rows = []
    for shape in grid:
        new = sum(num for _, num in shape.chunks)
        pairs = sum(attention_pairs(num, start) for start, num in shape.chunks)
        rows.append((1, new, len(shape.contexts), sum(shape.contexts), pairs))
    return np.array(rows, dtype=float)


def test_what_is_worth_measuring() -> None:
    grid = step_grid(USUAL)
    assert len(grid) == len(set(grid)) and 50 <= len(grid) <= 150
    assert StepShape(chunks=((0, 1024),)) in grid and StepShape(chunks=((1024, 1024),)) in grid
    assert StepShape(contexts=(SMALLEST_CHUNK,)) in grid and StepShape(contexts=(2047,) * 128) in grid
    assert any(shape.chunks and shape.contexts for shape in grid)
    found = features(grid)
    assert np.linalg.matrix_rank(found / found.max(axis=0)) == 5, "every price can be told from the others"


@pytest.mark.parametrize(
    "limits",
    [
        USUAL,
        replace(USUAL, num_blocks=70),
        replace(USUAL, max_batch_tokens=16),
        replace(USUAL, max_num_seqs=1),
        replace(USUAL, max_num_seqs=5, max_model_len=33, block_size=1),
        StepLimits(1, SMALLEST_CHUNK, SMALLEST_CHUNK, 1, SMALLEST_CHUNK),
    ],
)
def test_no_step_is_more_than_the_worker_can_do(limits: StepLimits) -> None:
    grid = step_grid(limits)
    assert grid
    for shape in grid:
        assert 1 <= len(shape.ends) <= limits.max_num_seqs
        assert max(shape.ends) <= limits.max_model_len
        assert all(num >= 2 and start >= 0 for start, num in shape.chunks)
        assert sum(num for _, num in shape.chunks) + len(shape.contexts) <= limits.max_batch_tokens
        assert sum(-(-end // limits.block_size) for end in shape.ends) <= limits.num_blocks

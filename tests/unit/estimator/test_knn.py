"""Batch times: neighbours are the right ones, learning follows the paper's rule, the artefact is what it was."""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.core.learning import ErrorRule
from farsight.estimator.knn import (
    MAX_BATCHES,
    MIN_BATCHES,
    PERIOD_S,
    RULE,
    BatchLearning,
    BatchTimes,
    ServedBatch,
    padded_batch_s,
)
from farsight.policies.settings import ServingTime

COST = StepCost(base_s=0.01, prefill_token_s=1e-4, decode_seq_s=1e-3, context_token_s=1e-6, prefill_pair_s=1e-8)


def served(num: int, seed: int = 0, speed: float = 1.0) -> list[ServedBatch]:
    """Batches of a machine that takes ``speed`` times what ``COST`` says, give or take a twentieth."""
    rng = np.random.default_rng(seed)
    columns = (rng.integers(1, 33, num), rng.integers(10, 1025, num), rng.integers(1, 1025, num))
    batches = []
    for size, prompt, output in zip(*(column.tolist() for column in columns), strict=True):
        took_s = speed * padded_batch_s(COST, size, prompt, output) * rng.uniform(0.95, 1.05)
        batches.append(ServedBatch(size, prompt, output, took_s))
    return batches


def observe(times: BatchTimes, batches: list[ServedBatch]) -> BatchTimes:
    for batch in batches:
        times.observe(batch)
    return times


def by_hand(batches: list[ServedBatch], size: int, prompt: int, output: int) -> float:
    rows = np.array([(b.batch_size, b.prompt_len, b.output_len, b.duration_s) for b in batches], dtype=float)
    spread = rows[:, :3].std(axis=0)
    distance = (((rows[:, :3] - (size, prompt, output)) / np.where(spread, spread, 1)) ** 2).sum(axis=1)
    return float(rows[np.argsort(distance)[:5], 3].mean())


def test_a_batch_by_its_steps() -> None:
    """ex: 2 prompts of 3 tokens and 4 outputs: a prefill of 6 tokens and 12 pairs, then contexts of 8, 10 and 12."""
    expected = COST.step_s(6, 0, 0, 12) + sum(COST.step_s(0, 2, context) for context in (8, 10, 12))
    assert padded_batch_s(COST, 2, 3, 4) == pytest.approx(expected, rel=1e-12)
    assert padded_batch_s(COST, 2, 3, 1) == COST.step_s(6, 0, 0, 12)


def test_steps_are_added_up_until_enough_batches_are_known() -> None:
    times: ServingTime = BatchTimes(COST, served(MIN_BATCHES - 1))
    assert times(4, 100, 200) == padded_batch_s(COST, 4, 100, 200)
    times = BatchTimes(COST)
    dearer = StepCost(1.0, 0.0, 0.0, 0.0)
    times.price(dearer)
    assert times(4, 100, 200) == padded_batch_s(dearer, 4, 100, 200) == 200


def test_then_it_is_the_mean_of_the_five_nearest() -> None:
    batches = served(MIN_BATCHES)
    times = BatchTimes(StepCost(99.0, 0.0, 0.0, 0.0), batches)
    rng = np.random.default_rng(1)
    for _ in range(50):
        query = (int(rng.integers(1, 33)), int(rng.integers(10, 1025)), int(rng.integers(1, 1025)))
        assert times(*query) == pytest.approx(by_hand(batches, *query), rel=1e-9)
    alike = [ServedBatch(8, 100, 1 + i, 1.0 + i) for i in range(MIN_BATCHES)]
    assert BatchTimes(COST, alike)(8, 100, 101) == pytest.approx(101.0), "what never varies does not matter"
    assert BatchTimes(COST, [ServedBatch(1, 1, 1, 1.0)] * (MAX_BATCHES + 5)).num_batches == MAX_BATCHES


def test_at_first_every_batch_is_learned_when_it_is_time() -> None:
    times = observe(BatchTimes(COST), served(MIN_BATCHES))
    assert times.learn(500.0) == 0, "the first period begins"
    assert times.learn(500.0 + PERIOD_S - 1) == 0
    assert times.learn(500.0 + PERIOD_S) == MIN_BATCHES == times.num_batches
    assert times(8, 100, 200) == pytest.approx(by_hand(served(MIN_BATCHES), 8, 100, 200))
    assert times.learn(500.0 + 2 * PERIOD_S) == 0, "nothing is learned twice"


def test_later_only_what_was_estimated_badly() -> None:
    """All known batches took 10 s, so that is what is estimated: 13 s is learned, 12 s and 11.9 s are not."""
    known = [ServedBatch(1 + i % 8, 10 + i, 10 + i, 10.0) for i in range(MIN_BATCHES)]
    times = observe(BatchTimes(COST, known), [ServedBatch(4, 50, 50, took_s) for took_s in (13.0, 12.0, 11.9, 7.9)])
    times.learn(0.0)
    assert times.learn(PERIOD_S) == 2
    assert not RULE.is_wrong(20, 22.5), "less than a fifth of it"
    assert times.num_batches == MIN_BATCHES + 2


def test_those_beyond_the_first_are_judged_by_the_steps() -> None:
    """With no neighbours yet: the first fill up what is lacking, of the others those that the steps get wrong."""
    right = ServedBatch(8, 512, 512, padded_batch_s(COST, 8, 512, 512))
    wrong = ServedBatch(8, 512, 512, 2 * right.duration_s)
    times = observe(BatchTimes(COST), [right] * MIN_BATCHES + [right, wrong, right])
    times.learn(0.0)
    assert times.learn(PERIOD_S) == MIN_BATCHES + 1


def test_learning_makes_a_slower_machine_known() -> None:
    times = BatchTimes(COST, served(500))
    slow = served(1500, seed=2, speed=3.0)
    times.learn(0.0)
    rmses = []
    for period in range(4):
        test = served(100, seed=3, speed=3.0)
        rmses.append(
            math.sqrt(np.mean([(times(b.batch_size, b.prompt_len, b.output_len) - b.duration_s) ** 2 for b in test]))
        )
        observe(times, slow[500 * period : 500 * (period + 1)])
        times.learn((period + 1) * PERIOD_S)
    assert rmses[-1] < 0.6 * rmses[0]
    assert rmses == sorted(rmses, reverse=True)


@pytest.mark.parametrize("num", [0, 3, MIN_BATCHES, 1000])
def test_the_artefact_gives_the_same_estimates_and_the_same_bytes(num: int) -> None:
    times = BatchTimes(COST, served(num))
    data = times.to_bytes()
    again = BatchTimes.from_bytes(data, COST)
    assert again.num_batches == num and again.to_bytes() == data == BatchTimes(COST, served(num)).to_bytes()
    for query in ((1, 10, 10), (32, 1024, 1024), (7, 300, 20)):
        assert again(*query) == times(*query)


def _rewritten(change: Callable[[dict[str, np.ndarray]], object]) -> bytes:
    with np.load(io.BytesIO(BatchTimes(COST, served(3)).to_bytes())) as file:
        arrays = {name: file[name].copy() for name in file.files}
    change(arrays)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _bomb() -> bytes:
    """Returns a small file whose rows unpack to 10 MB."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, schema=np.array([1]), rows=np.zeros((312_500, 4)), checksum=np.zeros(32, np.uint8))
    return buffer.getvalue()


DAMAGED = {
    "nothing": (b"", "an artefact of batch times"),
    "noise": (b"\x80\x04K\x01.", "an artefact of batch times"),
    "cut off": (BatchTimes(COST, served(3)).to_bytes()[:-40], "an artefact of batch times"),
    "a row changed": (_rewritten(lambda arrays: arrays["rows"].__setitem__((1, 3), 7.0)), "checksum: got"),
    "a row lost": (_rewritten(lambda arrays: arrays.update(rows=arrays["rows"][1:])), "checksum: got"),
    "another schema": (_rewritten(lambda arrays: arrays.update(schema=np.array([2]))), r"schema: got \[2\]"),
    "an array lost": (_rewritten(lambda arrays: arrays.pop("checksum")), "an artefact of batch times"),
    "a bomb": (_bomb(), "3 arrays of 10000[0-9]* bytes; at most 3 and 164096 are read"),
    "an array too many": (_rewritten(lambda arrays: arrays.update(more=arrays["rows"])), "4 arrays of"),
    "a pickle": (_rewritten(lambda arrays: arrays.update(rows=np.array([{}, 1]))), "an artefact of batch times"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_artefact_is_refused(case: str) -> None:
    data, message = DAMAGED[case]
    with pytest.raises(InvalidValueError, match=message):
        BatchTimes.from_bytes(data, COST)


@pytest.mark.parametrize(
    ("field", "value"),
    [("batch_size", 0), ("prompt_len", 0), ("output_len", -1), ("duration_s", 0.0), ("duration_s", math.nan)],
)
def test_a_batch_that_cannot_be_is_refused(field: str, value: float) -> None:
    wrong: dict[str, Any] = {field: value}
    with pytest.raises(InvalidValueError, match=field):
        dataclasses.replace(ServedBatch(1, 1, 1, 1.0), **wrong)


def test_an_estimate_is_the_mean_of_as_many_neighbours_as_told() -> None:
    batches = [ServedBatch(4, 100, 10 + i, float(i + 1)) for i in range(MIN_BATCHES)]
    assert BatchTimes(COST, batches, BatchLearning(num_neighbours=1))(4, 100, 10) == 1.0
    again = BatchTimes.from_bytes(BatchTimes(COST, batches).to_bytes(), COST, BatchLearning(num_neighbours=3))
    assert again(4, 100, 10) == pytest.approx(2.0)


def test_when_and_from_what_it_learns_is_told() -> None:
    """A batch of 0.5 s that took 1 s is off by half: learned from where that counts, and after 10 s instead of 120."""
    known = [ServedBatch(4, 100, 10, 0.5) for _ in range(MIN_BATCHES)]
    usual, keen = BatchTimes(COST, known), BatchTimes(COST, known, BatchLearning(3, 10.0, ErrorRule(0.2, 0.2)))
    for times in (usual, keen):
        times.learn(0.0)
        times.observe(ServedBatch(4, 100, 10, 1.0))
    assert (usual.learn(10.0), keen.learn(10.0)) == (0, 1)
    assert (usual.learn(120.0), usual.num_batches, keen.num_batches) == (0, MIN_BATCHES, MIN_BATCHES + 1)

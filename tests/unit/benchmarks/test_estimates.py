"""The benchmark of estimates finds nothing wrong with a machine that does what the models say, and what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.estimates import EMBEDDED_MODEL, EstimateBench, Timed, applications, batch_rows, independent, step_rows
from core.costs import StepCost, attention_pairs
from core.messages.step_times import StepSample
from estimator.knn import ServedBatch, padded_batch_s

COST = StepCost(1e-3, 1e-5, 1e-4, 1e-7, 1e-8)


def steps(num: int, seed: int) -> list[Timed]:
    """Half of them prompts; wall time is what ``COST`` says, CPU time half as much."""
    rng = np.random.default_rng(seed)
    timed = []
    for i in range(num):
        new = int(rng.integers(2, 500)) if i % 2 else 0
        seqs = int(rng.integers(1, 60))
        work = new, seqs, seqs * int(rng.integers(1, 500)), attention_pairs(new, int(rng.integers(500)))
        took_s = COST.step_s(*work)
        timed.append(Timed(StepSample(work[0], work[1], work[2], took_s, work[3]), took_s / 2))
    return timed


@pytest.mark.parametrize("clock", ["wall", "cpu"])
def test_a_machine_that_is_a_plane_is_foretold(clock: str) -> None:
    rows = list(step_rows(steps(200, 0), steps(400, 1), clock))
    assert [row["num"] for row in rows[:3]] == [400, 200, 200]
    assert max(row["p90"] for row in rows) < 0.01


def test_errors_are_of_what_was_not_learned() -> None:
    """From step 200 on all takes twice as long: neither the grid nor what was heard before knows."""
    slow = [replace(each, of=replace(each.of, duration_s=2 * each.of.duration_s)) for each in steps(400, 1)]
    rows = {row["estimate"]: row for row in step_rows(steps(200, 0), slow, "wall")}
    assert rows["steps: profile of a grid"]["median"] == pytest.approx(0.5, abs=0.01)
    assert rows["steps: profile learned meanwhile"]["median"] < 0.01


def test_batches_are_judged_by_the_last_quarter() -> None:
    rng = np.random.default_rng(0)
    batches = []
    for i in range(400):
        shape = independent(rng)
        took_s = padded_batch_s(COST, *shape) * (3 if i >= 300 else 1)
        batches.append(Timed(ServedBatch(*shape, took_s), took_s))
    neighbours, added = batch_rows("x", batches, COST, "wall")
    assert neighbours["num"] == added["num"] == 100
    assert added["median"] == pytest.approx(2 / 3) and 0.55 < neighbours["median"] < 0.75


def test_batches_run_and_are_as_they_were_drawn() -> None:
    bench = EstimateBench(EMBEDDED_MODEL, scale=0.005)
    for draw in (independent, applications):
        for batch in bench.batches(draw):
            assert batch.cpu_s > 0 and batch.of.duration_s > 0
            assert 1 <= batch.of.batch_size <= 16 and 8 <= batch.of.prompt_len <= 400

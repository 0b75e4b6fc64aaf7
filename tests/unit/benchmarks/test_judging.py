"""How benchmarks judge what they have measured, on figures made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.counterfactuals import Answers
from benchmarks.estimates import EMBEDDED_MODEL, EstimateBench, Timed, applications, batch_rows, independent, step_rows
from benchmarks.frameworks import GOODPUT, THROUGHPUT, rows
from benchmarks.promises import add_promises, read_promises, shares
from farsight.core.costs import StepCost, attention_pairs
from farsight.core.messages.step_times import StepSample
from farsight.estimator.knn import ServedBatch, padded_batch_s


def answers(was_s: list[float], found_s: list[float], truth_s: list[float]) -> Answers:
    same = np.ones(len(was_s))
    return Answers(np.array(was_s), np.array(found_s), np.array(truth_s), same, same, same)


def test_errors_are_of_the_truth_and_directions_count_where_it_differs_by_a_tenth() -> None:
    assert answers([1.0] * 3, [1.0, 2.2, 30.0], [2.0, 2.0, 20.0]).median_error == pytest.approx(0.5)
    share, count = answers([1.0] * 4, [1.5, 0.5, 0.5, 3.0], [1.2, 1.3, 0.8, 1.05]).right_direction()
    assert share == pytest.approx(2 / 3) and count == 3
    none, count = answers([1.0], [2.0], [1.05]).right_direction()
    assert math.isnan(none) and count == 0


def test_parts_of_a_measurement_of_promises_add_up(tmp_path: Path) -> None:
    path = tmp_path / "promises.jsonl"
    assert read_promises(path) == []
    add_promises(path, [(1.0, 2.0, 0.5), (1.0, 2.0, 1.5)])
    add_promises(path, [(1.0, 2.0, 3.0)])
    assert read_promises(path) == [(1.0, 2.0, 0.5), (1.0, 2.0, 1.5), (1.0, 2.0, 3.0)]
    told = [(1.0, 2.0, took_s) for took_s in (0.5, 1.0, 1.5, 2.0, 4.0)]
    assert shares(told) == (
        "5 promises: between p50 and p90 40.0 %, up to p90 80.0 %, median error of p50 0.50 s of 1.50 s"
    )


def target(label: str, goodput: float, num_runs: int = 3) -> dict[str, object]:
    return {"label": label, "runs": [{"metrics": {GOODPUT: goodput, THROUGHPUT: 100.0}}] * num_runs}


def test_the_larger_goodput_is_ours_or_not() -> None:
    report = {
        "peer": "vllm",
        "cases": [
            {"load": 8, "targets": [target("vllm", 1.0), target("farsight", 2.0)]},
            {"load": 24, "targets": [target("vllm", 2.0), target("farsight", 1.0)]},
        ],
    }
    found = {(row.setting, row.metric): row for row in rows(report)}
    assert len(found) == 10
    assert found["8 clients, over vllm", "goodput, Farsight less it, requests/s"].ours == 1.0
    verdicts = [
        found[f"{clients} clients, over vllm", "goodput, Farsight less it, requests/s"].verdict for clients in (8, 24)
    ]
    assert verdicts == ["ok", "off"]
    for num_runs, verdict in ((3, "ok"), (1, "open")):  # one run tells no order
        targets = [target("x", 0.0, num_runs), target("farsight", 0.5, num_runs)]  # a peer that meets no bound
        assert list(rows({"peer": "x", "cases": [{"load": 1, "targets": targets}]}))[-1].verdict == verdict


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

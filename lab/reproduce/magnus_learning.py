"""Magnus, Table I and the second half of Figure 14: what lengths tell, and an estimator of serving times that learns.

The texts are the eight tasks of ``apps_text.jsonl.gz`` with reference outputs, where the paper has the answers of
three models. The other half of Figure 14, and Table II, need trained predictors: ``benchmarks.magnus_predictors``.

The estimator is the one that serves (``BatchTimes``). It begins with 200 batches measured at half the load, takes the
batches of a run of Magnus as they end, and learns every two minutes. Errors are of its estimate with the true longest
output of each batch, before it has learned from it.
"""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np

from core.costs import StepCost
from estimator.knn import MIN_BATCHES, PERIOD_S, BatchTimes, ServedBatch
from lab.reproduce.magnus_systems import CORRELATION, batches_served, draw_requests, load_pool
from lab.reproduce.rows import EXACT, Exempt, OrderCheck, Printed, Reproduction, Row, near
from policies.fleet.events import BatchEnded
from simulator.traffic.traces import MissingTraceError, count_tokens, find_data, read_rows

TEXTS = "apps_text.jsonl.gz"
STEPS_AT_ONCE = 5
"""Periods of learning that one point of the curve covers."""


def table_1() -> list[Row]:
    """Pearson's coefficient of user input and output length by application; ours of reference outputs."""
    name = "magnus_lengths"
    try:
        rows = [row.values for row in read_rows(find_data(TEXTS))]
    except MissingTraceError as problem:
        return [Row(name, "all", "correlation", Exempt(str(problem)), math.nan)]
    lens: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        lens[row["app"]].append((count_tokens(row["user_input"]), count_tokens(row["output"])))
    found = []
    for app, printed in CORRELATION.items():
        ours = float(np.corrcoef(np.array(lens[app]).T)[0, 1])
        note = "within 0.1; reference outputs for ChatGLM-6B's"
        found.append(Row(name, app, "correlation of lengths", Printed(near(printed, points=0.1)), ours, note))
    above = sum(float(row.ours) > 0.8 for row in found)
    most = OrderCheck(above > len(found) / 2)
    return [*found, Row(name, "all", "applications above 0.8", most, above, "most, as the text says", EXACT)]


def estimator_learning(num_requests: int = 20_000, rate: float = 6.0) -> list[Row]:
    """Figure 14, serving times: the error of each two minutes of batches, ten minutes a point."""
    name = "magnus_learning"
    try:
        pool = load_pool()
    except MissingTraceError as problem:
        return [Row(name, "estimator", "RMSE s", Exempt(str(problem)), math.nan)]
    before = batches_served(draw_requests(pool, rate / 2, num_requests // 8, seed=7))
    served = batches_served(draw_requests(pool, rate, num_requests))
    # The step cost is never asked: enough batches are known from the beginning.
    estimator = BatchTimes(StepCost(0.0, 0.0, 0.0, 0.0), [_served(each) for _, each in before[:MIN_BATCHES]])
    points = _errors(estimator, served)
    rows = []
    for number, error_s in enumerate(points):
        at = f"estimator, minute {round(number * STEPS_AT_ONCE * PERIOD_S / 60)}"
        rows.append(Row(name, at, "RMSE s", Exempt("drawn in the figure, not printed"), error_s))
    first, last = points[0], float(np.mean(points[len(points) // 2 :]))
    note = "order: learning lowers it"
    rows.append(
        Row(
            name,
            "estimator, second half / first point",
            "RMSE ratio",
            OrderCheck(last < first, bound=1.0),
            last / first,
            note,
        )
    )
    return rows


def _errors(estimator: BatchTimes, served: list[tuple[float, BatchEnded]]) -> list[float]:
    """RMSE of each point of the curve, in seconds."""
    span_s = STEPS_AT_ONCE * PERIOD_S
    squares: dict[int, list[float]] = defaultdict(list)
    for at, batch in served:
        known = _served(batch)
        estimate_s = estimator(known.batch_size, known.prompt_len, known.output_len)
        squares[int(at / span_s)].append((estimate_s - known.duration_s) ** 2)
        estimator.observe(known)
        estimator.learn(at)
    return [math.sqrt(float(np.mean(squares[point]))) for point in sorted(squares)]


def _served(batch: BatchEnded) -> ServedBatch:
    return ServedBatch(batch.num_requests, batch.prompt_len, batch.output_len, batch.duration_s)


MAGNUS_LEARNING = (
    Reproduction("magnus_lengths", "Magnus, Table I", (table_1,)),
    Reproduction("magnus_learning", "Magnus, Fig 14, serving times", (estimator_learning,)),
)

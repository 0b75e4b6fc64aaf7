"""Gittins order in volume: first the job that is likely to end soonest for what it takes of the replica.

Gittins' index for jobs of random length (Gittins 1979; Scully, Harchol-Balter and Scheller-Wolf 2018), with the
length law of ``policies.lengths.law`` and a cost that counts the slots or memory that a job uses up, whichever binds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from farsight.core.costs import StepCost
from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.policies.interfaces import ORDERS, Job, Order, ReplicaContext
from farsight.policies.lengths import law as length_law
from farsight.policies.lengths.history import LengthHistory
from farsight.policies.lengths.law import PredictorGate
from farsight.policies.order.job_table import JobTable, first_of, replayed
from farsight.policies.settings import PRIOR_CAPACITY

FloatArray = NDArray[np.float64]
Unit = Literal["volume", "time"]

RERANK_TOKENS = 16
"""Output tokens after which a running job's rank is computed again."""

REFRESH_COMPLETIONS = 50
"""Finished outputs after which the history's half of all laws is taken again."""

MIN_COMPLETIONS = 20
"""Finished outputs after which the history's half is taken for the first time: fewer say too little."""


STALE_AT_ONCE = 256
"""Most jobs whose ranks are computed at one scheduling point because of a new history or price: about 0.5 ms. The best
of them come first."""


def gittins_rank(costs: FloatArray, weights: FloatArray) -> FloatArray:
    """Returns min_k E[cost of min(G, x_k)] / P(G <= x_k) of each row; O(n k).

    Args:
        costs: Costs of ending at x_k, shape (n, k), not falling in a row where the weight is positive.
        weights: Probabilities of x_k, shape (n, k).
    """
    below = np.cumsum(weights, axis=1)
    spent = np.cumsum(weights * costs, axis=1)
    spent += costs * (below[:, -1:] - below)
    below[below == 0] = 1e-300  # before the first point of positive weight nothing ends: no candidate
    spent /= below
    rank: FloatArray = spent.min(axis=1)
    return rank


@dataclass(frozen=True, slots=True)
class DecodePrice:
    """Seconds of the replica that output tokens use up, in closed form.

    A token at context y costs base_s max(1/B, y/M) + decode_seq_s + context_token_s y in volume: the replica's time by
    the dominant share of what the job holds, slots or memory. In time the maximum is 1: the time of the job alone.

    Attributes:
        max_num_seqs: B, sequences of a step.
        capacity: M, tokens of KV.
    """

    step: StepCost
    max_num_seqs: int
    capacity: int
    unit: Unit = "volume"

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise InvalidValueError("max_num_seqs", self.max_num_seqs, "an integer >= 1")
        if self.capacity < 1:
            raise InvalidValueError("capacity", self.capacity, "an integer >= 1")
        if self.unit not in ("volume", "time"):
            raise InvalidValueError("unit", self.unit, "volume or time")

    def seconds(self, context: FloatArray, tokens: FloatArray) -> FloatArray:
        """Returns the seconds of ``tokens`` more tokens from ``context`` on, elementwise.

        The sum over y in [context, context + tokens) of y itself is tokens (context - 1/2 + tokens / 2). The maximum
        is flat up to y = M/B and linear from there.
        """
        step, before = self.step, context - 0.5
        contexts = 0.5 * tokens
        contexts += before
        contexts *= tokens
        if self.unit == "time":
            contexts *= step.context_token_s
            contexts += (step.base_s + step.decode_seq_s) * tokens
            return contexts
        memory = step.base_s / self.capacity
        contexts *= step.context_token_s + memory
        contexts += step.decode_seq_s * tokens
        flat = np.minimum(np.maximum(self.capacity // self.max_num_seqs + 1 - context, 0.0), tokens)
        in_flat = (-0.5 * memory) * flat
        in_flat += step.base_s / self.max_num_seqs - memory * before
        in_flat *= flat
        contexts += in_flat
        return contexts


_ROWS_AT_ONCE = 256
"""Rows ranked together: their arrays fit a core's own cache, which halves the time."""

_COLUMNS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "forecast": (np.float64, (length_law.NUM_POINTS,)),
    "points": (np.float64, (2 * length_law.NUM_POINTS,)),
    "from_forecast": (np.bool_, (2 * length_law.NUM_POINTS,)),
    "history": (np.int64, ()),  # version of the history that the points come from
    "generated": (np.float64, ()),
    "limit": (np.float64, ()),
    "context": (np.float64, ()),
    "missing": (np.float64, ()),
    "arrived_at": (np.float64, ()),
    "priority": (np.int64, ()),
    "deadline_at": (np.float64, ()),
    "rank": (np.float64, ()),
    "expected": (np.float64, ()),
    "tokens": (np.float64, ()),  # expected output still to come
    "due": (np.bool_, ()),  # the job has changed: its rank is computed before the next question
    "stale": (np.bool_, ()),  # the history or the price has changed: its rank is computed in its turn
    "resident": (np.bool_, ()),
    "ran_at": (np.float64, ()),  # kept by orders that look at pauses
    "rate": (np.float64, ()),  # these four are kept by orders that look at readers: tokens a second, 0 for no reader
    "read_by": (np.float64, ()),  # when the reader will have read all that has come
    "guard_at": (np.float64, ()),  # the earliest instant of its guard
    "ahead": (np.bool_, ()),  # the stream may stand still
}


class Gittins(Order):
    """``Order`` by rank, smallest first, urgency before it, arrival after it.

    A rank is computed again when the prefill ends, every 16 tokens, and for jobs that have not started every 50
    finished outputs; after these, and after a change of prices, only some at each scheduling point, to keep it short. A
    resident counts with rank / theta, so that only a clearly better job takes its place. Ageing divides by
    1 + gamma (now - arrived_at) / (expected cost of what remains): a smooth form of the response ratio, 0 for none.

    ``add``, ``remove``, ``changed`` and ``ran`` cost O(1), ``refresh`` O(64) for each rank that is due, the first k of
    ``ranked`` O(k log k) and a few numpy operations over all jobs.

    Args:
        price: The price of tokens; base_s is shared by all that run.
        theta: Hysteresis, >= 1.
        gamma: Ageing, >= 0.

    Raises:
        InvalidValueError: a parameter out of range.
    """

    preemptive = True

    def __init__(self, price: DecodePrice, *, theta: float = 4.0, gamma: float = 0.0) -> None:
        if not theta >= 1:
            raise InvalidValueError("theta", theta, "a number >= 1")
        if not gamma >= 0:
            raise InvalidValueError("gamma", gamma, "a number >= 0")
        self._price, self._theta, self._gamma = price, theta, gamma
        self._moves_with_time = gamma > 0  # whether jobs may change places between two events
        self.gate = PredictorGate()
        self._history = LengthHistory(window=1000)
        self._history_points: FloatArray | None = None
        self._history_version = 0
        self._num_learned = 0
        self._table = JobTable(_COLUMNS)
        self._ranking: Iterable[int] | None = None  # rows as far as they have been asked for, at one instant
        self._ranked_at = 0.0
        self._any_due = self._any_stale = False  # whether a row of these columns may be set
        self._generated: dict[str, int] = {}  # a copy of the column: one number is read faster here
        self._resident: dict[str, bool] = {}  # likewise
        self._cached: dict[str, int] = {}  # cached tokens that the row knows of

    def changed(self, job: Job) -> None:
        if self._cached.get(job.request_id, job.cached_len) != job.cached_len and not job.computed_len:
            self._look_at(self._known_row(job))  # less of its prompt is left to compute than was believed, or more
        is_resident = job.computed_len > 0
        if self._resident.get(job.request_id, is_resident) == is_resident:
            return
        self._resident[job.request_id] = is_resident
        self._table.put(self._known_row(job), "resident", is_resident)
        self._ranking = None

    def foreseen(self, job: Job) -> None:
        row = self._table.row(job)
        if row is not None:
            self._column("forecast")[row] = _points(job)
            self._column("history")[row] = -1
            self._look_at(row)

    def price(self, cost: StepCost, capacity: int) -> None:
        """Sets the step cost and the KV capacity in tokens; all ranks become stale."""
        before = self._price
        self._price = DecodePrice(cost, before.max_num_seqs, capacity, before.unit)
        self._mark_stale(slice(None))

    def add(self, job: Job, now: float) -> None:
        row, put = self._table.add(job), self._table.put
        self._column("forecast")[row] = _points(job)
        put(row, "limit", job.max_new_tokens)
        put(row, "arrived_at", job.arrived_at)
        put(row, "priority", job.priority)
        put(row, "deadline_at", job.deadline_at)
        put(row, "history", -1)
        self._resident[job.request_id] = is_resident = job.computed_len > 0
        put(row, "resident", is_resident)
        self._look_at(row)

    def remove(self, job: Job) -> None:
        self._table.remove(job)
        self._generated.pop(job.request_id, None)
        self._resident.pop(job.request_id, None)
        self._cached.pop(job.request_id, None)
        self._ranking = None

    def learn(self, job: Job, *, censored: bool) -> None:
        is_whole = not censored or job.output_len >= job.max_new_tokens  # cut by its limit, it is as long as it may be
        if job.forecast is not None and self._history_points is not None and is_whole:
            limit = job.max_new_tokens
            points = np.minimum(length_law.forecast_points(job.forecast), limit)
            self.gate.observe(points, np.minimum(self._history_points, limit), job.output_len)
        self._history.add(job.output_len, censored=censored)
        self._num_learned += 1
        if self._num_learned == MIN_COMPLETIONS or self._num_learned % REFRESH_COMPLETIONS == 0:
            self._history_points = self._observed().astype(np.float64)
            self._history_version += 1
            self._mark_stale(self._column("generated") == 0)

    def _observed(self) -> NDArray[np.int64]:
        """Returns the points of the history's law of outputs, shape (32,)."""
        return self._history.quantiles(length_law.LEVELS)

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        """Marks the rank as due if the prefill has ended or 16 tokens have come since the job was last ranked."""
        generated = self._generated.get(job.request_id)
        if generated is None:
            return
        prefill_has_ended = generated == 0 < job.output_len
        if prefill_has_ended or job.output_len - generated >= RERANK_TOKENS:
            self._look_at(self._known_row(job))

    def refresh(self, now: float) -> None:
        self._renew()
        self._rank_due()

    def ranked(self, now: float) -> Iterator[Job]:
        self._rank_due()
        if self._ranking is None or (self._moves_with_time and self._ranked_at != now):
            is_alone = len(self._table.jobs) == 1
            self._ranking, self._ranked_at = [0] if is_alone else replayed(self._keys(slice(None), now)), now
        return map(self._table.jobs.__getitem__, self._ranking)

    def among(self, jobs: Sequence[Job], now: float) -> list[Job]:
        """Returns the jobs in the order of ``ranked``, as ``RanksSome`` asks."""
        self._rank_due()
        rows = np.sort(np.array([self._known_row(job) for job in jobs], np.int64))
        return [self._table.jobs[rows[index]] for index in replayed(self._keys(rows, now))]

    def _keys(self, rows: slice | NDArray[np.int64], now: float) -> list[NDArray[Any]]:
        """Returns the columns by which these jobs are compared, the most significant first."""
        arrived_at = self._column("arrived_at")[rows]
        key = self._column("rank")[rows].copy()
        if self._gamma:
            waited_s = np.maximum(now - arrived_at, 0.0)
            key /= 1.0 + self._gamma * waited_s / np.maximum(self._column("expected")[rows], 1e-12)
        key[self._column("resident")[rows]] /= self._theta
        return [self._column("priority")[rows], self._column("deadline_at")[rows], key, arrived_at]

    def slice_s(self, job: Job) -> float:
        """Returns the seconds until the job's rank changes: the missing prefill, and what is left of 16 tokens."""
        had = job.output_len - self._generated.get(job.request_id, job.output_len)
        step = self._price.step
        prefill_s = 0.0 if job.decodes else step.prefill_token_s * job.missing_len
        return prefill_s + max(1.0, RERANK_TOKENS - had) * step.decode_s(job.prompt_len + job.output_len)

    def explain(self, job: Job, now: float) -> Facts:
        """Returns the rank as last computed and after ageing, and the weight of the forecast beside the history."""
        row = self._known_row(job)
        if self._column("due")[row]:
            return {}
        rank_s, expected_s = float(self._column("rank")[row]), float(self._column("expected")[row])
        facts: dict[str, float | str] = {"rank_s": rank_s, "expected_s": expected_s}
        if self._gamma:
            waited_s = max(now - job.arrived_at, 0.0)
            facts["aged_rank_s"] = rank_s / (1.0 + self._gamma * waited_s / max(expected_s, 1e-12))
        if job.forecast is not None:
            facts["forecast_weight"] = self.gate.omega
        return facts

    def rank(self, jobs: Sequence[Job]) -> FloatArray:
        """Returns the ranks of jobs of this order, seconds, shape (n,); without hysteresis and ageing."""
        self._rank_due()
        ranks: FloatArray = self._column("rank")[[self._known_row(job) for job in jobs]]
        return ranks

    def _known_row(self, job: Job) -> int:
        row = self._table.row(job)
        if row is None:
            raise IntegrityError(f"{job.request_id} is not in this order")
        return row

    def _column(self, name: str) -> NDArray[Any]:
        return self._table.column(name)

    def _look_at(self, row: int) -> None:
        """Notes how far the job is and marks its rank as due."""
        job, put = self._table.jobs[row], self._table.put
        # A decoding job always lacks its newest token, which is the decode's own work.
        missing_len = 0 if job.decodes else job.missing_len
        if self._generated.get(job.request_id) != job.output_len:
            self._generated[job.request_id] = job.output_len
            put(row, "generated", job.output_len)
            put(row, "context", job.prompt_len + job.output_len)
        self._cached[job.request_id] = job.cached_len
        put(row, "missing", missing_len)
        put(row, "due", True)
        self._any_due = True

    def _mark_stale(self, rows: slice | NDArray[np.bool_]) -> None:
        """Marks ranks as stale; the best are computed at the next question, the others as ``refresh`` is called."""
        self._column("stale")[rows] = True
        self._any_stale = True
        self._renew()

    def _renew(self) -> None:
        """Marks the best ``STALE_AT_ONCE`` of the stale ranks as due."""
        if not self._any_stale:
            return
        stale = np.flatnonzero(self._column("stale"))
        self._any_stale = len(stale) > 0
        best = first_of([self._column("rank")], stale, STALE_AT_ONCE)
        self._column("due")[best] = True
        self._any_due = self._any_due or self._any_stale

    def _rank_due(self) -> None:
        if not self._any_due:
            return
        self._any_due = False
        due = np.flatnonzero(self._column("due"))
        if not len(due):
            return
        for row in due.tolist():
            if self._table.jobs[row].output_len:
                self._look_at(row)
        for first in range(0, len(due), _ROWS_AT_ONCE):
            rows = due[first : first + _ROWS_AT_ONCE]
            tokens, weights = self._laws(rows)
            costs = self._costs(rows, tokens)
            self._column("rank")[rows] = gittins_rank(costs, weights)
            self._column("expected")[rows] = np.vecdot(costs, weights)
            self._column("tokens")[rows] = np.vecdot(tokens, weights)
        self._column("due")[due] = self._column("stale")[due] = self._any_due = False
        self._ranking = None

    def _laws(self, rows: NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        """Returns the tokens still to come and their probabilities, shape (n, 64)."""
        old = rows[self._column("history")[rows] != self._history_version]
        if len(old):
            merged = length_law.merged(self._column("forecast")[old], self._history_points)
            self._column("points")[old], self._column("from_forecast")[old] = merged
            self._column("history")[old] = self._history_version
        return length_law.remaining(
            self._column("points")[rows],
            self._column("from_forecast")[rows],
            self.gate.omega,
            self._column("generated")[rows],
            self._column("limit")[rows],
        )

    def _costs(self, rows: NDArray[np.int64], tokens: FloatArray) -> FloatArray:
        """Returns the costs of ending at each point of the remaining length, seconds, shape (n, 64)."""
        costs = self._price.seconds(self._column("context")[rows, None], tokens)
        costs += self._price.step.prefill_token_s * self._column("missing")[rows, None]
        return costs

    def check_integrity(self) -> None:
        """Raises IntegrityError unless rows and jobs agree and every rank that is not due has been worked out."""
        self._table.check_integrity()
        if not (self._column("due") | (self._column("rank") > 0)).all():
            raise IntegrityError("a job has no rank and none is due")


def _points(job: Job) -> FloatArray:
    """Returns the points of the job's forecast; infinite without a forecast."""
    return length_law.UNKNOWN if job.forecast is None else length_law.forecast_points(job.forecast)


@ORDERS.register("gittins", reads_forecasts=True)
def build_gittins(context: ReplicaContext) -> Gittins:
    """Ranks by the Gittins index in GPU-seconds of the dominant share."""
    settings = context.settings
    price = DecodePrice(settings.cost, context.max_num_seqs, PRIOR_CAPACITY)
    return Gittins(price, theta=settings.theta, gamma=settings.scheduler.gamma)

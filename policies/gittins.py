"""Gittins order in volume: first the job that is likely to end soonest for what it takes of the replica.

Gittins' index for jobs of random length (Gittins 1979; Scully, Harchol-Balter and Scheller-Wolf 2018), with the
length law of ``policies.length_law`` and a cost that counts the slots or memory that a job uses up, whichever binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from core.costs import StepCost
from core.errors import IntegrityError, InvalidValueError
from policies import length_law
from policies.job import Job
from policies.length_history import LengthHistory
from policies.predictor_gate import PredictorGate

FloatArray = NDArray[np.float64]
Unit = Literal["volume", "time"]

RERANK_TOKENS = 16
REFRESH_COMPLETIONS = 50
MIN_COMPLETIONS = 20


def gittins_rank(costs: FloatArray, weights: FloatArray) -> FloatArray:
    """min_k E[cost of min(G, x_k)] / P(G <= x_k) of each row; O(n k).

    Args:
        costs: Of ending at x_k, shape (n, k), not falling in a row where the weight is positive.
        weights: Probabilities of x_k, shape (n, k).
    """
    below = np.cumsum(weights, axis=1)
    spent = np.cumsum(weights * costs, axis=1)
    spent += costs * np.maximum(1.0 - below, 0.0)
    ratio = np.divide(spent, below, out=np.full_like(spent, np.inf), where=below > 0)
    rank: FloatArray = ratio.min(axis=1)
    return rank


def decode_cost(
    step: StepCost, max_num_seqs: int, capacity: int, context: FloatArray, tokens: FloatArray, unit: Unit
) -> FloatArray:
    """Seconds of the replica used up by ``tokens`` more tokens from ``context`` on, elementwise and in closed form.

    In volume sum over y in [context, context + tokens) of base_s max(1/B, y/M) + decode_seq_s + context_token_s y;
    in time the maximum is 1. The maximum is flat up to y = M/B and linear from there.

    Args:
        max_num_seqs: B.
        capacity: M, tokens of KV.
    """
    contexts = tokens * (context + (tokens - 1.0) / 2.0)
    seconds = step.decode_seq_s * tokens + step.context_token_s * contexts
    if unit == "time":
        return seconds + step.base_s * tokens
    flat = np.minimum(np.maximum(capacity // max_num_seqs + 1 - context, 0.0), tokens)
    flat_contexts = flat * (context + (flat - 1.0) / 2.0)
    cost: FloatArray = seconds + step.base_s * (flat / max_num_seqs + (contexts - flat_contexts) / capacity)
    return cost


class Gittins:
    """``Order`` by rank, smallest first, urgency before it, arrival after it.

    A rank is worked out anew when the prefill ends, every 16 tokens, and for jobs that have not started every 50
    finished outputs. A resident counts with rank / theta, so that only a clearly better job takes its place. Ageing
    divides by 1 + gamma (now - arrived_at) / (expected cost of what remains): a smooth form of the response ratio, 0
    for none.

    Args:
        step: Prices; base_s is shared by all that run.
        max_num_seqs: B, sequences of a step.
        capacity: M, tokens of KV.
        theta: Hysteresis, >= 1.
        gamma: Ageing, >= 0.
        unit: Rank by the share of the replica used up, or by seconds that a job alone would take.

    Raises:
        InvalidValueError: a parameter out of range.
    """

    preemptive = True

    def __init__(
        self,
        step: StepCost,
        max_num_seqs: int,
        capacity: int,
        *,
        theta: float = 4.0,
        gamma: float = 0.0,
        unit: Unit = "volume",
    ) -> None:
        if not theta >= 1:
            raise InvalidValueError("theta", theta, "a number >= 1")
        if not gamma >= 0:
            raise InvalidValueError("gamma", gamma, "a number >= 0")
        if unit not in ("volume", "time"):
            raise InvalidValueError("unit", unit, "volume or time")
        self._theta, self._gamma, self._unit = theta, gamma, unit
        self.gate = PredictorGate()
        self._history = LengthHistory(window=1000)
        self._history_points: FloatArray | None = None
        self._num_learned = 0
        self._jobs: dict[str, Job] = {}
        self._forecasts: dict[str, FloatArray] = {}
        self._ranks: dict[str, float] = {}
        self._expected: dict[str, float] = {}
        self._ranked_at: dict[str, tuple[int, bool]] = {}
        self._due: set[str] = set()
        self.reprice(step, max_num_seqs, capacity)

    def reprice(self, step: StepCost, max_num_seqs: int, capacity: int) -> None:
        """The live profile has changed: all ranks are due."""
        if max_num_seqs < 1:
            raise InvalidValueError("max_num_seqs", max_num_seqs, "an integer >= 1")
        if capacity < 1:
            raise InvalidValueError("capacity", capacity, "an integer >= 1")
        self._step, self._max_num_seqs, self._capacity = step, max_num_seqs, capacity
        self._due.update(self._jobs)

    def add(self, job: Job, now: float) -> None:
        """O(1); its rank is worked out at the next ``refresh`` or ``ranked``."""
        self._jobs[job.request_id] = job
        self._forecasts[job.request_id] = _points(job)
        self._due.add(job.request_id)

    def remove(self, job: Job) -> None:
        key = job.request_id
        self._jobs.pop(key, None)
        for known in (self._forecasts, self._ranks, self._expected, self._ranked_at):
            known.pop(key, None)
        self._due.discard(key)

    def learn(self, job: Job, *, censored: bool) -> None:
        """A job has ended; ``censored``: it might have gone on. Call it whether or not the job was removed."""
        points = None if job.forecast is None else length_law.forecast_points(job.forecast)
        if points is not None and self._history_points is not None and not censored:
            self.gate.observe(points, self._history_points, job.output_len)
        self._history.add(job.output_len, censored=censored)
        self._num_learned += 1
        # Fewer outputs say too little: until then a job without a forecast has the law of an unknown length.
        if self._num_learned == MIN_COMPLETIONS or self._num_learned % REFRESH_COMPLETIONS == 0:
            self._history_points = self._history.quantiles(length_law.LEVELS).astype(np.float64)
            self._due.update(key for key, other in self._jobs.items() if other.output_len == 0)

    def ran(self, job: Job, duration_s: float, now: float) -> None:
        """O(1): due if the prefill has ended or 16 tokens have come since its last rank."""
        generated, had_missing = self._ranked_at.get(job.request_id, (0, True))
        prefill_ended = had_missing and job.output_len > 0
        if job.request_id in self._jobs and (prefill_ended or job.output_len - generated >= RERANK_TOKENS):
            self._due.add(job.request_id)

    def refresh(self, now: float) -> None:
        """Works out the ranks that are due; O(64) each, vectorised."""
        if not self._due:
            return
        jobs = [self._jobs[key] for key in self._due]
        costs, weights = self._cost_laws(jobs)
        expected = (costs * weights).sum(axis=1)
        for job, rank, cost in zip(jobs, gittins_rank(costs, weights).tolist(), expected.tolist(), strict=True):
            self._ranks[job.request_id] = rank
            self._expected[job.request_id] = cost
            self._ranked_at[job.request_id] = (job.output_len, job.output_len == 0)
        self._due.clear()

    def ranked(self, now: float) -> Iterator[Job]:
        """Best first; O(n log n) at the first answer."""
        self.refresh(now)
        jobs = list(self._jobs.values())
        if not jobs:
            return
        key = np.array([self._ranks[job.request_id] for job in jobs])
        arrived_at = np.array([job.arrived_at for job in jobs])
        if self._gamma:
            expected = np.array([self._expected[job.request_id] for job in jobs])
            key = key / (1.0 + self._gamma * np.maximum(now - arrived_at, 0.0) / np.maximum(expected, 1e-12))
        key = np.where([job.computed_len > 0 for job in jobs], key / self._theta, key)
        priority = np.array([job.priority for job in jobs])
        deadline_at = np.array([job.deadline_at for job in jobs])
        for index in np.lexsort((arrived_at, key, deadline_at, priority)).tolist():
            yield jobs[index]

    def slice_s(self, job: Job) -> float:
        """What is missing and 16 tokens, computed alone: earlier its rank does not change."""
        prefill_s = self._step.prefill_token_s * job.missing_len
        return prefill_s + RERANK_TOKENS * self._step.decode_s(job.known_len)

    def rank(self, jobs: list[Job]) -> FloatArray:
        """Ranks of jobs as they are now, seconds, shape (n,); without hysteresis and ageing."""
        return gittins_rank(*self._cost_laws(jobs))

    def _cost_laws(self, jobs: list[Job]) -> tuple[FloatArray, FloatArray]:
        """Costs of ending at each point of the remaining length, seconds, and their probabilities; shape (n, k)."""
        points, from_forecast = length_law.merged(np.array([self._forecast(job) for job in jobs]), self._history_points)
        generated = np.array([job.output_len for job in jobs], np.float64)
        limit = np.array([job.max_new_tokens for job in jobs], np.float64)
        tokens, weights = length_law.remaining(
            points,
            from_forecast,
            self.gate.omega,
            generated,
            limit,
        )
        context = np.array([job.known_len for job in jobs], np.float64)[:, None]
        costs = decode_cost(self._step, self._max_num_seqs, self._capacity, context, tokens, self._unit)
        # A decoding job always lacks its newest token, which is the decode's own work.
        missing = np.array([0 if job.decodes else job.missing_len for job in jobs], np.float64)
        costs += self._step.prefill_token_s * missing[:, None]
        return costs, weights

    def check_integrity(self) -> None:
        """Raises:
        IntegrityError: a job has no rank and is not due, or something is kept of a job that is gone.
        """
        known = set(self._jobs)
        if known - set(self._ranks) - self._due:
            raise IntegrityError("a job has no rank and none is due")
        if (set(self._ranks) | set(self._expected) | self._due | set(self._forecasts)) - known:
            raise IntegrityError("something is kept of a job that is gone")

    def _forecast(self, job: Job) -> FloatArray:
        points = self._forecasts.get(job.request_id)
        return _points(job) if points is None else points


def _points(job: Job) -> FloatArray:
    """Of the job's forecast; infinite without one."""
    return length_law.UNKNOWN if job.forecast is None else length_law.forecast_points(job.forecast)

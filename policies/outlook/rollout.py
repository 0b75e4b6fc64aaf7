"""The queue of a replica, rolled forward: when each waiting job begins, and when a job ends.

``NUM_SCENARIOS`` scenarios run at once. In each, every job has one length of its law (the levels are stratified and
shuffled by a fixed table, so that equal states give equal answers). Time is counted in steps: each running job
generates a token a step, and the best waiting job takes the first place that becomes free. Steps become seconds by the
measured cost of a step, at the number of sequences that is expected meanwhile, less the share of time that prompts of
newcomers take. Two effects are left to the online correction (``calibration``): later arrivals may overtake, and a
place needs memory as well as a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from farsight.core.costs import StepCost
from farsight.core.forecast import Forecast
from farsight.policies.interfaces import Job
from farsight.policies.lengths import law as length_law
from farsight.policies.lengths.history import LengthHistory
from farsight.policies.lengths.law import PredictorGate, equiprobable

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

REFRESH_ENDS = 50
"""Ends after which the history's half of all laws is computed again ..."""

MIN_ENDS = 20
"""... and ends after which it is first computed."""


class _Row(NamedTuple):
    """The whole law of one job, as ``policies.lengths.law.merged`` gives it, and its sources."""

    points: FloatArray
    from_forecast: BoolArray
    version: int
    forecast: Forecast | None


class RemainingLaws:
    """Forecast and history of lengths, mixed as the Gittins order mixes them (``policies.lengths``).

    A job without a forecast, before anything has ended, may be of any length up to its limit.
    """

    def __init__(self) -> None:
        self.gate = PredictorGate()
        self._history = LengthHistory(window=1000)
        self._points: FloatArray | None = None
        self._version = 0
        self._num_ends = 0
        self._rows: dict[str, _Row] = {}

    def learn(self, job: Job, *, censored: bool) -> None:
        """Learns the length of an ended job; ``censored``: the job was cut off."""
        self.forget(job.request_id)
        if job.forecast is not None and self._points is not None and not censored:
            self.gate.observe(length_law.forecast_points(job.forecast), self._points, job.output_len)
        self._history.add(job.output_len, censored=censored)
        self._num_ends += 1
        if self._num_ends == MIN_ENDS or self._num_ends % REFRESH_ENDS == 0:
            self._points = self._history.quantiles(length_law.LEVELS).astype(np.float64)
            self._version += 1

    def forget(self, request_id: str) -> None:
        """Forgets the law of a job that has left."""
        self._rows.pop(request_id, None)

    def remaining(self, jobs: Sequence[Job]) -> tuple[FloatArray, FloatArray]:
        """Returns the tokens still to come, rising in each row, and their probabilities; shapes (n, 64). O(64 n)."""
        rows = self._current(jobs)
        generated = np.array([job.output_len for job in jobs], np.float64)
        limits = np.array([job.max_new_tokens for job in jobs], np.float64)
        points, from_forecast = np.array([row.points for row in rows]), np.array([row.from_forecast for row in rows])
        return length_law.remaining(points, from_forecast, self.gate.omega, generated, limits)

    def _current(self, jobs: Sequence[Job]) -> list[_Row]:
        """Returns the rows of jobs; recomputes outdated rows together."""
        rows = [self._rows.get(job.request_id) for job in jobs]
        version = self._version
        old = [
            place
            for place, (row, job) in enumerate(zip(rows, jobs, strict=True))
            if row is None or row.version != version or row.forecast is not job.forecast
        ]
        if old:
            merged = length_law.merged(np.array([self._own(jobs[place], rows[place]) for place in old]), self._points)
            for place, points, from_forecast in zip(old, *merged, strict=True):
                job = jobs[place]
                rows[place] = self._rows[job.request_id] = _Row(points, from_forecast, version, job.forecast)
        return [row for row in rows if row is not None]

    def _own(self, job: Job, row: _Row | None) -> FloatArray:
        """Returns the forecast's half of a job's law."""
        if job.forecast is None:
            return length_law.UNKNOWN if self._points is not None else np.ceil(length_law.LEVELS * job.max_new_tokens)
        if row is not None and row.forecast is job.forecast:
            return row.points[row.from_forecast]
        return length_law.forecast_points(job.forecast)


def drawn(tokens: FloatArray, weights: FloatArray, levels: FloatArray) -> FloatArray:
    """Returns the lengths at given levels of each law; O(64 n s).

    Args:
        tokens: Shape (n, 64), rising in each row.
        weights: Probabilities, shape (n, 64).
        levels: In (0, 1), shape (n, s).

    Returns:
        Shape (n, s).
    """
    below = np.cumsum(weights, axis=1)
    at = (below[:, None, :] < levels[:, :, None] * below[:, None, -1:]).sum(axis=2)
    found: FloatArray = np.take_along_axis(tokens, np.minimum(at, tokens.shape[1] - 1), axis=1)
    return found


NUM_SCENARIOS = 16
MAX_LISTED = 128
"""Most waiting jobs, and most running jobs, that are rolled one by one. With more, the roll-out is coarse."""

MAX_TURNS = 32
"""Most turns in which the listed jobs begin; if more jobs wait, several begin in one turn."""

MAX_TAX = 0.8
"""Largest share of time that prompts of newcomers are assumed to take."""

_LEVELS: FloatArray = np.array(
    [(np.random.default_rng(row).permutation(NUM_SCENARIOS) + 0.5) / NUM_SCENARIOS for row in range(MAX_LISTED)]
)


@dataclass(frozen=True, slots=True)
class RecentTraffic:
    """Recent arrivals and running jobs, as means.

    Attributes:
        rate: Arrivals a second.
        running: Mean number of sequences that run.
        output_len: Mean length of outputs, in tokens.
        prefill_s: Mean seconds of computing a prompt, without the base of its steps.
    """

    rate: float
    running: float
    output_len: float
    prefill_s: float


@dataclass(frozen=True, slots=True)
class QueueState:
    """The state that a roll-out starts from.

    Attributes:
        running: Jobs with a place.
        waiting: Jobs without a place, best first by the order of the replica; at most ``MAX_LISTED``.
        num_waiting: Number of all waiting jobs, listed or not.
        max_num_seqs: Most jobs with a place.
        cost: Measured cost of a step.
        traffic: Recent traffic; newcomers are expected to be like it.
    """

    running: Sequence[Job]
    waiting: Sequence[Job]
    num_waiting: int
    max_num_seqs: int
    cost: StepCost
    traffic: RecentTraffic

    @property
    def is_coarse(self) -> bool:
        return self.num_waiting > len(self.waiting) or len(self.running) > MAX_LISTED


class StepPace:
    """Seconds of a step while a job runs: the batch size goes from the present to the usual one."""

    def __init__(self, state: QueueState) -> None:
        cost, traffic = state.cost, state.traffic
        num = len(state.running)
        contexts = sum(job.prompt_len + job.output_len for job in state.running)
        self._base_s = cost.base_s
        self._seq_s = cost.decode_seq_s + cost.context_token_s * contexts / max(num, 1)
        self._output_len = max(traffic.output_len, 1.0)
        usual = traffic.running
        if num + state.num_waiting <= state.max_num_seqs:
            # No more than the present rate keeps running (Little's law): a burst may be over.
            usual = min(usual, traffic.rate * self._output_len * (self._base_s + self._seq_s * usual))
        self._now, self._usual = max(num, 1), max(usual, 1.0)
        rate = traffic.rate
        if state.num_waiting:  # newcomers begin as others end
            rate = min(rate, num / (self._output_len * max(self.full_s, 1e-9)))
        self._tax = 1.0 - min(MAX_TAX, rate * traffic.prefill_s)

    @property
    def full_s(self) -> float:
        """Seconds of a step with as many jobs as now, without prompts."""
        return self._base_s + self._seq_s * self._now

    @property
    def step_s(self) -> float:
        """Seconds of a step as of now."""
        return self.full_s / self._tax

    def decode_s(self, tokens: FloatArray) -> FloatArray:
        """Returns the seconds that one job takes for this many tokens, elementwise."""
        lives = np.maximum(tokens, 1.0) / self._output_len
        beside = self._usual + (self._now - self._usual) * -np.expm1(-lives) / lives
        seconds: FloatArray = tokens * (self._base_s + self._seq_s * beside) / self._tax
        return seconds


class RollOut:
    """One state rolled forward; answers for each job in it. About half a millisecond where 100 run and 100 wait."""

    def __init__(self, state: QueueState, laws: RemainingLaws) -> None:
        self._state, self._laws = state, laws
        self._pace = StepPace(state)
        self._place_of = {job.request_id: place for place, job in enumerate(state.waiting)}
        self._starts: FloatArray | None = None

    def end_s(self, job: Job, *, waits: bool) -> FloatArray:
        """Returns equally likely times until the job ends, in seconds, rising; shape (k,)."""
        tokens, weights = self._laws.remaining([job])
        run_s = self._pace.decode_s(equiprobable(tokens[0], weights[0]))
        if not job.decodes:
            run_s += self._state.cost.prefill_s(job.missing_len, min(job.cached_len, job.prompt_len))
        if not waits:
            return np.sort(run_s)
        start_s = self._start_steps(job) * self._pace.step_s
        return np.sort((start_s[:, None] + run_s[None, :]).ravel())

    def _start_steps(self, job: Job) -> FloatArray:
        """Returns the steps until the job begins, one number a scenario."""
        if self._starts is None:
            self._starts = self._roll()
        place = self._place_of.get(job.request_id)
        if place is not None:
            begins: FloatArray = self._starts[place]
            return begins
        behind = max(0, self._state.num_waiting - len(self._state.waiting))
        each = self._state.traffic.output_len / max(len(self._state.running), 1)
        last: FloatArray = self._starts[-1] if len(self._starts) else np.zeros(NUM_SCENARIOS)
        return last + behind * each

    def _roll(self) -> FloatArray:
        """Returns the steps until each listed job begins, shape (n, NUM_SCENARIOS)."""
        state = self._state
        waiting = self._drawn(state.waiting) + 1.0  # a step for its prompt
        running = state.running[:: -(-len(state.running) // MAX_LISTED) or 1]
        seats = self._drawn(running) if running else np.zeros((state.max_num_seqs, NUM_SCENARIOS))
        if len(running) < len(state.running):
            waiting = waiting * len(running) / len(state.running)  # fewer seats: shorter stays keep the rate
        return starts(seats, waiting)

    def _drawn(self, jobs: Sequence[Job]) -> FloatArray:
        """Returns a remaining length of each job in each scenario, shape (n, NUM_SCENARIOS)."""
        return drawn(*self._laws.remaining(jobs), _LEVELS[: len(jobs)]) if jobs else np.zeros((0, NUM_SCENARIOS))


def starts(seats: FloatArray, waiting: FloatArray) -> FloatArray:
    """Returns when each job of a queue takes the first free seat; O(n seats / group) for n waiting jobs.

    Args:
        seats: When each seat becomes free, shape (seats, scenarios).
        waiting: How long each job keeps its seat, in the order of the queue, shape (n, scenarios).

    Returns:
        Shape (n, scenarios).
    """
    seats, found = seats.copy(), np.empty_like(waiting)
    group = min(len(seats), -(-len(waiting) // MAX_TURNS)) if len(waiting) else 1
    for first in range(0, len(waiting), group):
        taken = waiting[first : first + group]
        num = len(taken)
        free = np.argpartition(seats, num - 1, axis=0)[:num] if num < len(seats) else np.argsort(seats, axis=0)
        begins = np.sort(np.take_along_axis(seats, free, axis=0), axis=0)
        found[first : first + num] = begins
        np.put_along_axis(seats, free, begins + taken, axis=0)
    return found

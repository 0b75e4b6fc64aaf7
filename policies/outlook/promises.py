"""Predictions of a replica's scheduler when its requests end, and what it learns from their ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farsight.core.costs import StepCost, attention_pairs
from farsight.policies.interfaces import Job
from farsight.policies.outlook.calibration import OnlineCalibration, Raw
from farsight.policies.outlook.rollout import QueueState, RecentTraffic, RemainingLaws, RollOut

NUM_ARRIVALS = 32
"""Latest arrivals from which the arrival rate and the usual batch size are taken: load changes within seconds."""

MEMORY = 300.0
"""Latest arrivals, or ends, over which mean lengths are taken."""

UNKNOWN_OUTPUT_LEN = 256.0
"""Mean output tokens assumed before any job has ended."""


@dataclass(frozen=True, slots=True)
class ReplicaJobs:
    """The jobs of a replica as its scheduler has them.

    Attributes:
        running, waiting, num_waiting: As in ``QueueState``.
        places: Requests that execute at once; 0 for all places of the replica.
    """

    running: Sequence[Job]
    waiting: Sequence[Job]
    num_waiting: int
    places: int = 0


@dataclass(frozen=True, slots=True)
class Outlook:
    """When one job will end, in seconds from the question; ``coarse`` as in ``Promise``."""

    p50_s: float
    p90_s: float
    coarse: bool


class PromiseMaker:
    """Predicts when jobs end, and corrects later predictions by the actual ends.

    Learns nothing before the first question, so that a scheduler that is never asked pays nothing.

    Args:
        max_num_seqs: Places of the replica.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.calibration = OnlineCalibration()
        self.laws = RemainingLaws()
        self._max_num_seqs = max_num_seqs
        self._is_asked = False
        self._arrivals: deque[float] = deque(maxlen=NUM_ARRIVALS)
        self._prompts = _RunningMean()
        self._pairs = _RunningMean()
        self._beside = _RunningMean(NUM_ARRIVALS)
        self._outputs = _RunningMean()

    def listen(self) -> None:
        """Begins to learn lengths, as a first question does."""
        self._is_asked = True

    def promise(self, arrived: Iterable[Job], jobs_here: ReplicaJobs, cost: StepCost, now: float) -> list[Outlook]:
        """Returns when newly arrived jobs will end, from one roll-out; records this to learn from their ends."""
        self._is_asked = True
        jobs = list(arrived)
        for job in jobs:
            self._arrived(job, len(jobs_here.running), now)
        return self._outlooks(jobs, jobs_here, cost, now, keeps=True)

    def outlook(self, jobs: Sequence[Job], jobs_here: ReplicaJobs, cost: StepCost, now: float) -> list[Outlook]:
        """Returns when jobs that arrived earlier will end; records nothing."""
        return self._outlooks(jobs, jobs_here, cost, now, keeps=False)

    def ended(self, job: Job, now: float, *, censored: bool) -> None:
        """Learns from a job that has ended; ``censored``: it was cut off, so its natural length is unknown."""
        if not self._is_asked:
            return
        self.laws.learn(job, censored=censored)
        self._outputs.add(job.output_len)
        self.calibration.end(job.request_id, now)

    def left(self, request_id: str) -> None:
        """Forgets a job that has left without an end."""
        self.calibration.drop(request_id)
        self.laws.forget(request_id)

    def _arrived(self, job: Job, num_running: int, now: float) -> None:
        self._arrivals.append(now)
        missing_len = job.missing_len
        self._prompts.add(missing_len)
        self._pairs.add(attention_pairs(missing_len, job.known_len - missing_len))
        self._beside.add(num_running)

    def _outlooks(
        self, jobs: Sequence[Job], jobs_here: ReplicaJobs, cost: StepCost, now: float, *, keeps: bool
    ) -> list[Outlook]:
        state = QueueState(
            jobs_here.running,
            jobs_here.waiting,
            jobs_here.num_waiting,
            jobs_here.places or self._max_num_seqs,
            cost,
            self._traffic(cost, now),
        )
        roll_out = RollOut(state, self.laws)
        placed = {job.request_id for job in jobs_here.running}
        found = []
        for job in jobs:
            waits = job.request_id not in placed
            ends_s = roll_out.end_s(job, waits=waits)
            raw = Raw(float(ends_s[len(ends_s) // 2]), float(ends_s[int(0.9 * len(ends_s))]), waits)
            found.append(Outlook(*self.calibration.corrected(raw, now), state.is_coarse and waits))
            if keeps:
                self.calibration.begin(job.request_id, raw, now)
        return found

    def _traffic(self, cost: StepCost, now: float) -> RecentTraffic:
        arrivals = self._arrivals
        span_s = now - arrivals[0] if len(arrivals) > 1 else 0.0  # until now, so that a pause lowers the rate
        rate = (len(arrivals) - 1) / span_s if span_s > 0 else 0.0
        prefill_s = cost.prefill_token_s * self._prompts.mean + cost.prefill_pair_s * self._pairs.mean
        return RecentTraffic(rate, self._beside.mean, self._outputs.mean or UNKNOWN_OUTPUT_LEN, prefill_s)


class _RunningMean:
    """The mean of about the last ``memory`` numbers."""

    def __init__(self, memory: float = MEMORY) -> None:
        self.mean = 0.0
        self._num = 0
        self._memory = memory

    def add(self, value: float) -> None:
        self._num += 1
        self.mean += (value - self.mean) / min(self._num, self._memory)

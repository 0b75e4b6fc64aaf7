"""When a replica's requests end: predictions, what is learned from the ends, and the latest starts that targets allow.

Just enough service for requests with latency targets: they wait as others do until their latest start, which is the
last instant at which the job still meets its target if it is served at once and its length is the upper quantile of its
law (the idea of JITServe, arXiv 2504.20068). From then on the job goes before the others of its tenant and class;
before that it has the rank that the preset's order gives it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from farsight.core.costs import StepCost, attention_pairs
from farsight.policies.interfaces import Job, ScheduledRequest
from farsight.policies.outlook.calibration import OnlineCalibration, Raw
from farsight.policies.outlook.rollout import FloatArray, QueueState, RecentTraffic, RemainingLaws, RollOut, drawn

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


LEVEL = 0.9
"""Quantile of a job's length with which the job must still meet its target."""

LOOK_S = 0.1
"""Most seconds until latest starts are computed again: lengths, prices and neighbours change."""

STEPS_AHEAD = 2
"""Steps with a long prompt by which a job is due before its latest start: one is under way, another may begin."""

MOST_PROMPT = 2048
"""Most prompt tokens of a step that are allowed for: few devices take more at once."""

SLOWER = 1.1
"""Factor on the seconds of a step as of now: prompts of newcomers come in bursts."""

FADING = 0.99
"""Factor by which the remembered longest prompt shrinks at each arrival."""


@dataclass(frozen=True, slots=True)
class ServicePace:
    """How fast a job would be served now.

    Attributes:
        cost: What a step costs.
        step_s: Seconds of a step: the mean that the running jobs had, or the cost of a step with one job more,
            whichever is longer, times ``SLOWER``.
    """

    cost: StepCost
    step_s: float

    @classmethod
    def beside(cls, running: Sequence[Job], cost: StepCost, most: int) -> ServicePace:
        """Returns the pace of one job beside those that run, with at most ``most`` jobs in a step."""
        num = min(most, len(running) + 1)
        contexts = sum(job.prompt_len + job.output_len for job in running)
        step_s = cost.step_s(0, num, contexts * num // max(1, len(running)))
        tokens = ran_s = 0.0
        for job in running:
            if isinstance(job, ScheduledRequest) and job.output_len > 0:
                tokens += job.output_len
                ran_s += job.ran_s
        return cls(cost, SLOWER * max(step_s, ran_s / tokens if tokens else 0.0))

    def prompt_s(self, job: Job) -> float:
        """Returns the seconds until the job's prompt is computed; 0 if the job decodes."""
        if job.decodes:
            return 0.0
        return self.cost.prefill_s(job.missing_len, min(job.cached_len, job.prompt_len))


class JustEnough:
    """Finds the jobs whose latest start has come. O(jobs with a target) every ``LOOK_S``, else O(1).

    Args:
        laws: Laws of the tokens still to come.
        lead_s: Seconds between a decision and the worker's next step.

    Attributes:
        due: Jobs whose latest start has come, by id.
    """

    def __init__(self, laws: RemainingLaws, lead_s: float) -> None:
        self.due: dict[str, ScheduledRequest] = {}
        self._laws, self._lead_s = laws, lead_s
        self._with_targets: dict[str, ScheduledRequest] = {}
        self._began: dict[str, float] = {}  # instants at which first tokens were seen
        self._looks_at = math.inf
        self._longest = 0.0  # longest recent prompt, in tokens

    def add(self, job: ScheduledRequest, now: float) -> None:
        """Adds a job that has come, with or without a target."""
        self._longest = max(FADING * self._longest, min(job.missing_len, MOST_PROMPT))
        if job.request.wants_speed:
            self._with_targets[job.request_id] = job
            self._looks_at = now

    def remove(self, request_id: str) -> None:
        """Removes a job that has left; unknown ids are ignored."""
        if self._with_targets or self.due:
            self._with_targets.pop(request_id, None)
            self.due.pop(request_id, None)
            self._began.pop(request_id, None)

    def is_to_look(self, now: float) -> bool:
        """Returns whether it is time to call ``became_due``."""
        return bool(self._with_targets) and now >= self._looks_at

    def became_due(self, pace: ServicePace, now: float) -> list[tuple[ScheduledRequest, float]]:
        """Moves the jobs whose latest start has come into ``due``; returns them with their latest starts."""
        jobs = list(self._with_targets.values())
        latest = self.latest_starts(jobs, pace, now)
        found = [(job, at) for job, at in zip(jobs, latest, strict=True) if at <= now]
        for job, _ in found:
            self.due[job.request_id] = self._with_targets.pop(job.request_id)
        self._looks_at = min(min((at for at in latest if at > now), default=math.inf), now + LOOK_S)
        return found

    def latest_starts(self, jobs: Sequence[ScheduledRequest], pace: ServicePace, now: float) -> list[float]:
        """Returns the latest start of each job, as an instant."""
        tokens = self._tokens([job for job in jobs if job.request.deadline_s is not None])
        margin_s = self._lead_s + STEPS_AHEAD * (pace.step_s + pace.cost.prefill_token_s * self._longest)
        return [self._latest(job, tokens.get(job.request_id, 0.0), pace, now) - margin_s for job in jobs]

    def _tokens(self, jobs: Sequence[ScheduledRequest]) -> dict[str, float]:
        if not jobs:
            return {}
        levels: FloatArray = np.full((len(jobs), 1), LEVEL)
        left = drawn(*self._laws.remaining(jobs), levels)[:, 0]
        return {job.request_id: float(num) for job, num in zip(jobs, left, strict=True)}

    def _latest(self, job: ScheduledRequest, tokens: float, pace: ServicePace, now: float) -> float:
        request, prompt_s = job.request, pace.prompt_s(job)
        latest = math.inf
        if request.deadline_s is not None:
            latest = job.arrived_at + request.deadline_s - prompt_s - tokens * pace.step_s
        if job.output_len == 0:
            return min(latest, job.arrived_at + request.slo.ttft_s - prompt_s)
        began_at = self._began.setdefault(job.request_id, now)
        return min(latest, began_at + request.slo.tpot_s * job.output_len - prompt_s)

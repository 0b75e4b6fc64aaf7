"""One server that runs a batch from iteration to iteration under an order, with exact times."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.policies.interfaces import Job, Order
from farsight.policies.order.skip_join_mlfq import SkipJoinMlfq
from farsight.policies.settings import MlfqRules

UNIT_COST = StepCost(base_s=0, prefill_token_s=1, decode_seq_s=1, context_token_s=0)
"""A prompt of n tokens takes n seconds, each further token one: jobs are then (first, 1, outputs) as in Fig. 6."""


@dataclass
class Server:
    """Tokens as they come: (request id, number of the token, instant)."""

    order: Order
    batch_size: int = 1
    cost: StepCost = UNIT_COST
    kills: bool = False
    now: float = 0.0
    tokens: list[tuple[str, int, float]] = field(default_factory=list)
    waited: dict[str, float] = field(default_factory=dict)

    def run(self, arrivals: Sequence[Job], limit: int = 100_000) -> dict[str, float]:
        """Completion times by request id, once all jobs have ended."""
        coming = sorted(arrivals, key=lambda job: job.arrived_at)
        done: dict[str, float] = {}
        for _ in range(limit):
            if len(done) == len(arrivals):
                return done
            if len(done) + len(coming) == len(arrivals):
                self.now = max(self.now, coming[0].arrived_at)
            while coming and coming[0].arrived_at <= self.now:
                self.order.add(coming.pop(0), self.now)
            for job in self.step():
                done[job.request_id] = self.now
        raise AssertionError(f"only {len(done)} of {len(arrivals)} jobs ended")

    def step(self) -> list[Job]:
        """Runs one iteration of the best jobs; those that ended are returned."""
        self.order.refresh(self.now)
        batch = list(_first(self.order.ranked(self.now), self.batch_size))
        times = [self._iteration_s(job) for job in batch]
        duration = max(times)
        slice_s = min(self.order.slice_s(job) for job in batch)
        is_killed = self.kills and slice_s < duration
        duration = slice_s if is_killed else duration
        began, self.now = self.now, self.now + duration
        ended: list[Job] = []
        for job in batch:
            longest = self.waited.get(job.request_id, 0.0)
            self.waited[job.request_id] = max(longest, began - job.last_ran_at)
            job.last_ran_at = self.now
            if not is_killed:
                job.computed_len = job.known_len
                job.output_len += 1
                self.tokens.append((job.request_id, job.output_len, self.now))
            if job.output_len == job.max_new_tokens:
                self.order.remove(job)
                ended.append(job)
            else:
                self.order.ran(job, duration, self.now)
        return ended

    def _iteration_s(self, job: Job) -> float:
        return self.cost.decode_s(job.known_len) if job.decodes else self.cost.prefill_s(job.missing_len)


def jobs(*shapes: tuple[int, int]) -> list[Job]:
    """J1, J2, ... at instant 0 with (seconds of the first iteration, output tokens)."""
    return [Job(f"J{i}", 0.0, first, num_tokens) for i, (first, num_tokens) in enumerate(shapes, 1)]


def unit_mlfq(**settings: Any) -> SkipJoinMlfq:
    """Quanta 1, 2, 4, 8, ... s and no job starves, unless said otherwise."""
    rules = {field.name: settings.pop(field.name) for field in fields(MlfqRules) if field.name in settings}
    config = SchedulerConfig(**({"quantum_s": 1.0, "starve_limit_s": math.inf} | settings))
    return SkipJoinMlfq(UNIT_COST, config, MlfqRules(**({"follows_cost": False} | rules)))


def _first(ranked: Iterator[Job], num: int) -> Iterator[Job]:
    return (job for job, _ in zip(ranked, range(num), strict=False))

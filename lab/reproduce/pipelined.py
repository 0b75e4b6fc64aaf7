"""A replica of several pipeline stages: as many batches in flight as stages, as ADR 25 serves them.

It runs ``PipelinedExecutor``, which a live replica of several stages runs too. Every step is an event of its own:
steps of different batches take turns on the stages, so no run of equal steps can be taken at once.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from farsight.core.costs import ImageCost, StepCost
from farsight.core.errors import InvalidValueError
from farsight.core.request import Request
from farsight.kvcache import StepBatch
from farsight.kvcache.step_batch import step_work
from farsight.policies.replica.events import StepsRan
from farsight.simulator.cluster.latency import Roofline, StepRun
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import Replica


class StageTimes:
    """When each stage of a pipeline is free. Every stage takes the batches in the order in which they enter.

    Args:
        num_stages: Stages of equal length.
    """

    def __init__(self, num_stages: int) -> None:
        self._free_at = [0.0] * num_stages

    def enter(self, now: float, seconds: float) -> float:
        """Sends a batch through; returns when it leaves the last stage. O(stages).

        Args:
            seconds: Time of the batch in all stages together, without waits.
        """
        each_s = seconds / len(self._free_at)
        for stage, free_at in enumerate(self._free_at):
            now = max(now, free_at) + each_s
            self._free_at[stage] = now
        return now


@dataclass(slots=True)
class PipelineStep(StepRun):
    """One step in a pipeline. ``began_at`` is when the last stage began to wait for it or to compute it.

    Rank 0 measures a step from there, so the profile of a live replica of several stages learns this time.
    """

    def seconds(self, num_steps: int) -> float:
        return num_steps * (self.ends_at - self.began_at)


class PipelinedReplica(Replica):
    """A ``Replica`` with ``shape.num_stages`` batches in flight; the latency model gives the time of one batch in all
    stages together.

    Raises:
        InvalidValueError: The order of the scheduler has iterations cut off: a server refuses that too.
    """

    def _set_up(self) -> None:
        if self.scheduler.order.cuts_off:
            raise InvalidValueError("num_stages", self.shape.num_stages, "1 where iterations are cut off")
        self._stages = StageTimes(self.shape.num_stages)
        self._steps: deque[PipelineStep] = deque()
        self._left_at = 0.0

    @property
    def wakes_at(self) -> float:
        """See ``Replica.wakes_at``."""
        step_ends_at = self._steps[0].ends_at if self._steps else math.inf
        return min(step_ends_at, self._copies[0][0]) if self._copies else step_ends_at

    def wake(self, now: float) -> None:
        """Handles the event at ``wakes_at``: the oldest step or a copy is over."""
        while self._copies and self._copies[0][0] <= now:
            self._landed.append(self._copies.pop(0)[1])
        while self._steps and self._steps[0].ends_at <= now:
            self._finish(self._steps.popleft(), now)
        self._begin(now)

    def submit(self, requests: list[tuple[Request, Record]], now: float) -> None:
        """See ``Replica.submit``; the scheduler first hears of the steps that are over."""
        if self._untold and (self.scheduler.num_waiting == 0 or self.scheduler.order.preemptive):
            self._report(now)
        super().submit(requests, now)

    def _finish(self, step: PipelineStep, now: float) -> None:
        """Books a step, and tells the scheduler in the shortest form that says all."""
        self._left_at = step.ends_at
        batch = step.batch
        request_ids = [item.request_id for item in batch.items if self.executor.counts(batch, item.request_id)]
        only_decodes = not step.work.prefill_tokens and len(request_ids) == len(batch.items)
        services = self.executor.services_after(batch, step.seconds(1), 1) if only_decodes else ()
        ended = self._book(step)
        if ended or (self._looks and (self._presses or self._untold or not only_decodes)):
            self._report(now)
        elif self._looks:
            self._tell(StepsRan(tuple(request_ids), 1, step.seconds(1), services), now)
        else:
            self._untold = True

    @property
    def _presses(self) -> bool:
        """Whether memory is short or KV moves, which only a report can say."""
        return bool(self.executor.short_blocks or self._copies or self._landed)

    def _begin(self, now: float) -> None:
        """Starts batches until one is in every stage, or none can run."""
        while len(self._steps) < self.shape.num_stages:
            batch = self._prepare(now)
            if batch is None:
                return
            work = step_work(batch)
            ends_at = self._stages.enter(now, self._latency.step_s(*work))
            began_at = max(now, self._steps[-1].ends_at if self._steps else self._left_at)
            self._steps.append(PipelineStep(batch, work, self._latency, began_at, 1, ends_at))

    def _relieve(self, batch: StepBatch | None, now: float) -> StepBatch | None:
        """As in ``Replica``, until there is a batch: one that was composed has begun, and cannot be composed again."""
        for _ in range(len(self._records)):
            if not self.executor.short_blocks:
                break
            self._report(now)
            if self._plan is None or batch is not None:
                break
            batch = self._next_batch()
        return batch


@dataclass(frozen=True, slots=True)
class PipelineLatency:
    """One batch in all stages of a pipeline together, for ``ReplicaShape.num_stages`` batches in flight.

    Attributes:
        whole: The devices; its ``pipeline_parallel`` is the number of stages.
    """

    whole: Roofline

    @property
    def _one_batch(self) -> Roofline:
        return replace(self.whole, pipeline_parallel=1)

    def step_s(self, prefill_tokens: int, decode_seqs: int, context_tokens: int, prefill_pairs: int = 0) -> float:
        return self._one_batch.step_s(prefill_tokens, decode_seqs, context_tokens, prefill_pairs)

    def decode_run_s(self, decode_seqs: int, context_tokens: int, num_steps: int) -> float:
        return self._one_batch.decode_run_s(decode_seqs, context_tokens, num_steps)

    def copy_s(self, num_tokens: int) -> float:
        return self.whole.copy_s(num_tokens)

    @property
    def image_cost(self) -> ImageCost:
        return self.whole.image_cost

    @property
    def cost(self) -> StepCost:
        """The time from one step's end to the next where every stage is busy, which is what rank 0 measures."""
        cost, stages = self._one_batch.cost, self.whole.pipeline_parallel
        return StepCost(
            cost.base_s / stages, cost.prefill_token_s / stages, cost.decode_seq_s, cost.context_token_s / stages
        )

"""Batcher: takes requests in like the Router, and hands them out in batches to workers that are idle."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

from farsight.actors.log.log_outbox import LogOutbox
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import BatchMetrics
from farsight.actors.runtime.names import initial_counts
from farsight.actors.runtime.peer import again_and_again, answer_of, current_counts, reaches, wait_for
from farsight.actors.scheduling.event_recorder import EventRecorder, recorded
from farsight.actors.scheduling.router import FleetShell
from farsight.core.costs import profile_cost
from farsight.core.decisions import Decision
from farsight.core.forecast import ForecastsMade
from farsight.core.messages.fleet import ReplicaState
from farsight.core.messages.log import FinishedBatch, LogRecords
from farsight.core.messages.step_times import BatchShape, BatchShapes, ServedBatchTime, ServedBatchTimes
from farsight.estimator.knn import padded_batch_s
from farsight.estimator.profile_file import known_cost
from farsight.estimator.step_profile import MIN_SAMPLES
from farsight.policies.batching.base import FormedBatch
from farsight.policies.compose import configured_batch_scheduler, predicts_requests
from farsight.policies.event_log import BatchMachineConfig
from farsight.policies.fleet.batch_scheduler import BatchChoice
from farsight.policies.fleet.events import (
    BatchEnded,
    GlobalEvent,
    GlobalInstruction,
    PlaceRequests,
    ReplicaBroke,
    ReplicaRests,
    TimePassed,
)
from farsight.policies.replica.events import ForecastsArrived
from farsight.policies.settings import PRIOR_COST

LOOK_S = 2.0
"""Seconds after which the estimators are asked again about the same batches."""

UNANSWERED_PAUSE_S = 0.1
"""Seconds of pause after a question that no estimator has answered."""

MAX_SHAPES = 4096
"""Most batches of one question, and most answers that are kept for longer than ``LOOK_S``."""

Shape = tuple[int, int, int]
"""Number of requests, longest prompt and longest output, in tokens."""


class EstimatedTimes:
    """A ``ServingTime`` that never waits: the last estimate of a batch, or the sum of its steps until there is one.

    Estimates are requested when batches are formed or change, so that they are there when a worker pulls.

    Args:
        timed: The batches whose times the next choice may ask for.
    """

    def __init__(self, context: ComponentContext, timed: Callable[[], Iterable[FormedBatch]]) -> None:
        self._timed = timed
        self._peers = context.peers
        self._counts = initial_counts(context.config)
        self._cost = known_cost(context.config.engine.profile, PRIOR_COST)
        self._known_s: dict[Shape, float] = {}
        self._current: set[Shape] = set()  # answered since the last look
        self._served: list[ServedBatchTime] = []
        self._news = asyncio.Event()
        self._turns = itertools.count()

    def __call__(self, batch_size: int, prompt_len: int, output_len: int) -> float:
        """Returns the estimated seconds of a batch. O(1)."""
        shape = batch_size, prompt_len, output_len
        estimate_s = self._known_s.get(shape)
        return padded_batch_s(self._cost, *shape) if estimate_s is None else estimate_s

    def look(self) -> None:
        """Wakes ``run`` after an event that may have formed or changed batches."""
        self._news.set()

    def ended(self, batch: BatchEnded) -> None:
        """Queues a batch that has run to its end for the estimators."""
        shape = BatchShape(batch.num_requests, batch.prompt_len, batch.output_len)
        self._served.append(ServedBatchTime(shape, batch.estimated_s, batch.duration_s))
        self._news.set()

    async def run(self) -> None:
        """Asks for estimates and reports ended batches, until cancelled."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            if loop.time() >= due_at:
                await self._look_again()
                due_at = loop.time() + LOOK_S
            self._news.clear()
            await self._tell()
            await self._ask()
            if not self._news.is_set():
                await wait_for(self._news, due_at - loop.time())

    async def _look_again(self) -> None:
        """Makes all estimates due again, since the estimators learn; until the answers come the old estimates hold."""
        self._counts = await current_counts(self._peers, self._counts)
        if len(self._known_s) > MAX_SHAPES:
            self._known_s.clear()
        self._current.clear()
        reply = await answer_of(self._peers.serving_time_estimator(0).profile())
        rows = () if reply is None else reply.profiles  # the last profile still holds
        measured = [row for row in rows if row.num_samples >= MIN_SAMPLES]
        if measured:
            self._cost = profile_cost(max(measured, key=lambda row: row.num_samples))

    async def _tell(self) -> None:
        """Reports every ended batch to every estimator; an estimator that is away misses it."""
        served, self._served = tuple(self._served), []
        if not served:
            return
        for index in range(self._counts.serving_time_estimators):
            await reaches(self._peers.serving_time_estimator(index).observe_batches(ServedBatchTimes(served)))

    async def _ask(self) -> None:
        """Asks the estimators in turn; if one is away, the next one is asked about the same batches."""
        wanted = {(len(batch), batch.prompt_len, batch.predicted_len): None for batch in self._timed()}
        shapes = [shape for shape in wanted if shape not in self._current][:MAX_SHAPES]
        if not shapes:
            return
        question = BatchShapes(tuple(BatchShape(*shape) for shape in shapes))
        for _ in range(self._counts.serving_time_estimators):
            index = next(self._turns) % self._counts.serving_time_estimators
            answer = await answer_of(self._peers.serving_time_estimator(index).estimate_batches(question))
            if answer is not None:
                self._known_s.update(zip(shapes, answer.seconds, strict=True))
                self._current.update(shapes)
                return
        await asyncio.sleep(UNANSWERED_PAUSE_S)  # otherwise each event would ask again


PAUSE_S = 2.0
"""Seconds of pause after a fault in the estimates or the log, without which requests are served."""

SHOW_S = 0.5
"""Seconds between two updates of the gauges."""


class Batcher(FleetShell):
    """The shell of the BatchScheduler: wakes it when something is due, and logs and measures the batches."""

    kind = "Batcher"

    def __init__(self, context: ComponentContext) -> None:
        config, max_num_seqs = context.config, context.config.engine.max_num_seqs
        # Where no component forecasts single requests, there is nothing to wait for.
        wait_s = config.batch.forecast_wait_s if predicts_requests(config) else 0.0
        machine_config = BatchMachineConfig(config.scheduler, config.batch, max_num_seqs, wait_s)
        self._recorder = EventRecorder(context.name, machine_config) if config.scheduler.event_log else None
        self._times = EstimatedTimes(context, lambda: self._batches.timed())
        asked = self._times if self._recorder is None else self._recorder.asking(self._times)
        self._batches = configured_batch_scheduler(config.scheduler, config.batch, max_num_seqs, asked, wait_s)
        self._tell = recorded(self._batches.handle, self._recorder)
        super().__init__(context, self._batches, self._tell_and_note)
        self._due_changed = asyncio.Event()
        self._life = uuid.uuid4().hex[:12]
        append = context.peers.log_store().append
        self._log = LogOutbox[FinishedBatch](append, lambda ended: LogRecords(batches=ended), context.degraded)
        self._metrics = BatchMetrics(context.registry, context.config.model.name)
        self._counted_splits = 0
        self._num_ended = 0

    async def start(self) -> None:
        await super().start()
        self.spawn(self._wake())
        for work in (self._times.run, self._log.run):
            self.spawn(again_and_again(work, PAUSE_S))  # requests are served without estimates and without a log

    async def stop(self) -> None:
        await super().stop()
        if self._recorder is not None:
            self._recorder.close()

    async def foresee(self, forecasts: ForecastsMade) -> None:
        """Takes forecasts of requests that wait; a forecast that comes after its batch was pulled is dropped."""
        await self._handle(ForecastsArrived(forecasts.made))

    async def replica_state(self, state: ReplicaState) -> None:
        if state.broken:
            await self._handle(ReplicaBroke(state.replica, state.broken))
        await self._handle(ReplicaRests(state.replica, state.resting))
        await super().replica_state(state)

    def recent(self) -> Iterable[Decision]:
        """Returns decisions about batches, not about single placements."""
        return Component.recent(self)

    @property
    def work_done(self) -> Mapping[str, float]:
        return {**super().work_done, "batches ended": self._num_ended, "batches split": self._batches.num_splits}

    def _tell_and_note(self, event: GlobalEvent, now: float) -> list[GlobalInstruction]:
        """Gives the machine an event and notes its instructions, which the caller then carries out."""
        instructions = self._tell(event, now)
        for instruction in instructions:
            match instruction:
                case PlaceRequests(_, requests):
                    self._metrics.started(len(requests))
                    choice = self._batches.choice(requests[0].request_id) if requests else None
                    if isinstance(choice, BatchChoice):
                        self.note("placed", **choice.told)  # of the batch, not of one request
                case BatchEnded():
                    self._metrics.ended(instruction.duration_s)
                    self._times.ended(instruction)
                    self._log.add(self._record(instruction))
                    self._note_end(instruction)
        self._times.look()
        self._due_changed.set()
        return instructions

    def _note_end(self, batch: BatchEnded) -> None:
        self._num_ended += 1
        self.note(
            "batch_ended",
            replica=batch.replica,
            num_requests=batch.num_requests,
            batch_len=batch.prompt_len,
            generation_len=batch.output_len,
            predicted_len=batch.predicted_len,
            took_s=batch.duration_s,
            estimated_s=batch.estimated_s,
        )

    def _record(self, batch: BatchEnded) -> FinishedBatch:
        return FinishedBatch(
            batch_id=f"{self._life}-{batch.number}",
            worker=batch.replica,
            num_requests=batch.num_requests,
            batch_len=batch.prompt_len,
            generation_len=batch.output_len,
            predicted_len=batch.predicted_len,
            estimated_time_s=batch.estimated_s,
            serving_time_s=batch.duration_s,
            finished_at=time.time(),
        )

    async def _wake(self) -> None:
        """Wakes the machine when something is due, and updates the gauges."""
        while True:
            self._due_changed.clear()
            due_at = self._batches.next_due_at
            wait_s = SHOW_S if due_at is None else min(SHOW_S, due_at - time.monotonic())
            if wait_s > 0:
                await wait_for(self._due_changed, wait_s)
            else:
                await self._handle(TimePassed())
            self._count()

    def _count(self) -> None:
        machine = self._batches
        self._metrics.set_queue(machine.num_waiting)
        self._metrics.split(machine.num_splits - self._counted_splits)
        self._counted_splits = machine.num_splits

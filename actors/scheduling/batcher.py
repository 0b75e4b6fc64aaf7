"""Batcher: takes requests in like the Router, and hands them out in batches to workers that are idle."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterable, Mapping

from actors.log.log_outbox import LogOutbox
from actors.runtime.component import ComponentContext
from actors.runtime.metrics import BatchMetrics
from actors.runtime.peer import again_and_again, wait_for
from actors.scheduling.batch_estimates import EstimatedTimes
from actors.scheduling.event_recorder import EventRecorder, recorded
from actors.scheduling.router import FleetShell
from core.decisions import Decision
from core.forecast import ForecastsMade
from core.messages.fleet import ReplicaState
from core.messages.log import FinishedBatch, FinishedBatches
from policies.compose import configured_batch_scheduler, predicts_requests
from policies.event_log import BatchMachineConfig
from policies.fleet.batch_choice import BatchChoice
from policies.fleet.events import (
    BatchEnded,
    GlobalEvent,
    GlobalInstruction,
    PlaceRequests,
    ReplicaBroke,
    ReplicaRests,
    TimePassed,
)
from policies.replica.events import ForecastsArrived

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
        self._log = LogOutbox(context.peers.log_store().append_batches, FinishedBatches, context.degraded)
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
        return self.noted

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

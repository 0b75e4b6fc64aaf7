"""Batcher: takes requests in like the Router, and hands them out in batches to workers that are idle."""

from __future__ import annotations

import asyncio
import math
import time
import uuid

from actors.log.log_outbox import LogOutbox
from actors.runtime.component import ComponentContext
from actors.runtime.metrics import BatchMetrics
from actors.runtime.waiting import again_and_again, wait_for
from actors.scheduling.batch_times import LiveBatchTimes
from actors.scheduling.router import Router
from core.forecast import Forecast
from core.messages.fleet import ReplicaState
from core.messages.forecasts import ForecastsMade
from core.messages.log import FinishedBatch, FinishedBatches
from policies.compose import build_batch_scheduler
from policies.fleet.batch_scheduler import BatchScheduler
from policies.fleet.events import (
    BatchEnded,
    GlobalEvent,
    GlobalInstruction,
    HistoryLearned,
    PlaceRequests,
    ReplicaBroke,
    ReplicaRests,
    TimePassed,
)
from policies.replica.events import ForecastsArrived
from policies.settings import BatchSettings

FORECAST_WAIT_S = 0.05
"""A request waits so long for its forecast before it is put into a batch."""

PAUSE_S = 2.0
"""After a fault in what requests can do without."""

SHOW_S = 0.5
"""How often the gauges are brought up to date."""


class Batcher(Router):
    """Hosts the BatchScheduler, wakes it when something is due, and logs and measures the batches."""

    kind = "Batcher"

    _machine: BatchScheduler

    def __init__(self, context: ComponentContext) -> None:
        self._times = LiveBatchTimes(context.peers)
        super().__init__(context)
        self._due_changed = asyncio.Event()
        self._life = uuid.uuid4().hex[:12]
        self._log = LogOutbox(context.peers.log_store().append_batches, FinishedBatches)
        self._metrics = BatchMetrics(context.registry, context.config.model.name)
        self._counted_splits = 0

    def _make_machine(self) -> BatchScheduler:
        config = self.context.config
        settings = BatchSettings(
            memory_tokens=math.inf,
            serving_time_s=self._times,
            wma_threshold=config.batch.wma_threshold,
            num_bins=config.batch.num_bins,
            max_wait_s=config.batch.max_wait_s,
            batch_size=config.batch.batch_size,
            max_num_seqs=config.engine.max_num_seqs,
        )
        # Without an artefact no predictor forecasts single requests: there is nothing to wait for.
        wait_s = FORECAST_WAIT_S if config.predictor.artefact else 0.0
        return build_batch_scheduler(config.scheduler.preset, settings, wait_s)

    async def start(self) -> None:
        await super().start()
        self.spawn(self._wake())
        for work in (self._times.run, self._log.run):
            self.spawn(again_and_again(work, PAUSE_S))  # requests are served without estimates and without a log

    async def foresee(self, forecasts: ForecastsMade) -> None:
        """Forecasts of requests that have been pulled already come too late."""
        await self._handle(ForecastsArrived(forecasts.made))

    async def replica_state(self, state: ReplicaState) -> None:
        if state.broken:
            await self._handle(ReplicaBroke(state.replica, state.broken))
        await self._handle(ReplicaRests(state.replica, state.resting))
        await super().replica_state(state)

    def _learned(self, forecast: Forecast) -> GlobalEvent:
        return HistoryLearned(forecast)

    def _handled(self) -> None:
        """What is due, and when, may be another thing now."""
        self._due_changed.set()

    def _note(self, instruction: GlobalInstruction) -> None:
        match instruction:
            case PlaceRequests(_, requests):
                self._metrics.started(len(requests))
            case BatchEnded():
                self._metrics.ended(instruction.duration_s)
                self._times.ended(instruction)
                self._log.add(self._record(instruction))

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
        """Tells the machine when something is due, and keeps the gauges."""
        while True:
            self._due_changed.clear()
            due_at = self._machine.next_due_at
            wait_s = SHOW_S if due_at is None else min(SHOW_S, due_at - time.monotonic())
            if wait_s > 0:
                await wait_for(self._due_changed, wait_s)
            else:
                await self._handle(TimePassed())
            self._count()

    def _count(self) -> None:
        machine = self._machine
        self._metrics.set_queue(machine.num_waiting)
        self._metrics.split(machine.num_splits - self._counted_splits)
        self._counted_splits = machine.num_splits

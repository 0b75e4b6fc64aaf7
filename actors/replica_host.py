"""One replica inside the control actor: its Scheduler, and the messages to and from its worker."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from ray.exceptions import RayActorError

from core.codec import decode, encode
from core.messages import PieceStatus, Plan, Refusal, StepReport, WorkerReady
from policies.replica_scheduler import (
    Event,
    RefuseRequest,
    ReplicaScheduler,
    RequestEnded,
    SendPlan,
    WorkerConnected,
    WorkerReported,
)


class ReplicaHost:
    """Turns messages into events of the state machine and its instructions into messages.

    Args:
        name: The replica's name, such as ``0``.
        worker: Handle of its worker.
        ready: What the worker said when it had started.
        on_end: Called with every request that ended.
    """

    def __init__(
        self,
        name: str,
        scheduler: ReplicaScheduler,
        worker: Any,
        ready: WorkerReady,
        on_end: Callable[[RequestEnded], None],
    ) -> None:
        self.name = name
        self.ready = ready
        self.free_blocks = ready.num_blocks
        self._scheduler = scheduler
        self._worker = worker
        self._on_end = on_end
        self._plan: Plan | None = None
        self._plan_due = asyncio.Event()
        self._last_report_at: float | None = None
        self.handle(WorkerConnected(ready))
        self.pumps = [asyncio.create_task(self._pump_plans()), asyncio.create_task(self._pump_reports())]

    def handle(self, event: Event) -> list[Refusal]:
        """Gives the scheduler an event and carries out what it says."""
        refusals = []
        for instruction in self._scheduler.handle(event, time.monotonic()):
            match instruction:
                case SendPlan(plan):
                    self._plan = plan
                    self._plan_due.set()
                case RefuseRequest(request_id, attempt, field, message):
                    refusals.append(Refusal(request_id, attempt, field, message))
                case RequestEnded():
                    self._on_end(instruction)
        return refusals

    async def rows(self) -> list[PieceStatus]:
        """The rows of this replica's scheduler and worker in ``farsight status``."""
        return [self._scheduler_row(), await self._worker_row()]

    def _scheduler_row(self) -> PieceStatus:
        age = None if self._last_report_at is None else time.monotonic() - self._last_report_at
        return PieceStatus(
            name=f"scheduler-{self.name}",
            kind="Scheduler",
            pid=os.getpid(),
            node=socket.gethostname(),
            state="failed" if any(pump.done() for pump in self.pumps) else "ready",
            queue=self._scheduler.num_waiting,
            last_step_age_s=age,
        )

    async def _worker_row(self) -> PieceStatus:
        try:
            return decode(await self._worker.status.remote(), PieceStatus)
        except RayActorError:
            return PieceStatus(f"worker-{self.name}", "ModelWorker", 0, "", "dead", 0, None)

    async def _pump_plans(self) -> None:
        """Sends the newest plan; those made while one is on its way are superseded by the last."""
        while True:
            await self._plan_due.wait()
            self._plan_due.clear()
            if self._plan is not None:
                await self._worker.push_plan.remote(encode(self._plan))

    async def _pump_reports(self) -> None:
        ack_seq = 0
        while True:
            report = decode(await self._worker.poll_report.remote(ack_seq), StepReport)
            ack_seq = report.report_seq
            self._last_report_at = time.monotonic()
            self.free_blocks = report.free_blocks
            self.handle(WorkerReported(report))

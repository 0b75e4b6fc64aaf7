"""The control actor of ``placement = "fused"``: hosts the replica's Scheduler and carries its messages."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

from ray.exceptions import RayActorError

from core.codec import decode, encode
from core.config import FarsightConfig
from core.messages import (
    Abort,
    PieceStatus,
    Plan,
    Refusal,
    Refusals,
    StatusReply,
    StepReport,
    Submit,
    WorkerReady,
)
from policies.presets import build_scheduler
from policies.replica_scheduler import (
    Event,
    RefuseRequest,
    RequestsAborted,
    RequestsArrived,
    SchedulerLimits,
    SendPlan,
    WorkerConnected,
    WorkerReported,
)

LOST_AFTER_S = 3.0
"""An ingress replica whose heartbeat is older than this is shown as lost."""


class Control:
    """Turns messages into events of the state machine and its instructions into messages."""

    def __init__(self, config: FarsightConfig) -> None:
        limits = SchedulerLimits(config.engine.max_num_seqs, config.scheduler.standby_slots)
        self._scheduler = build_scheduler(config.scheduler.preset, watermark=config.scheduler.watermark, limits=limits)
        self._worker: Any = None
        self._ready: bytes | None = None
        self._plan: Plan | None = None
        self._plan_due = asyncio.Event()
        self._pumps: list[asyncio.Task[None]] = []
        self._pieces: dict[str, tuple[PieceStatus, float]] = {}
        self._last_report_at: float | None = None
        self._num_blocks = 0
        self._free_blocks = 0

    async def connect(self, worker: Any, ready: bytes) -> None:
        """Begins to schedule for a worker that has started. ``ready`` is its ``WorkerReady``."""
        self._worker = worker
        self._ready = ready
        worker_ready = decode(ready, WorkerReady)
        self._num_blocks = self._free_blocks = worker_ready.num_blocks
        self._handle(WorkerConnected(worker_ready))
        self._pumps = [asyncio.create_task(self._pump_plans()), asyncio.create_task(self._pump_reports())]

    async def worker_ready(self) -> bytes | None:
        """The worker's ``WorkerReady``, or None while it loads."""
        return self._ready

    async def submit(self, data: bytes) -> bytes:
        """Takes ``Submit``; answers with ``Refusals`` (usually none)."""
        return encode(Refusals(tuple(self._handle(RequestsArrived(decode(data, Submit).requests)))))

    async def abort(self, data: bytes) -> None:
        """Takes ``Abort``."""
        self._handle(RequestsAborted(decode(data, Abort).keys))

    async def heartbeat(self, data: bytes) -> None:
        """Takes the ``PieceStatus`` of a piece that lives elsewhere."""
        piece = decode(data, PieceStatus)
        self._pieces[piece.name] = (piece, time.monotonic())

    async def status(self) -> bytes:
        """``StatusReply``: one row for every logical piece."""
        rows = [self._own_row(), await self._worker_row()]
        now = time.monotonic()
        for piece, at in self._pieces.values():
            rows.append(piece if now - at < LOST_AFTER_S else _with_state(piece, "lost"))
        return encode(StatusReply(tuple(rows), self._num_blocks, self._free_blocks))

    def _own_row(self) -> PieceStatus:
        failed = [pump for pump in self._pumps if pump.done()]
        age = None if self._last_report_at is None else time.monotonic() - self._last_report_at
        return PieceStatus(
            name="scheduler-0",
            kind="Scheduler",
            pid=os.getpid(),
            node=socket.gethostname(),
            state="failed" if failed else "ready" if self._pumps else "starting",
            queue=self._scheduler.num_waiting,
            last_step_age_s=age,
        )

    async def _worker_row(self) -> PieceStatus:
        try:
            row = decode(await self._worker.status.remote(), PieceStatus)
        except RayActorError:
            row = PieceStatus("worker-0", "ModelWorker", 0, "", "dead", 0, None)
        return row

    def _handle(self, event: Event) -> list[Refusal]:
        refusals = []
        for instruction in self._scheduler.handle(event, time.monotonic()):
            match instruction:
                case SendPlan(plan):
                    self._plan = plan
                    self._plan_due.set()
                case RefuseRequest(request_id, attempt, field, message):
                    refusals.append(Refusal(request_id, attempt, field, message))
        return refusals

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
            self._free_blocks = report.free_blocks
            self._handle(WorkerReported(report))

    async def ended(self) -> None:
        """Returns or raises when a pump ends, which it never should: whoever awaits this sees the failure."""
        done, _ = await asyncio.wait(self._pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in done:
            await pump


def _with_state(piece: PieceStatus, state: str) -> PieceStatus:
    return PieceStatus(piece.name, piece.kind, piece.pid, piece.node, state, piece.queue, piece.last_step_age_s)

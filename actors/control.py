"""The control actor of ``placement = "fused"``: hosts the Router and every replica's Scheduler."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import Any

from actors.replica_host import ReplicaHost
from core.codec import decode, encode
from core.config import FarsightConfig
from core.messages import Abort, PieceStatus, Refusal, Refusals, StatusReply, Submit, WorkerReady
from policies.global_scheduler import AbortOnReplica, GlobalEvent, PlaceRequests, ReplicaConnected, RequestLeft
from policies.presets import build_router, build_scheduler
from policies.replica_scheduler import (
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    SchedulerLimits,
)

LOST_AFTER_S = 3.0
"""An ingress replica whose heartbeat is older than this is shown as lost ..."""

FORGET_AFTER_S = 60.0
"""... and no longer shown after this."""


class Control:
    """Turns messages into events of the Router and passes on what it places."""

    def __init__(self, config: FarsightConfig) -> None:
        self._config = config
        self._router = build_router(config.scheduler.preset, config.scheduler.placement)
        self._replicas: dict[str, ReplicaHost] = {}
        self._pieces: dict[str, tuple[PieceStatus, float]] = {}

    async def connect(self, name: str, worker: Any, ready: bytes) -> None:
        """Begins to use a replica whose worker has started. ``ready`` is its ``WorkerReady``."""
        scheduler_config = self._config.scheduler
        limits = SchedulerLimits(self._config.engine.max_num_seqs, scheduler_config.standby_slots)
        scheduler = build_scheduler(scheduler_config.preset, watermark=scheduler_config.watermark, limits=limits)
        self._replicas[name] = ReplicaHost(name, scheduler, worker, decode(ready, WorkerReady), self._on_end)
        self._route(ReplicaConnected(name))

    async def worker_ready(self) -> bytes | None:
        """``WorkerReady`` of the replica that holds the shortest sequences; None before any is connected."""
        if not self._replicas:
            return None
        return encode(min((replica.ready for replica in self._replicas.values()), key=lambda r: r.max_model_len))

    async def submit(self, data: bytes) -> bytes:
        """Takes ``Submit``; answers with ``Refusals`` (usually none)."""
        return encode(Refusals(tuple(self._route(RequestsArrived(decode(data, Submit).requests)))))

    async def abort(self, data: bytes) -> None:
        """Takes ``Abort``."""
        self._route(RequestsAborted(decode(data, Abort).keys))

    async def heartbeat(self, data: bytes) -> None:
        """Takes the ``PieceStatus`` of a piece that lives elsewhere."""
        piece = decode(data, PieceStatus)
        self._pieces[piece.name] = (piece, time.monotonic())

    async def status(self) -> bytes:
        """``StatusReply``: one row for every logical piece."""
        replicas = list(self._replicas.values())
        rows = [self._router_row()]
        for pair in await asyncio.gather(*(replica.rows() for replica in replicas)):
            rows += pair
        now = time.monotonic()
        self._pieces = {name: seen for name, seen in self._pieces.items() if now - seen[1] < FORGET_AFTER_S}
        for piece, at in self._pieces.values():
            rows.append(piece if now - at < LOST_AFTER_S else _with_state(piece, "lost"))
        num_blocks = sum(replica.ready.num_blocks for replica in replicas)
        return encode(StatusReply(tuple(rows), num_blocks, sum(replica.free_blocks for replica in replicas)))

    async def ended(self) -> None:
        """Returns or raises when a pump ends, which it never should: whoever awaits this sees the failure."""
        pumps = [pump for replica in self._replicas.values() for pump in replica.pumps]
        done, _ = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in done:
            await pump

    def _route(self, event: GlobalEvent) -> list[Refusal]:
        refusals: list[Refusal] = []
        for instruction in self._router.handle(event, time.monotonic()):
            match instruction:
                case PlaceRequests(name, requests):
                    refused = self._replicas[name].handle(RequestsArrived(requests))
                    for refusal in refused:
                        self._route(RequestLeft(refusal.request_id, refusal.attempt, None))
                    refusals += refused
                case AbortOnReplica(name, keys):
                    self._replicas[name].handle(RequestsAborted(keys))
                case RefuseRequest(request_id, attempt, field, message):
                    refusals.append(Refusal(request_id, attempt, field, message))
        return refusals

    def _on_end(self, ended: RequestEnded) -> None:
        finished = ended.finished
        self._route(RequestLeft(finished.request_id, finished.attempt, finished.output_len))

    def _router_row(self) -> PieceStatus:
        return PieceStatus(
            name="router",
            kind="Router",
            pid=os.getpid(),
            node=socket.gethostname(),
            state="ready" if self._replicas else "starting",
            queue=self._router.num_in_flight,
            last_step_age_s=None,
        )


def _with_state(piece: PieceStatus, state: str) -> PieceStatus:
    return PieceStatus(piece.name, piece.kind, piece.pid, piece.node, state, piece.queue, piece.last_step_age_s)

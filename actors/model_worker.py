"""ModelWorker: hosts an ``engine.Worker``; steps run in a thread, messages on the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from actors.token_channel import TokenChannel, wait_for
from core.codec import decode, encode
from core.config import FarsightConfig
from core.messages import PieceStatus, Plan, TokenDelta

if TYPE_CHECKING:
    from core.config import EngineConfig
    from engine.worker import Output, Worker
    from kvcache import StepBatch

REPORT_INTERVAL_S = 0.02
"""Reports are at least this far apart unless something ended, arrived or is under pressure."""

POLL_TIMEOUT_S = 1.0
"""An idle long poll answers after this time, so that both sides know the other lives."""

SILENCE_S = 2.0
"""An ingress replica that has not polled for this long has lost its clients: their requests are aborted."""

FORGET_S = 60.0
"""After this silence what was kept for an ingress replica is dropped."""

logger = logging.getLogger(__name__)


class ModelWorker:
    """One rank of one replica.

    Args:
        name: The logical name shown in ``farsight status``.
        model_dir: Where config, weights and tokenizer lie.
        config: The whole configuration.
    """

    def __init__(self, name: str, model_dir: str, config: FarsightConfig) -> None:
        self._name = name
        self._model_dir = Path(model_dir)
        self._config = config
        self._worker: Worker | None = None
        self._channels: dict[str, TokenChannel] = {}
        self._wake = asyncio.Event()
        self._report_due = asyncio.Event()
        self._last_report_at = 0.0
        self._last_step_at: float | None = None
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> bytes:
        """Loads the model and starts the step loop; answers with ``WorkerReady``."""
        incarnation = uuid.uuid4().hex[:12]
        model, engine = self._config.model, self._config.engine
        self._worker = await asyncio.to_thread(
            _build, self._model_dir, model.dtype, engine, incarnation, model.replicas
        )
        self._loop_task = asyncio.create_task(self._run())
        return encode(self._worker.ready)

    async def ended(self) -> None:
        """Returns when the step loop has ended, raises what broke it. Whoever awaits this sees the worker die."""
        assert self._loop_task is not None
        await self._loop_task

    async def push_plan(self, data: bytes) -> None:
        """Takes a ``Plan``; it applies at the next step boundary."""
        self._live.offer_plan(decode(data, Plan))
        self._wake.set()

    async def poll_report(self, ack_seq: int) -> bytes:
        """Long poll for the next ``StepReport``; ``ack_seq`` is the last one received."""
        executor = self._live.executor
        executor.acknowledge(ack_seq)
        await wait_for(self._report_due, POLL_TIMEOUT_S)
        self._report_due.clear()
        self._last_report_at = time.monotonic()
        return encode(executor.report())

    async def poll_tokens(self, ingress_id: str, ack_seq: int) -> bytes:
        """Long poll for ``TokenBatches`` of one ingress replica; ``ack_seq`` is the last batch received."""
        return await self._channel(ingress_id).poll(ack_seq, POLL_TIMEOUT_S)

    async def status(self) -> bytes:
        """This piece's row of ``farsight status``, a ``PieceStatus``."""
        now = time.monotonic()
        row = PieceStatus(
            name=self._name,
            kind="ModelWorker",
            pid=os.getpid(),
            node=socket.gethostname(),
            state="ready" if self._worker is not None else "loading",
            queue=self._worker.executor.num_held if self._worker is not None else 0,
            last_step_age_s=None if self._last_step_at is None else now - self._last_step_at,
        )
        return encode(row)

    @property
    def _live(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"{self._name} is not started")
        return self._worker

    async def _run(self) -> None:
        """Steps for ever. A plan that arrives during a step applies at its end."""
        worker = self._live
        plan_seq = 0
        while True:
            self._wake.clear()
            self._abort_orphans(worker)
            batch = worker.begin_step()
            applied, plan_seq = worker.executor.plan_seq != plan_seq, worker.executor.plan_seq
            if applied or (batch is None and worker.executor.short_blocks):
                self._report_due.set()
            if batch is None:
                # Idle. A sequence that is paused may yet become an orphan, so look again in a while.
                await wait_for(self._wake, POLL_TIMEOUT_S)
                continue
            outputs = await self._step(worker, batch)
            self._last_step_at = time.monotonic()
            self._dispatch(outputs)
            self._mark_report(worker, outputs)

    def _abort_orphans(self, worker: Worker) -> None:
        silent = {ingress_id: channel.silent_s for ingress_id, channel in self._channels.items()}
        for ingress_id, silent_s in silent.items():
            if silent_s < SILENCE_S:
                continue
            outputs = worker.abort_ingress(ingress_id)
            if outputs:
                logger.warning("ingress %s silent for %.1f s: %d aborted", ingress_id, silent_s, len(outputs))
                self._dispatch(outputs)
                self._report_due.set()
            elif silent_s > FORGET_S:
                self._channels.pop(ingress_id).close()

    async def _step(self, worker: Worker, batch: StepBatch) -> list[Output]:
        try:
            tokens = await asyncio.to_thread(worker.execute, batch)
        except Exception as error:  # whatever torch raises ends the step's requests, not the worker
            return worker.fail_step(batch, error)
        return worker.finish_step(batch, tokens)

    def _dispatch(self, outputs: list[Output]) -> None:
        deltas: dict[str, list[TokenDelta]] = {}
        for output in outputs:
            deltas.setdefault(output.ingress_id, []).append(output.delta)
        for ingress_id, addressed in deltas.items():
            self._channel(ingress_id).put(addressed, num_rows=len(outputs))

    def _mark_report(self, worker: Worker, outputs: list[Output]) -> None:
        urgent = worker.executor.short_blocks > 0 or any(output.delta.finish_reason for output in outputs)
        if urgent or time.monotonic() - self._last_report_at >= REPORT_INTERVAL_S:
            self._report_due.set()

    def _channel(self, ingress_id: str) -> TokenChannel:
        if ingress_id not in self._channels:
            self._channels[ingress_id] = TokenChannel(self._live.ready.worker_incarnation)
        return self._channels[ingress_id]


def _build(model_dir: Path, dtype: str, engine: EngineConfig, incarnation: str, num_replicas: int) -> Worker:
    """Imports torch only here: Ray imports this module in every process that gets a handle of the actor."""
    from engine.build import build_worker

    return build_worker(model_dir, dtype, engine, incarnation, num_replicas)

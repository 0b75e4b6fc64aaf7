"""ModelWorker: hosts an ``engine.Worker``; steps run in a thread, messages on the event loop.

Nothing here may import torch at the top: Ray imports this module in every process that gets a handle of the actor.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import time
import uuid
from collections import deque
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from actors.metrics import EngineMetrics
from actors.piece import Piece, PieceContext
from actors.step_loop import Step, StepLoop
from actors.token_channel import TICK_S, TokenChannel
from actors.waiting import wait_for
from core.codec import decode, encode
from core.messages import Plan, ReportPoll, StepSample, TokenDelta, TokenPoll

if TYPE_CHECKING:
    from core.config import FarsightConfig
    from engine.emission import Output
    from engine.worker import Worker

REPORT_INTERVAL_S = 0.1
"""Reports are this far apart ..."""

SOON_S = 0.02
"""... but only this far if they tell of an end, for standby slots take the place of what ended meanwhile, or of one who
rests because its grant is used up. Under pressure, and when nothing is left to run, they go at once."""

POLL_TIMEOUT_S = 1.0
"""An idle long poll answers after this time, so that both sides know the other lives."""

SILENCE_S = 2.0
"""An ingress replica that has not polled for this long has lost its clients: their requests are aborted."""

FORGET_S = 60.0
"""After this silence what was kept for an ingress replica is dropped; its channel stays, for its numbers go on."""

MAX_SAMPLES = 8
"""Steps that a report tells of; the profile needs examples, not all of them."""

SWITCH_INTERVAL_S = 0.0002
"""How long the event loop may keep the interpreter from the stepping thread; Python's own 5 ms are a whole step."""

_GAP_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)

logger = logging.getLogger(__name__)


class ModelWorker(Piece):
    """One rank of one replica."""

    kind = "ModelWorker"

    def __init__(self, context: PieceContext) -> None:
        super().__init__(context)
        self._built: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._steps: StepLoop | None = None
        self._channels: dict[str, TokenChannel] = {}
        self._slow: dict[str, frozenset[str]] = {}
        self._wake = asyncio.Event()
        self._report_due = asyncio.Event()
        self._report_timer: asyncio.TimerHandle | None = None
        self._prefix_counts = (0, 0)  # queries and hits that the metrics know
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)
        self._reported_at = 0.0
        self._stepped_at: float | None = None
        self._metrics = EngineMetrics(context.registry, context.config.model.name, context.index)
        self._gaps = Histogram(
            "farsight:step_gap_seconds",
            "Between the end of a step and the beginning of the next, while there is work.",
            registry=context.registry,
            buckets=_GAP_BUCKETS_S,
        )
        self._model_cpu = Counter(
            "farsight:model_cpu_seconds", "CPU time of the model's forward passes.", registry=context.registry
        )

    async def start(self) -> None:
        """Loads the model and begins to step.

        Raises:
            InvalidValueError: the model, its directory or a setting cannot be used.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        config = self.context.config
        incarnation = uuid.uuid4().hex[:12]
        worker = await asyncio.to_thread(_build, Path(self.context.site.model_dir), config, incarnation)
        loop = asyncio.get_running_loop()
        self._steps = StepLoop(
            worker,
            on_step=lambda step: loop.call_soon_threadsafe(self._after_step, step),
            on_abort=lambda outputs: loop.call_soon_threadsafe(self._after_abort, outputs),
        )
        worker.when_copied(lambda: loop.call_soon_threadsafe(self._wake.set))
        self._metrics.set_cache_config(worker.ready.block_size, worker.ready.num_blocks)
        if config.engine.prefix_cache and config.scheduler.execution == "ragged":
            self._metrics.prefix_cache(0, 0)
        self._built.set_result(worker)
        self.spawn(self._run())
        self.spawn(self._watch_ingresses())

    async def stop(self) -> None:
        await super().stop()
        for channel in self._channels.values():
            channel.close()

    async def connect(self, data: bytes) -> bytes:
        """A Scheduler takes over: ``WorkerState``. Waits until the model is loaded."""
        worker = await asyncio.shield(self._built)
        with self._locked:
            return encode(worker.take_over())

    async def push_plan(self, data: bytes) -> bytes:
        """Takes a ``Plan``; it applies at the next step boundary."""
        plan = decode(data, Plan)
        worker = await asyncio.shield(self._built)
        prepared = worker.prepare(plan)
        with self._locked:
            worker.offer_plan(plan, prepared)
        self._wake.set()
        return b""

    async def poll_report(self, data: bytes) -> bytes:
        """Takes a ``ReportPoll``; answers with the next ``StepReport`` when one is due."""
        poll = decode(data, ReportPoll)
        worker = await asyncio.shield(self._built)
        with self._locked:
            worker.executor.acknowledge(poll.ack_seq)
        await wait_for(self._report_due, POLL_TIMEOUT_S)
        self._report_due.clear()
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        self._reported_at = time.monotonic()
        samples = tuple(self._samples)
        self._samples.clear()
        with self._locked:
            report = worker.executor.report(samples)
        return encode(report)

    async def poll_tokens(self, data: bytes) -> bytes:
        """Takes a ``TokenPoll``; answers with ``TokenBatches`` when there are any."""
        poll = decode(data, TokenPoll)
        worker = await asyncio.shield(self._built)
        channel = self._channel(worker, poll.ingress_id)
        was_full = channel.full
        channel.acknowledge(poll.ack_seq)
        slow = frozenset(poll.slow)
        if was_full or slow != self._slow.get(poll.ingress_id, frozenset()):
            self._slow[poll.ingress_id] = slow
            self._stall(worker)
            self._wake.set()
        return await channel.poll(POLL_TIMEOUT_S)

    @property
    def state(self) -> str:
        return "ready" if self._built.done() else "starting"

    @property
    def queue(self) -> int:
        return self._built.result().executor.num_held if self._built.done() else 0

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._stepped_at is None else time.monotonic() - self._stepped_at

    @property
    def _locked(self) -> AbstractContextManager[bool]:
        assert self._steps is not None
        return self._steps.locked

    async def _run(self) -> None:
        """Steps whenever there is something to run."""
        assert self._steps is not None
        while True:
            self._wake.clear()
            await asyncio.to_thread(self._steps.run)
            self._report_due.set()  # nothing runs: whatever the plan freed or left waiting is to be known at once
            await self._wake.wait()

    def _after_step(self, step: Step) -> None:
        worker, sample = self._built.result(), step.sample
        self._stepped_at = time.monotonic()
        self._samples.append(sample)
        self._metrics.step(sample.prefill_tokens + sample.decode_seqs)
        self._model_cpu.inc(step.cpu_s)
        self._count_prefixes(worker)
        if step.gap_s is not None:
            self._gaps.observe(step.gap_s)
        outputs = worker.render(step.emissions) + step.failures
        self._dispatch(worker, outputs)
        if any(self._slow.values()) or any(channel.full for channel in self._channels.values()):
            self._stall(worker)
        ended = any(output.delta.finish_reason for output in outputs)
        self._mark_report(soon=ended or worker.executor.out_of_grants, pressure=worker.executor.short_blocks > 0)

    def _count_prefixes(self, worker: Worker) -> None:
        counts = worker.executor.prefix_queries, worker.executor.prefix_hits
        if counts != self._prefix_counts:
            queries, hits = self._prefix_counts
            self._metrics.prefix_cache(counts[0] - queries, counts[1] - hits)
            self._prefix_counts = counts

    def _mark_report(self, *, soon: bool, pressure: bool) -> None:
        wait_s = self._reported_at + (SOON_S if soon else REPORT_INTERVAL_S) - time.monotonic()
        if pressure or wait_s <= 0:
            self._report_due.set()
        elif soon and self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(wait_s, self._report_due.set)

    def _dispatch(self, worker: Worker, outputs: list[Output]) -> None:
        deltas: dict[str, list[TokenDelta]] = {}
        for output in outputs:
            deltas.setdefault(output.ingress_id, []).append(output.delta)
        for ingress_id, addressed in deltas.items():
            self._channel(worker, ingress_id).put(addressed, num_rows=len(outputs))

    def _channel(self, worker: Worker, ingress_id: str) -> TokenChannel:
        if ingress_id not in self._channels:
            self._channels[ingress_id] = TokenChannel(worker.ready.worker_incarnation)
        return self._channels[ingress_id]

    def _stall(self, worker: Worker) -> None:
        slow: dict[str, Collection[str] | None] = dict(self._slow)
        slow |= {ingress_id: None for ingress_id, channel in self._channels.items() if channel.full}
        with self._locked:
            worker.stall(slow)

    async def _watch_ingresses(self) -> None:
        """Ends what belongs to ingress replicas that have fallen silent, or have never asked for their tokens."""
        assert self._steps is not None
        worker = self._built.result()
        while True:
            await asyncio.sleep(TICK_S)
            with self._locked:
                owners = worker.ingress_ids
            for ingress_id in owners:
                if self._channel(worker, ingress_id).silent_s >= SILENCE_S:
                    self._steps.abort_ingress(ingress_id)
                    self._wake.set()
            for ingress_id, channel in self._channels.items():
                if channel.silent_s > FORGET_S and ingress_id not in owners:
                    channel.clear()
                    self._slow.pop(ingress_id, None)

    def _after_abort(self, outputs: list[Output]) -> None:
        logger.warning("%d requests of silent ingress replicas aborted", len(outputs))
        self._dispatch(self._built.result(), outputs)
        self._report_due.set()


def _build(model_dir: Path, config: FarsightConfig, incarnation: str) -> Worker:
    """Torch is imported only here, and only if a model is to compute."""
    from engine.build import build_worker

    worker = build_worker(
        model_dir, config.model.dtype, config.engine, incarnation, config.model.replicas, config.scheduler
    )
    gc.collect()
    gc.freeze()  # what torch has brought need not be looked through again, in the middle of a step
    return worker

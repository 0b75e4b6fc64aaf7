"""ModelWorker: hosts an ``engine.Worker``; steps run in a thread, messages on the event loop.

Nothing here may import torch at the top: Ray imports this module in every process that gets a handle of the actor.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import os
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram

from farsight.actors.calls.scheduling import RankTicket, WorkerCalls
from farsight.actors.pulse import read_clock
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import EngineMetrics, family
from farsight.actors.runtime.peer import wait_for
from farsight.actors.runtime.shared_rows import rows_directory
from farsight.actors.worker.step_loop import Step, StepBounds, StepLoop
from farsight.actors.worker.token_channels import POLL_TIMEOUT_S, TICK_S, TokenChannels
from farsight.core.messages.plans import Plan, ReportPoll, StepReport, WorkerState
from farsight.core.messages.status import Work
from farsight.core.messages.step_times import StepSample
from farsight.core.messages.tokens import TokenBatches, TokenDelta, TokenPoll
from farsight.core.processors import bind_to_node, compute_threads
from farsight.engine.native.library import is_compiling
from farsight.kvcache.step_batch import step_sample
from farsight.kvcache.tiers import TierCounts
from farsight.policies.compose import predicts_requests

if TYPE_CHECKING:
    from farsight.core.config.load import FarsightConfig
    from farsight.engine.drafted_steps import DraftCounts
    from farsight.engine.emission import Output
    from farsight.engine.parallel.links import Ranks
    from farsight.engine.worker import Worker

REPORT_INTERVAL_S = 0.1
"""Seconds between two reports ..."""

SOON_S = 0.02
"""... but only so many before a report of an ended sequence or a used-up grant: a standby slot may have taken the place
meanwhile. Under memory pressure, and when nothing is left to run, reports go at once."""

MAX_SAMPLES = 8
"""Most steps in a report; the profile needs examples, not all steps."""

SWITCH_INTERVAL_S = 0.0002
"""Seconds for which the event loop may keep the interpreter from the stepping thread; Python's 5 ms are one step."""

_GAP_BUCKETS_S = (0.0001, 0.0002, 0.0003, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25)

logger = logging.getLogger(__name__)


class ModelWorker(Component, WorkerCalls):
    """One replica, or the first of its processes if the model is spread over several; the other ranks follow."""

    kind = "ModelWorker"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        self._built: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._ticket: asyncio.Future[RankTicket] = asyncio.get_running_loop().create_future()
        self._steps: StepLoop | None = None
        # A thread of its own: asyncio has as many threads as cores and four, and workers may share a process.
        self._thread = ThreadPoolExecutor(1, "steps")
        self._incarnation = uuid.uuid4().hex[:12]
        self._channels = TokenChannels(self._incarnation)
        self._wake = asyncio.Event()
        self._report_due = asyncio.Event()
        self._report_timer: asyncio.TimerHandle | None = None
        self._prefix_counts = (0, 0)  # queries and hits already in the metrics
        self._draft_counts: DraftCounts | None = None  # already in the metrics
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)
        self._bounds = StepBounds(context.config.actors.step_stall_s)
        self._reported_at = 0.0
        self._stepped_at: float | None = None
        self._loaded: float | None = None
        self._metrics = EngineMetrics(context.registry, context.config.model.name, context.index)
        registry = context.registry
        text = "Between the end of a step and the beginning of the next, while there is work."
        self._gaps = family(registry, Histogram, "farsight:step_gap_seconds", text, buckets=_GAP_BUCKETS_S)
        text = "CPU time of the model's forward passes."
        self._model_cpu = family(registry, Counter, "farsight:model_cpu_seconds", text)
        text = "Times the device ran out of memory in a step, which was then computed in parts."
        self._ooms = family(registry, Counter, "farsight:device_ooms", text)
        text = "Steps cut off by scheduler.mlfq = preemption."
        self._cut_off = family(registry, Counter, "farsight:steps_cut_off", text)
        self._num_ooms = 0  # already in the metric
        text = "Blocks of KV saved to tiers below the device, brought back from them, and lost, by what happened."
        self._tier_blocks = family(registry, Counter, "farsight:kv_tier_blocks", text, ("event",))
        self._tier_counts = TierCounts()  # already in the metric
        self._num_steps = self._num_prefilled = self._num_decoded = 0

    async def start(self) -> None:
        """Loads the model and begins to step.

        Raises:
            InvalidValueError: The model, its directory or a setting cannot be used.
            RankLost: Another rank of the replica does not come up.
        """
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        config = self.context.config
        loop = asyncio.get_running_loop()
        ranks = self._open_ranks(loop) if config.model.num_ranks > 1 else None
        site = self.context.site
        place = int(self.context.index.partition(".")[0])
        worker = await loop.run_in_executor(
            self._thread, _build, Path(site.model_dir), config, self._incarnation, ranks, place, self._note_loaded
        )
        worker.ready = dataclasses.replace(worker.ready, model_version=self.context.site.model_version)
        self._steps = StepLoop(
            worker,
            on_step=lambda step: loop.call_soon_threadsafe(self._after_step, step),
            on_abort=lambda outputs: loop.call_soon_threadsafe(self._after_abort, outputs),
            max_failures=config.actors.failing_steps,
        )
        worker.when_copied(lambda: loop.call_soon_threadsafe(self._wake.set))
        self._metrics.set_cache_config(worker.ready.block_size, worker.ready.num_blocks)
        if config.engine.prefix_cache and config.scheduler.execution == "ragged":
            self._metrics.prefix_cache(0, 0)
        self._count_drafts(worker)
        self._built.set_result(worker)
        self.spawn(self._run())
        self.spawn(self._watch_ingresses())

    def _note_loaded(self, share: float) -> None:
        self._loaded = share

    async def stop(self) -> None:
        await super().stop()
        self._thread.shutdown(wait=False)
        self._channels.close()

    def _open_ranks(self, loop: asyncio.AbstractEventLoop) -> Ranks:
        """Listens for the other ranks of the replica."""
        import ray  # not at the top: a service without Ray has no further ranks

        from farsight.engine.parallel.links import Gathering, Ranks
        from farsight.engine.parallel.mesh import Mesh

        model = self.context.config.model
        mesh = Mesh(model.tensor_parallel, model.pipeline_parallel, model.expert_parallel)
        gathering = Gathering(mesh.size, ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        self._ticket.set_result(RankTicket(gathering.ticket.host, gathering.ticket.port, gathering.ticket.key))
        # A lost rank ends the replica as a whole: none could go on without the others.
        return Ranks(mesh, gathering, lambda error: loop.call_soon_threadsafe(self.fail, error))

    async def gather(self) -> RankTicket:
        return await asyncio.shield(self._ticket)

    async def connect(self) -> WorkerState:
        worker = await asyncio.shield(self._built)
        with self._locked:
            return worker.take_over()

    async def push_plan(self, plan: Plan) -> None:
        worker = await asyncio.shield(self._built)
        prepared = worker.prepare(plan)
        with self._locked:
            worker.offer_plan(plan, prepared)
        self._wake.set()

    async def poll_report(self, poll: ReportPoll) -> StepReport:
        worker = await asyncio.shield(self._built)
        with self._locked:
            worker.executor.acknowledge(poll.ack_seq)
            if poll.wants_cache:
                worker.executor.tell_whole_cache()
        await wait_for(self._report_due, POLL_TIMEOUT_S)
        self._report_due.clear()
        if self._report_timer is not None:
            self._report_timer.cancel()
            self._report_timer = None
        self._reported_at = time.monotonic()
        samples = tuple(self._samples)
        self._samples.clear()
        with self._locked:
            return worker.executor.report(samples)

    async def poll_tokens(self, poll: TokenPoll) -> TokenBatches:
        worker = await asyncio.shield(self._built)
        if self._channels.hear(poll):
            self._stall(worker, self._channels.stalled())
            self._wake.set()
        return await self._channels.answer(poll)

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
    def loaded(self) -> float | None:
        return self._loaded

    @property
    def preparing(self) -> str:
        return "compiling kernels for this processor, once" if is_compiling() else ""

    @property
    def work_done(self) -> Mapping[str, float]:
        return {"steps": self._num_steps, "prompt tokens": self._num_prefilled, "output tokens": self._num_decoded}

    @property
    def work(self) -> Work | None:
        step = None if self._steps is None else self._steps.under_way
        if step is None:
            return None
        bound_s = self._bounds.bound_s(None if step.batch is None else step_sample(step.batch, 0.0))
        cost = self._bounds.cost
        if cost is not None:
            self._built.result().executor.meter.cost = cost
        return Work(self.name, step.number, bound_s, read_clock(os.getpid(), step.thread_id))

    @property
    def _locked(self) -> AbstractContextManager[bool]:
        assert self._steps is not None
        return self._steps.locked

    async def _run(self) -> None:
        """Runs steps whenever there is something to run; never returns."""
        assert self._steps is not None
        while True:
            self._wake.clear()
            await asyncio.get_running_loop().run_in_executor(self._thread, self._steps.run)
            self._report_due.set()  # nothing runs: the Scheduler must know at once
            await self._wake.wait()

    def _after_step(self, step: Step) -> None:
        worker, sample = self._built.result(), step.sample
        self._stepped_at = time.monotonic()
        if step.was_cut_off:
            self._cut_off.inc()
        else:
            self._samples.append(sample)
            self._bounds.add(sample)
        self._metrics.step(sample.prefill_tokens + sample.decode_seqs)
        self._num_steps += 1
        self._num_prefilled += sample.prefill_tokens
        self._num_decoded += sample.decode_seqs
        self._model_cpu.inc(step.cpu_s)
        num_ooms = worker.runner.num_ooms
        self._ooms.inc(num_ooms - self._num_ooms)
        self._num_ooms = num_ooms
        self._count_tiers(worker)
        self._count_prefixes(worker)
        self._count_drafts(worker)
        if step.gap_s is not None:
            self._gaps.observe(step.gap_s)
        outputs = worker.render(step.emissions) + step.failures
        self._dispatch(outputs)
        stalled = self._channels.stalled()
        if stalled:
            self._stall(worker, stalled)
        ended = any(output.delta.finish_reason for output in outputs)
        self._mark_report(soon=ended or worker.executor.out_of_grants, pressure=worker.executor.short_blocks > 0)

    def _count_prefixes(self, worker: Worker) -> None:
        counts = worker.executor.prefix_queries, worker.executor.prefix_hits
        if counts != self._prefix_counts:
            queries, hits = self._prefix_counts
            self._metrics.prefix_cache(counts[0] - queries, counts[1] - hits)
            self._prefix_counts = counts

    def _count_tiers(self, worker: Worker) -> None:
        tiers = worker.executor.tiers
        if tiers is not None and tiers.counts is not self._tier_counts:
            before, self._tier_counts = self._tier_counts, tiers.counts
            for event, count in dataclasses.asdict(tiers.counts).items():
                self._tier_blocks.labels(event).inc(count - getattr(before, event))

    def _count_drafts(self, worker: Worker) -> None:
        if worker.speculation is not None and worker.speculation.counts is not self._draft_counts:
            counts = worker.speculation.counts
            self._metrics.drafted(*(counts if self._draft_counts is None else counts.since(self._draft_counts)))
            self._draft_counts = counts

    def _mark_report(self, *, soon: bool, pressure: bool) -> None:
        wait_s = self._reported_at + (SOON_S if soon else REPORT_INTERVAL_S) - time.monotonic()
        if pressure or wait_s <= 0:
            self._report_due.set()
        elif soon and self._report_timer is None:
            self._report_timer = asyncio.get_running_loop().call_later(wait_s, self._report_due.set)

    def _dispatch(self, outputs: list[Output]) -> None:
        deltas: dict[str, list[TokenDelta]] = {}
        for output in outputs:
            deltas.setdefault(output.ingress_id, []).append(output.delta)
        for ingress_id, addressed in deltas.items():
            self._channels.put(ingress_id, addressed, num_rows=len(outputs))

    def _stall(self, worker: Worker, stalled: Mapping[str, Collection[str] | None]) -> None:
        with self._locked:
            worker.stall(stalled)

    async def _watch_ingresses(self) -> None:
        """Aborts requests of ingress replicas that have died. Ray is asked about a silent one, which may be busy."""
        assert self._steps is not None
        worker = self._built.result()
        while True:
            await asyncio.sleep(TICK_S)
            with self._locked:
                owners = worker.ingress_ids
            for ingress_id in await self.context.gone(self._channels.silent(owners)):
                self._steps.abort_ingress(ingress_id)
                self._wake.set()

    def _after_abort(self, outputs: list[Output]) -> None:
        logger.warning("%d requests of an ingress replica that has died were aborted", len(outputs))
        self._dispatch(outputs)
        self._report_due.set()


def _build(
    model_dir: Path,
    config: FarsightConfig,
    incarnation: str,
    ranks: Ranks | None,
    place: int,
    progress: Callable[[float], None],
) -> Worker:
    """Builds the worker, in the thread that will run its steps. Torch is imported here, if a model computes.

    Args:
        place: The replica's number.
        progress: As in ``build_worker``.
    """
    from farsight.engine.build import build_worker
    from farsight.engine.vision.row_files import SharedEmbeddings
    from farsight.engine.vision.spans import carried_rows

    if config.engine.device == "cpu" and ranks is None:
        bind_to_node(place, compute_threads(config.engine.num_threads, config.model.most_replicas))
    rows = rows_directory()
    worker = build_worker(
        model_dir,
        config.model.dtype,
        config.engine,
        incarnation,
        config.model.most_replicas,
        config.scheduler,
        ranks,
        carried_rows if rows is None else SharedEmbeddings(rows).rows,
        progress,
    )
    worker.runner.reads_states = ranks is None and predicts_requests(config)
    gc.collect()
    gc.freeze()  # no collection in the middle of a step looks through torch's objects
    return worker

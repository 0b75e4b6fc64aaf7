"""Scheduler: hosts the ReplicaScheduler of one replica."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from farsight.actors.calls.scheduling import SchedulerCalls
from farsight.actors.log.log_outbox import LogOutbox
from farsight.actors.runtime.component import MAX_RECENT, Component, ComponentContext
from farsight.actors.runtime.metrics import EngineMetrics, OffloadMetrics
from farsight.actors.runtime.names import initial_counts
from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerLost, current_counts, reaches, wait_for
from farsight.actors.scheduling.event_recorder import EventRecorder, recorded
from farsight.core.costs import profile_cost
from farsight.core.decisions import Decision, on_clock, pack_decisions, unpack_decisions
from farsight.core.errors import MessageError
from farsight.core.forecast import ForecastsMade
from farsight.core.messages.fleet import ReplicaNews, ReplicaState
from farsight.core.messages.kv import OffloadQuestion
from farsight.core.messages.live import LiveQuery, ReplicaLive
from farsight.core.messages.log import LogRecords, RequestTrace, RequestTraces, TraceQuery
from farsight.core.messages.plans import (
    CacheReply,
    FinishedSequence,
    KVCacheEvent,
    Plan,
    ReportPoll,
    StartedRequest,
    StepReport,
    WorkerReady,
    WorkerState,
)
from farsight.core.messages.requests import Key, Keys, Refusal, Refusals, Submit
from farsight.core.messages.step_times import ReplicaStepProfile, StepSample, StepSamples
from farsight.policies.compose import configured_replica, is_batch_mode
from farsight.policies.event_log import MachineConfig
from farsight.policies.order.readers import tally_of
from farsight.policies.order.shadow import NO_ENDS
from farsight.policies.replica.decision_trace import account_closed
from farsight.policies.replica.events import (
    AccountClosed,
    AskOffload,
    BatchBroken,
    CacheTold,
    CostLearned,
    Event,
    ForecastsArrived,
    OffloadOrdered,
    OffloadUnanswered,
    PromisesAsked,
    PromisesMade,
    RefuseRequest,
    RequestEnded,
    RequestGivenBack,
    RequestsAborted,
    RequestsArrived,
    RequestsRecalled,
    RequestStarted,
    SendPlan,
    WorkerConnected,
    WorkerLost,
    WorkerReported,
    request_trace,
)
from farsight.policies.replica.live_view import SchedulerWatch
from farsight.policies.replica.order_check import OffloadTally

SAY_AGAIN_S = 1.0
"""Most seconds between two messages to the Router, so that a new Router soon knows the replica."""

PLAN_INTERVAL_S = 0.005
"""Fewest seconds between two plans while more than ``FEW_SEQUENCES`` run: the next step has begun already."""

FEW_SEQUENCES = 4
"""Up to so many running sequences every plan is sent at once: the worker may be waiting for it."""

NEWS_S = 0.05
"""Seconds for which starts, ends and prefix cache events are collected into one message to the Router.

In batch mode they are sent at once: the last end of a batch lets the next batch start."""

MAX_NOTICES = 256
"""Most cache events that wait for the Router; beyond it the oldest are dropped, and the Router asks for all."""

FEED_S = 0.25
"""Seconds for which reports are collected for the KV offload manager and the estimators, which need no haste."""

MIN_SAMPLES = 32
"""Fewest step samples in a message to the estimators."""

MAX_SAMPLES = 256
"""Most step samples that wait for the estimators; beyond it the oldest are dropped."""

MAX_LIVE_ROWS = 500
"""Most requests in one answer to the operator's pages."""


class Scheduler(Component, SchedulerCalls):
    """Turns messages into events of the state machine and its instructions into messages."""

    kind = "Scheduler"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        config = context.config
        self._machine = configured_replica(config.scheduler, config.engine.max_num_seqs)
        self._recorder: EventRecorder | None = None
        if config.scheduler.event_log:
            self._recorder = EventRecorder(self.name, MachineConfig(config.scheduler, config.engine.max_num_seqs))
        self._hear = recorded(self._machine.handle, self._recorder)
        self._replica = context.index
        self._view = SchedulerWatch(self._replica, self._machine)
        self._worker = context.peers.worker(self._replica, self._scheduling)
        self._ready: WorkerReady | None = None
        self._plan: Plan | None = None
        self._plan_due = asyncio.Event()
        self._question: OffloadQuestion | None = None
        self._question_due = asyncio.Event()
        self._offload_deadline_s = self._machine.limits.offload_deadline_s
        self._news_due = asyncio.Event()
        self._events_due = asyncio.Event()
        self._started: list[StartedRequest] = []
        self._ended: list[FinishedSequence] = []
        self._told: deque[KVCacheEvent] = deque(maxlen=MAX_NOTICES)
        self._told_seq = 0
        self._profile: ReplicaStepProfile | None = None  # newer than what the Router has
        self._late_refusals: list[Refusal] = []
        self._in_batches = is_batch_mode(config.scheduler.preset)
        self._broken: list[Key] = []
        self._given_back: list[RequestGivenBack] = []
        self._resting: tuple[Key, ...] = ()
        self._report: StepReport | None = None
        self._feed_due = asyncio.Event()
        self._samples: deque[StepSample] = deque(maxlen=MAX_SAMPLES)
        self._reported_at: float | None = None
        self._metrics = EngineMetrics(context.registry, config.model.name, self._replica)
        self._offload_metrics = OffloadMetrics(context.registry, config.model.name, self._replica)
        self._counted_preemptions = 0
        self._counted_offloads = OffloadTally()
        self._counted_guard = NO_ENDS
        self._num_started = self._num_ended = self._num_plans = 0
        self._closed: deque[bytes] = deque(maxlen=MAX_RECENT)
        append = context.peers.log_store().append
        self._traces = LogOutbox[RequestTrace](append, lambda traces: LogRecords(traces=traces), context.degraded)

    async def start(self) -> None:
        own = (self._lease, self._push_plans, self._ask_about_kv, self._tell_router, self._tell_events, self._feed)
        for work in (*own, self._traces.run):
            self.spawn(work())

    async def stop(self) -> None:
        await super().stop()
        self._metrics.remove()
        self._offload_metrics.remove()
        if self._recorder is not None:
            self._recorder.close()

    async def submit(self, submit: Submit) -> Refusals:
        refusals = tuple(self._handle(RequestsArrived(submit.requests, submit.placements)))
        if self._in_batches:
            return Refusals(refusals)
        await asyncio.sleep(0)  # the plan goes first
        with self._scheduling():
            asked = PromisesAsked(tuple(request.request_id for request in submit.requests))
            (made,) = self._hear(asked, time.monotonic())
        assert isinstance(made, PromisesMade)
        return Refusals(refusals, made.promises)

    async def foresee(self, forecasts: ForecastsMade) -> None:
        self._handle(ForecastsArrived(forecasts.made))

    async def abort(self, aborted: Keys) -> None:
        self._handle(RequestsAborted(aborted.keys))

    async def unknown(self, asked: Keys) -> Keys:
        """Returns the attempts that are not here; none without a worker, whose state alone tells. Attempts of a broken
        batch count as known: the Router hears of them in another message."""
        keys = [key for key in asked.keys if key not in self._broken]
        return Keys(self._machine.unknown(keys) if self._ready is not None else ())

    async def recall(self, asked: Keys) -> Submit:
        self._late_refusals += self._handle(RequestsRecalled(asked.keys))
        given, self._given_back = self._given_back, []
        traces = (None if each.account is None else self._trace(each.account, ended=False) for each in given)
        decisions = tuple(b"" if each is None else each.decisions for each in traces)
        return Submit(tuple(each.request for each in given), decisions)

    async def cached(self) -> CacheReply:
        if self._ready is None:
            return CacheReply("", None)
        return CacheReply(self._ready.worker_incarnation, self._machine.cache.whole())

    async def live(self, query: LiveQuery) -> ReplicaLive:
        return self._view.of(time.monotonic(), min(query.max_rows, MAX_LIVE_ROWS))

    async def explain(self, query: TraceQuery) -> RequestTraces:
        known = [each for each in self._traces if each.trace_id.startswith(f"{query.response_id}/")]
        known += [self._so_far(account_closed(each)) for each in self._machine.accounts(query.response_id)]
        return RequestTraces(tuple(known))

    def _so_far(self, account: AccountClosed) -> RequestTrace:
        """Makes the trace of a request on this replica, with its present state as the last decision."""
        now = time.monotonic()
        state = Decision("outlook", now, self._machine.progress(account.request_id, now))
        return self._trace(replace(account, decisions=account.decisions + pack_decisions([state])), ended=False)

    @property
    def state(self) -> str:
        return "waiting" if self._ready is None else "ready"

    @property
    def queue(self) -> int:
        return self._machine.num_waiting

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._reported_at is None else time.monotonic() - self._reported_at

    @property
    def work_done(self) -> Mapping[str, float]:
        return {
            "requests started": self._num_started,
            "requests ended": self._num_ended,
            "preemptions": self._machine.num_preemptions,
            "plans": self._num_plans,
        }

    def recent(self) -> Iterable[Decision]:
        """Returns the last decisions about requests that have ended here; each request has many."""
        epoch_s = time.time() - time.monotonic()
        found = (each for packed in self._closed for each in unpack_decisions(on_clock(epoch_s, packed)))
        return sorted(found, key=lambda each: each.at)[-MAX_RECENT:]

    def _handle(self, event: Event) -> list[Refusal]:
        """Gives the machine an event and carries out its instructions; returns the refusals among them."""
        refusals = []
        with self._scheduling():
            instructions = self._hear(event, time.monotonic())
        for instruction in instructions:
            match instruction:
                case SendPlan(plan):
                    self._plan = plan
                    self._plan_due.set()
                case AskOffload(question):
                    self._question = question
                    self._question_due.set()
                case RefuseRequest(request_id, attempt, field, message):
                    refusals.append(Refusal(request_id, attempt, field, message))
                case RequestStarted(started):
                    self._started.append(started)
                    self._num_started += 1
                    self._metrics.started(started.queue_s)
                    self._events_due.set()
                case CacheTold(notice):
                    self._told.append(notice)
                    self._events_due.set()
                case RequestEnded(finished):
                    self._view.ended(instruction)
                    self._ended.append(finished)
                    self._num_ended += 1
                    self._events_due.set()
                case RequestGivenBack():
                    self._given_back.append(instruction)
                case BatchBroken(keys):
                    self._broken += keys
                    self._news_due.set()
                case AccountClosed():
                    self._view.closed(instruction)
                    self._closed.append(instruction.decisions)
                    self._traces.add(self._trace(instruction, ended=True))
        if self._in_batches:
            self._note_resting()
        return refusals

    @contextlib.contextmanager
    def _scheduling(self) -> Iterator[None]:
        """Adds the CPU time of the code inside to the scheduling metric."""
        began_s = time.thread_time()
        yield
        self._metrics.scheduled(time.thread_time() - began_s)

    def _note_resting(self) -> None:
        resting = self._machine.resting()
        if resting != self._resting:
            self._resting = resting
            self._news_due.set()

    def _trace(self, account: AccountClosed, *, ended: bool) -> RequestTrace:
        return request_trace(account, self.name, time.time() - time.monotonic(), ended=ended)

    async def _lease(self) -> None:
        """Takes over the worker, follows its reports until it is lost, and waits for the next worker."""
        while True:
            try:
                state = await self._worker.connect()
                self._late_refusals += self._handle(WorkerConnected(state))
                self._set_ready(state.ready)
                await self._follow(state)
            except PeerLost:
                self._told.clear()
                self._told_seq = 0
                if self._ready is not None:
                    self._handle(WorkerLost())
                    self._set_ready(None)
                await asyncio.sleep(LOOK_AGAIN_S)

    def _set_ready(self, ready: WorkerReady | None) -> None:
        self._ready = ready
        self._news_due.set()

    async def _follow(self, state: WorkerState) -> None:
        """Follows the worker's reports until it grants another lease: a message of a dead predecessor came late."""
        ack_seq = state.report.report_seq
        while True:
            poll = ReportPoll(ack_seq, self._machine.cache.missed)
            report = await self._worker.poll_report(poll)
            if report.lease != state.lease:
                return
            ack_seq = report.report_seq
            self._report, self._reported_at = report, time.monotonic()
            self._feed_due.set()
            self._samples.extend(report.steps)
            self._late_refusals += self._handle(WorkerReported(report))

    async def _push_plans(self) -> None:
        """Sends the newest plan; of the plans made while one is on its way only the last is sent."""
        pushed_at = 0.0
        while True:
            await self._plan_due.wait()
            if self._machine.num_admitted > FEW_SEQUENCES:
                await asyncio.sleep(pushed_at + PLAN_INTERVAL_S - time.monotonic())
            self._plan_due.clear()
            if self._plan is not None:
                pushed_at = time.monotonic()
                self._num_plans += 1
                await reaches(self._worker.push_plan(self._plan))  # a new worker gets a new plan

    async def _ask_about_kv(self) -> None:
        """Asks the KVOffloadManager one question after the other; no decision waits for it beyond the deadline."""
        manager = self.context.peers.kv_offload_manager(self._replica)
        while True:
            await self._question_due.wait()
            self._question_due.clear()
            question = self._question
            assert question is not None
            late = OffloadUnanswered(question.seq)
            alarm = asyncio.get_running_loop().call_later(self._offload_deadline_s, self._hear_late, late)
            try:
                self._hear_late(OffloadOrdered(await manager.decide(question)))
            except (PeerLost, MessageError):
                self._hear_late(late)
                await asyncio.sleep(LOOK_AGAIN_S)
                self._hear_late(OffloadUnanswered(question.seq, lost=True))
            finally:
                alarm.cancel()

    def _hear_late(self, event: Event) -> None:
        """Handles an event that no message of the Router caused: its refusals go with the next state to the Router."""
        self._late_refusals += self._handle(event)

    async def _tell_router(self) -> None:
        router = self.context.peers.router()
        while True:
            self._news_due.clear()
            refusals, self._late_refusals = tuple(self._late_refusals), []
            broken = tuple(self._broken)
            at_router = (self._resting, self._told_seq, self._machine.sums())
            state = ReplicaState(self._replica, self._ready, refusals, broken, *at_router)
            told = await reaches(router.replica_state(state))
            if told:
                del self._broken[: len(broken)]
            else:
                self._late_refusals = [*refusals, *self._late_refusals]
            await wait_for(self._news_due, SAY_AGAIN_S if told else LOOK_AGAIN_S)

    async def _tell_events(self) -> None:
        """Reports events to the Router. A report may be lost with a Router: its successor asks for what it needs."""
        router = self.context.peers.router()
        while True:
            await self._events_due.wait()
            await asyncio.sleep(0.0 if self._in_batches else NEWS_S)
            self._events_due.clear()
            await reaches(router.replica_news(self._take_news()))

    def _take_news(self) -> ReplicaNews:
        incarnation = "" if self._ready is None else self._ready.worker_incarnation
        what = tuple(self._started), tuple(self._ended), tuple(self._told)
        news = ReplicaNews(self._replica, incarnation, *what, self._profile)
        if self._told:
            self._told_seq = self._told[-1].seq
        self._started, self._ended, self._profile = [], [], None
        self._told.clear()
        return news

    async def _feed(self) -> None:
        """Sends reports to the KV offload manager and step samples to the estimators; one that is away misses them."""
        peers = self.context.peers
        kv = peers.kv_offload_manager(self._replica)
        counts = initial_counts(self.context.config)
        while True:
            await wait_for(self._feed_due, SAY_AGAIN_S)
            await asyncio.sleep(FEED_S)
            self._feed_due.clear()
            self._count()
            if self._report is not None:
                report, self._report = self._report, None
                await reaches(kv.observe(report))
            if len(self._samples) >= MIN_SAMPLES:
                samples = StepSamples(self._replica, tuple(self._samples))
                self._samples.clear()
                counts = await current_counts(peers, counts)
                for index in range(counts.serving_time_estimators):
                    with contextlib.suppress(PeerLost):
                        profile = await peers.serving_time_estimator(index).observe(samples)
                        if profile is not None:
                            self._profile = profile
                            self._events_due.set()
                            self._handle(CostLearned(profile_cost(profile)))

    def _count(self) -> None:
        machine = self._machine
        self._metrics.set_queues(machine.num_admitted, machine.num_waiting)
        self._metrics.preempted(machine.num_preemptions - self._counted_preemptions)
        self._counted_preemptions = machine.num_preemptions
        self._metrics.set_places(machine.places.num)
        guard, counted = tally_of(machine.order), self._counted_guard
        self._metrics.beside_arrival_order(
            guard.num_violations - counted.num_violations,
            guard.earlier_s - counted.earlier_s,
            guard.later_s - counted.later_s,
        )
        self._counted_guard = guard
        tally, known = machine.offload_tally, self._counted_offloads
        self._offload_metrics.decided(
            tally.answered - known.answered,
            tally.alone - known.alone,
            tally.late - known.late,
            tally.refused - known.refused,
        )
        self._counted_offloads = replace(tally)

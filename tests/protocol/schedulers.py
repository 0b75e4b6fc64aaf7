"""Schedulers: the real machines in shells of virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from farsight.core.messages.fleet import ReplicaNews, ReplicaState
from farsight.core.messages.kv import OffloadOrders, OffloadQuestion
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
from farsight.core.messages.requests import (
    Key,
    Keys,
    Refusal,
    Refusals,
    Submit,
)
from farsight.core.request import Request
from farsight.policies.replica.events import (
    AskOffload,
    BatchBroken,
    CacheTold,
    Event,
    OffloadOrdered,
    OffloadUnanswered,
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
)
from farsight.policies.replica.scheduler import ReplicaScheduler
from tests.protocol.network import Component

if TYPE_CHECKING:
    from tests.protocol.worker import WorkerComponent
    from tests.protocol.world import World

LOOK_AGAIN_S, SAY_AGAIN_S, RESEND_S = 0.05, 1.0, 0.1


class _Connection:
    """To one worker life; ``number`` counts polls, so that only the latest is followed by another."""

    __slots__ = ("ack_seq", "lease", "number", "worker")

    def __init__(self, worker: WorkerComponent, state: WorkerState) -> None:
        self.worker, self.lease = worker, state.lease
        self.number, self.ack_seq = 0, state.report.report_seq


class SchedulerComponent(Component):
    """One life of a Scheduler."""

    def __init__(self, world: World, replica: str, machine: ReplicaScheduler) -> None:
        super().__init__(world, f"scheduler-{replica}")
        self.replica, self.machine = replica, machine
        self._connection: _Connection | None = None
        self._ready: WorkerReady | None = None
        self._plan: Plan | None = None
        self._applied = 0
        self._late_refusals: list[Refusal] = []
        self._broken: list[Key] = []
        self._given_back: list[Request] = []
        self._resting: tuple[Key, ...] = ()
        self._started: list[StartedRequest] = []
        self._ended: list[FinishedSequence] = []
        self._told_seq = 0
        self._tells_ends = self._tells_state = self._news = False
        self._connect()
        self.say_again()
        self._resend()

    def submit(self, message: Submit, reply: Callable[[Refusals], None]) -> None:
        reply(Refusals(tuple(self._handle(RequestsArrived(message.requests)))))

    def abort(self, message: Keys, reply: Callable[[], None]) -> None:
        self._handle(RequestsAborted(message.keys))
        reply()

    def recall(self, message: Keys, reply: Callable[[Submit], None]) -> None:
        self._late_refusals += self._handle(RequestsRecalled(message.keys))
        given, self._given_back = tuple(self._given_back), []
        reply(Submit(given))

    def unknown(self, message: Keys, reply: Callable[[Keys], None]) -> None:
        """Without a worker it is not known; what the Router has yet to hear of in another way counts as here."""
        keys = [key for key in message.keys if key not in self._broken]
        reply(Keys(self.machine.unknown(keys) if self._ready is not None else ()))

    def _handle(self, event: Event) -> list[Refusal]:
        refusals = []
        for instruction in self.machine.handle(event, self.world.clock.now):
            match instruction:
                case SendPlan(plan):
                    self._plan = plan
                    self._send_plan()
                case AskOffload(question):
                    self._ask(question)
                case RefuseRequest(request_id, attempt, field_name, text):
                    refusals.append(Refusal(request_id, attempt, field_name, text))
                case RequestStarted(started):
                    self._started.append(started)
                    self._tell_ends()
                case CacheTold(notice):
                    self._tell_cache(notice)
                case RequestEnded(finished):
                    self._ended.append(finished)
                    self._tell_ends()
                case RequestGivenBack(request):
                    self._given_back.append(request)
                case BatchBroken(keys):
                    self.world.tell(self.life.name, "its batch broke: %s", keys)
                    self.world.count("broken batches", True)
                    self._broken += keys
                    self._tell_state()
        self.machine.check_integrity()
        if self.world.in_batches and self.machine.resting() != self._resting:
            self._resting = self.machine.resting()
            self._tell_state()
        return refusals

    def _ask(self, question: OffloadQuestion) -> None:
        def hear(event: Event) -> None:
            self._late_refusals += self._handle(event)

        def on_reply(orders: OffloadOrders) -> None:
            before = self.machine.offload_tally.refused
            hear(OffloadOrdered(orders))
            self.world.count("orders", orders != OffloadOrders(orders.seq, idle_target=orders.idle_target))
            self.world.count("orders refused", self.machine.offload_tally.refused > before)

        def on_lost() -> None:
            hear(OffloadUnanswered(question.seq))
            self.later(LOOK_AGAIN_S, lambda: hear(OffloadUnanswered(question.seq, lost=True)))

        self.later(self.machine.limits.offload_deadline_s, lambda: hear(OffloadUnanswered(question.seq)))
        self.world.network.call(self.life, f"manager-{self.replica}", "decide", question, on_reply, on_lost)

    def _connect(self) -> None:
        worker = self.world.network.living.get(f"worker-{self.replica}")
        if worker is None:
            self.later(LOOK_AGAIN_S, self._connect)
            return
        self.world.network.call(
            self.life,
            worker.life.name,
            "connect",
            None,
            lambda state: self._connected(worker, state),
            lambda: self.later(LOOK_AGAIN_S, self._connect),
        )

    def _connected(self, worker: WorkerComponent, state: WorkerState) -> None:
        connection = self._connection = _Connection(worker, state)
        self.world.network.watch(self.life, worker.life, lambda: self.lose_worker(connection))
        self._applied = 0
        self._late_refusals += self._handle(WorkerConnected(state))
        self._set_ready(state.ready)
        self._poll(connection)

    def lose_worker(self, connection: _Connection | None = None) -> None:
        """The connection broke: the worker is dead, or only looks so."""
        if self._connection is None or connection not in (None, self._connection):
            return
        self.world.tell(self.life.name, "has lost its worker")
        self._connection = self._plan = None
        self._handle(WorkerLost())
        self._set_ready(None)
        self.later(LOOK_AGAIN_S, self._connect)

    def _set_ready(self, ready: WorkerReady | None) -> None:
        self._ready = ready
        self._tell_state()

    def _poll(self, connection: _Connection) -> None:
        connection.number += 1
        number, worker = connection.number, connection.worker
        letter = self.world.network.letter

        def send(report: StepReport) -> None:
            letter(self.life, report, lambda report: self._take_report(connection, number, report))

        poll = ReportPoll(connection.ack_seq, self.machine.cache.missed)
        letter(worker.life, poll, lambda poll: worker.poll_report(poll, send))
        patience_s = self.world.patience_s(busy=bool(self.machine.num_waiting + self.machine.num_admitted))
        self.later(patience_s, lambda: self._poll_again(connection, number))

    def _poll_again(self, connection: _Connection, number: int) -> None:
        if connection is self._connection and connection.number == number:
            self._poll(connection)

    def _take_report(self, connection: _Connection, number: int, report: StepReport) -> None:
        if connection is not self._connection:
            return
        if report.lease > connection.lease:
            self._connect_again()
            return
        connection.ack_seq = max(connection.ack_seq, report.report_seq)
        self._applied = max(self._applied, report.plan_seq)
        self._late_refusals += self._handle(WorkerReported(report))
        self._poll_again(connection, number)

    def _connect_again(self) -> None:
        """The call of an earlier life came after ours and has taken the worker over."""
        self.world.count("leases lost", True)
        self._connection = self._plan = None
        self._connect()

    def _send_plan(self) -> None:
        connection, plan = self._connection, self._plan
        if connection is not None and plan is not None:
            self.world.network.letter(connection.worker.life, plan, connection.worker.push_plan)

    def _resend(self) -> None:
        if self._plan is not None and self._plan.plan_seq > self._applied:
            self._send_plan()
        self.later(RESEND_S, self._resend)

    def _tell_state(self) -> None:
        """At once when it changes, and every second; one call at a time."""
        self._news = True
        if self._tells_state:
            return
        self._tells_state, self._news = True, False
        refusals, self._late_refusals = self._late_refusals, []
        broken = tuple(self._broken)
        to_router = (broken, self._resting, self._told_seq, self.machine.sums())
        state = ReplicaState(self.replica, self._ready, tuple(refusals), *to_router)

        def told() -> None:
            self._tells_state = False
            del self._broken[: len(broken)]
            if self._news:
                self._tell_state()

        def lost() -> None:
            self._late_refusals = refusals + self._late_refusals
            self._tells_state, self._news = False, True
            self.later(LOOK_AGAIN_S, lambda: self._tell_state() if self._news else None)

        self.world.network.call(self.life, "router", "replica_state", state, lambda _: told(), lost)

    def say_again(self) -> None:
        self._tell_state()
        self.later(SAY_AGAIN_S, self.say_again)

    def _tell_ends(self) -> None:
        """A Router that dies meanwhile need not hear of them."""
        if self._tells_ends or not (self._ended or self._started):
            return
        self._tells_ends = True
        news = ReplicaNews(self.replica, "", tuple(self._started), tuple(self._ended))
        self._started, self._ended = [], []

        def told() -> None:
            self._tells_ends = False
            self._tell_ends()

        self.world.network.call(self.life, "router", "replica_news", news, lambda _: told(), told)

    def _tell_cache(self, notice: KVCacheEvent) -> None:
        assert self._connection is not None
        self._told_seq = notice.seq
        incarnation = self._connection.worker.worker.ready.worker_incarnation
        router = self.world.network.living.get("router")
        if router is not None:
            news = ReplicaNews(self.replica, incarnation, cache=(notice,))
            self.world.network.letter(router.life, news, router.hear_cache)

    def cached(self, message: None, reply: Callable[[CacheReply], None]) -> None:
        if self._ready is None:
            reply(CacheReply("", None))
        else:
            reply(CacheReply(self._ready.worker_incarnation, self.machine.cache.whole()))

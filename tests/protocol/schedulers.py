"""Router and Schedulers: the real machines in shells of virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    Announce,
    AnnounceReply,
    Key,
    Keys,
    Placed,
    Refusal,
    Refusals,
    Submit,
    SubmitReply,
)
from farsight.core.request import Request
from farsight.policies.fleet.batch_scheduler import BatchScheduler
from farsight.policies.fleet.events import (
    AbortOnReplica,
    AskCache,
    AskIngress,
    AskReplica,
    BatchEnded,
    GlobalEvent,
    IngressAnnounced,
    IngressLost,
    KeysUnknown,
    KVCacheChanged,
    PlaceRequests,
    RecallRequests,
    ReplicaAway,
    ReplicaBroke,
    ReplicaDraining,
    ReplicaRests,
    ReplicaUp,
    ReportLost,
    RequestsEnded,
    RequestsReturned,
    RequestsStarted,
    TimePassed,
)
from farsight.policies.fleet.scheduler import FleetMachine
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
from tests.protocol.network import Component, attempts

if TYPE_CHECKING:
    from tests.protocol.worker import WorkerComponent
    from tests.protocol.world import World

LOOK_AGAIN_S, SAY_AGAIN_S, RESEND_S, FORGET_INGRESS_S, LOOK_S = 0.05, 1.0, 0.1, 10.0, 0.05


@dataclass(slots=True)
class _Answers:
    """What comes of one event, once all ``pending`` calls are answered."""

    done: Callable[[_Answers], None]
    pending: int = 1
    refusals: list[Refusal] = field(default_factory=list)
    lost: list[Key] = field(default_factory=list)
    asked: set[int] = field(default_factory=set)

    def settle(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.done(self)


@dataclass(slots=True)
class _IngressReplica:
    heard_at: float = 0.0
    late_refusals: list[Refusal] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)


class RouterComponent(Component):
    """One life of the Router."""

    def __init__(self, world: World, machine: FleetMachine) -> None:
        super().__init__(world, "router")
        self.machine = machine
        self.is_first = world.clock.now == 0.0
        self._ingresses: dict[str, _IngressReplica] = {}
        self._replicas: dict[str, None] = {}
        self._alarm_at: float | None = None
        self._tick()
        if machine.recalls:
            self._look()

    def submit(self, message: Submit, reply: Callable[[SubmitReply], None]) -> None:
        requests = message.requests
        for request in requests:
            self._hear(request.ingress_id)

        def done(answers: _Answers) -> None:
            placed = tuple(self.machine.placed(request.request_id, request.attempt) for request in requests)
            reply(SubmitReply(placed, tuple(answers.refusals)))

        self._handle(RequestsArrived(requests), done)

    def abort(self, message: Keys, reply: Callable[[], None]) -> None:
        self._handle(RequestsAborted(message.keys), lambda answers: reply())

    def announce(self, message: Announce, reply: Callable[[AnnounceReply], None]) -> None:
        ingress = self._hear(message.ingress_id)

        def done(answers: _Answers) -> None:
            late, ingress.late_refusals = ingress.late_refusals, []
            known, ingress.placed = tuple(ingress.placed), []
            refusals = (*answers.refusals, *late)
            asked = tuple(answers.asked)
            reply(AnnounceReply(tuple(answers.lost), refusals, tuple(self._replicas), known, asked=asked))

        before = self.machine.num_in_flight
        self._handle(IngressAnnounced(message.ingress_id, message.sums, message.listed, message.open), done)
        self.world.count("adoptions", not self.is_first and self.machine.num_in_flight > before)

    def replica_state(self, message: ReplicaState, reply: Callable[[], None]) -> None:
        name, ready = message.replica, message.ready
        self._replicas[name] = None
        for refusal in message.refusals:
            self._refuse_late(refusal)
        if message.broken:
            self.world.tell("router", "a batch broke on replica %s: %s", name, message.broken)
            self._handle(ReplicaBroke(name, message.broken), lambda answers: None)
        if isinstance(self.machine, BatchScheduler):
            self._handle(ReplicaRests(name, message.resting), lambda answers: None)
        self._handle(
            ReplicaAway(name) if ready is None else ReplicaUp(name, ready, message.cache_seq, message.sums),
            lambda answers: reply(),
        )

    def replica_news(self, message: ReplicaNews, reply: Callable[[], None]) -> None:
        self._handle(RequestsStarted(message.started), lambda answers: None)
        self._handle(RequestsEnded(message.finished), lambda answers: reply())

    def hear_cache(self, message: ReplicaNews) -> None:
        """A letter: it may come late, twice, before an older one, or never."""
        self._handle(KVCacheChanged(message.replica, message.worker_incarnation, message.cache), lambda answers: None)

    def _handle(self, event: GlobalEvent, done: Callable[[_Answers], None]) -> None:
        answers = _Answers(done)
        self._carry_out(event, answers)
        answers.settle()

    def _carry_out(self, event: GlobalEvent, answers: _Answers) -> None:
        for instruction in self.machine.handle(event, self.world.clock.now):
            match instruction:
                case PlaceRequests(name, requests):
                    if not isinstance(event, RequestsArrived) or self.machine.pulls:
                        for request in requests:
                            ingress = self._ingresses.setdefault(request.ingress_id, _IngressReplica())
                            ingress.placed.append(self.machine.placed(request.request_id, request.attempt))
                    self.world.tell("router", "%s placed on replica %s", attempts(requests), name)
                    self.world.count(
                        "batches of several", isinstance(self.machine, BatchScheduler) and len(requests) > 1
                    )
                    self._call(name, "submit", Submit(requests), answers, self._take_refusals)
                case AbortOnReplica(name, keys):
                    self.world.tell("router", "aborts %s on replica %s", keys, name)
                    self._call(name, "abort", Keys(keys), answers, lambda *_: None)
                case AskReplica(name, keys):
                    self._call(name, "unknown", Keys(keys), answers, self._take_unknown)
                case RecallRequests(name, keys):
                    self._recall(name, keys)
                case AskCache(name):
                    self._ask_cache(name)
                case AskIngress(_, parts):
                    answers.asked.update(parts)
                case ReportLost(_, keys):
                    self.world.tell("router", "no replica runs %s", keys)
                    answers.lost += keys
                case RefuseRequest(request_id, attempt, field_name, text):
                    answers.refusals.append(Refusal(request_id, attempt, field_name, text))
                case BatchEnded():
                    self.world.count("batches that ended whole", True)
        self.machine.check_integrity()
        self._set_alarm()

    def _set_alarm(self) -> None:
        """For the next instant at which something is due."""
        due_at = self.machine.next_due_at if isinstance(self.machine, BatchScheduler) else None
        if due_at is None or due_at == self._alarm_at:
            return
        self._alarm_at = due_at
        delay_s = max(0.0, due_at - self.world.clock.now)
        self.later(delay_s, lambda: self._ring(due_at))

    def _ring(self, due_at: float) -> None:
        if self._alarm_at == due_at:
            self._alarm_at = None
            self._handle(TimePassed(), lambda answers: None)

    def _call(
        self, name: str, method: str, message: Any, answers: _Answers, take: Callable[[str, Any, _Answers], None]
    ) -> None:
        answers.pending += 1

        def on_reply(reply: Any) -> None:
            take(name, reply, answers)
            answers.settle()

        def on_lost() -> None:
            self._carry_out(ReplicaAway(name), answers)
            answers.settle()

        self.world.network.call(self.life, f"scheduler-{name}", method, message, on_reply, on_lost)

    def _recall(self, name: str, keys: tuple[Key, ...]) -> None:
        def on_reply(reply: Submit) -> None:
            if not reply.requests:
                self.world.count("recalls that came too late", True)
                return
            self.world.tell("router", "%s come back from replica %s", attempts(reply.requests), name)
            owned = [self.machine.placed(each.request_id, each.attempt).replica == name for each in reply.requests]
            self.world.count("recalled requests that are gone", not all(owned))
            self._handle(RequestsReturned(name, reply.requests), lambda answers: None)
            for request in reply.requests:
                placed = self.machine.placed(request.request_id, request.attempt)
                self.world.count("recalls", placed.replica not in ("", name))

        on_lost = lambda: self.world.count("lost recalls", True)  # noqa: E731
        self.world.disturb_recall(name)
        self.world.network.call(self.life, f"scheduler-{name}", "recall", Keys(keys), on_reply, on_lost)

    def drain(self, name: str, *, ends: bool) -> None:
        """The Supervisor gives up a replica, or changes its mind."""
        self.world.count("drains", not ends)
        self._handle(ReplicaDraining(name, ends=ends), lambda answers: None)

    def _look(self) -> None:
        self._handle(TimePassed(), lambda answers: None)
        self.later(LOOK_S, self._look)

    def _ask_cache(self, name: str) -> None:
        self.world.count("snapshots of a cache", True)

        def on_reply(reply: CacheReply) -> None:
            if reply.notice is not None:
                event = KVCacheChanged(name, reply.worker_incarnation, (reply.notice,))
                self._handle(event, lambda answers: None)

        self.world.network.call(self.life, f"scheduler-{name}", "cached", None, on_reply, lambda: None)

    @staticmethod
    def _take_refusals(name: str, reply: Refusals, answers: _Answers) -> None:
        answers.refusals += reply.refusals

    def _take_unknown(self, name: str, reply: Keys, answers: _Answers) -> None:
        if reply.keys:
            self._carry_out(KeysUnknown(name, reply.keys), answers)

    def _hear(self, ingress_id: str) -> _IngressReplica:
        seen = self._ingresses.setdefault(ingress_id, _IngressReplica())
        seen.heard_at = self.world.clock.now
        return seen

    def _refuse_late(self, refusal: Refusal) -> None:
        ingress_id = refusal.request_id.rpartition("-")[0]
        if ingress_id in self._ingresses:
            self._ingresses[ingress_id].late_refusals.append(refusal)

    def _tick(self) -> None:
        heard_after, living = self.world.clock.now - FORGET_INGRESS_S, self.world.network.living
        for ingress_id in [n for n, seen in self._ingresses.items() if seen.heard_at < heard_after and n not in living]:
            del self._ingresses[ingress_id]
            self.world.tell("router", "%s is lost", ingress_id)
            self._handle(IngressLost(ingress_id), lambda answers: None)
        self.later(SAY_AGAIN_S, self._tick)


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

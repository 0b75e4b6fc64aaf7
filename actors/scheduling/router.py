"""Router: hosts the GlobalScheduler. Its shell is the Batcher's as well."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from farsight.actors.calls.scheduling import LengthPredictorCalls, RouterCalls, SchedulerCalls
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import QueueDelay, show_sessions
from farsight.actors.runtime.names import ROUTER, initial_counts
from farsight.actors.runtime.peer import PeerLost, answer_of, current_counts
from farsight.actors.scheduling.event_recorder import Handle
from farsight.core.costs import StepCost, profile_cost
from farsight.core.decisions import Decision, DecisionPacker, Facts, on_clock, pack_decisions
from farsight.core.forecast import QUANTILES, ForecastMade, ForecastsMade
from farsight.core.messages.fleet import InFlight, ReplicaName, ReplicaNews, ReplicaState, ServedModel
from farsight.core.messages.live import EndedRequest, LeftWaiting, SessionsQuery, SessionsView
from farsight.core.messages.log import RequestTrace, RequestTraces, TraceQuery
from farsight.core.messages.placement import PlacementView, RecentPlacement, ReplicaLoads
from farsight.core.messages.requests import (
    Announce,
    AnnounceReply,
    IngressLoad,
    Key,
    Keys,
    LoadSnapshot,
    Placed,
    Promise,
    Refusal,
    Submit,
    SubmitReply,
    total_load,
)
from farsight.core.messages.status import ComponentRows, ComponentStatus
from farsight.core.request import Request
from farsight.policies.compose import build_router, follows_prefixes, is_batch_mode, placement_of
from farsight.policies.fleet.events import (
    AbortOnReplica,
    AskCache,
    AskIngress,
    AskReplica,
    GlobalEvent,
    GlobalInstruction,
    HistoryLearned,
    IngressAnnounced,
    IngressLost,
    KeysUnknown,
    KVCacheChanged,
    PlaceRequests,
    RecallRequests,
    ReplicaAway,
    ReplicaDraining,
    ReplicaGone,
    ReplicaUp,
    ReportLost,
    RequestsEnded,
    RequestsReturned,
    RequestsStarted,
    StepsPriced,
    TimePassed,
)
from farsight.policies.fleet.queue_delay import queue_delay_s
from farsight.policies.fleet.scheduler import FleetMachine
from farsight.policies.fleet.sessions import SessionTable
from farsight.policies.moves.recall import LOOK_S
from farsight.policies.placement.base import PlacementStats
from farsight.policies.presets import max_running
from farsight.policies.replica.events import ForecastsArrived, RefuseRequest, RequestsAborted, RequestsArrived
from farsight.policies.replica.live_view import MAX_ENDED
from farsight.policies.settings import PolicySettings

T = TypeVar("T")

TICK_S = 1.0
"""Seconds between two reads of the forecast, and between two searches for silent ingress replicas."""

LOST_AFTER_S = 3.0
"""An ingress replica that has not announced itself for so many seconds is shown as lost ..."""

FORGET_AFTER_S = 10.0
"""... and after so many seconds, if it has died, its requests are aborted and it is shown no more."""

NUM_PREFIXES = 40
"""Nodes of the prefix tree that are shown."""

VIEW_S = 0.5
"""Fewest seconds between two computations of the placement view, however many operators look at it."""


@dataclass(slots=True)
class Answers:
    """Results of one event, for the ingress replica that caused it and for others."""

    refusals: list[Refusal] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    lost: dict[str, list[Key]] = field(default_factory=dict)
    asked: set[int] = field(default_factory=set)

    def add(self, other: Answers) -> None:
        self.refusals += other.refusals
        self.promises += other.promises
        self.asked |= other.asked
        for ingress_id, keys in other.lost.items():
            self.lost.setdefault(ingress_id, []).extend(keys)


@dataclass(slots=True)
class _IngressReplica:
    heard_at: float
    row: ComponentStatus | None = None
    late_refusals: list[Refusal] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    load: IngressLoad = field(default_factory=IngressLoad)


class FleetShell(Component, RouterCalls):
    """Turns messages into events of a scheduler over replicas and carries out its instructions.

    Args:
        machine: The state machine that decides; only this object may use it afterwards.
        decide: Gives the machine an event: ``machine.handle``, or a function around it.
    """

    def __init__(
        self, context: ComponentContext, machine: FleetMachine, decide: Handle[GlobalEvent, GlobalInstruction]
    ) -> None:
        super().__init__(context)
        self._machine = machine
        self._decide = decide
        # Other servers have caches of their own, which ``engine.prefix_cache`` does not switch off.
        caches = context.config.engine.prefix_cache or bool(context.config.replica)
        self._follows_prefixes = caches and follows_prefixes(context.config.scheduler)
        self._schedulers: dict[str, SchedulerCalls] = {}
        self._ingresses: dict[str, _IngressReplica] = {}
        self._handled_at: float | None = None
        self._notes = PlacementStats()
        self._before: dict[str, bytes] = {}  # decisions about requests that were given back and are being placed
        self._packer = DecisionPacker()
        self._shown: tuple[float, PlacementView] | None = None
        self._cost: StepCost | None = None
        self._left: deque[tuple[float, EndedRequest]] = deque(maxlen=MAX_ENDED)  # when, and what
        self._queue_delay = QueueDelay(context.registry, context.config.model.name)
        self._sessions = SessionTable(context.config.engine.kv_block_size)
        show_sessions(context.registry, self._sessions)

    async def start(self) -> None:
        self.spawn(self._tick())
        if self._machine.recalls:
            self.spawn(self._look_at_waiting())

    async def submit(self, submit: Submit) -> SubmitReply:
        requests, now = submit.requests, time.monotonic()
        for request in requests:
            self._sessions.began(request, now)
        answers = await self._handle(RequestsArrived(requests))
        self._sessions.left((refusal.request_id for refusal in answers.refusals), time.monotonic())
        placed = tuple(self._machine.placed(request.request_id, request.attempt) for request in requests)
        return SubmitReply(placed, tuple(answers.refusals), tuple(answers.promises))

    async def foresee(self, forecasts: ForecastsMade) -> None:
        """Passes forecasts on to the replicas of their requests; requests that wait here keep their own forecasts."""
        await self._handle(ForecastsArrived(forecasts.made))
        by_replica: dict[str, list[ForecastMade]] = {}
        for made in forecasts.made:
            replica = self._machine.placed(made.request_id, made.attempt).replica
            if replica:
                by_replica.setdefault(replica, []).append(made)
        await asyncio.gather(*(self._foresee_on(name, made) for name, made in by_replica.items()))

    async def outlook(self) -> LoadSnapshot:
        return self._outlook()

    async def explain(self, query: TraceQuery) -> RequestTraces:
        own = [_waiting(query.response_id, *waiting) for waiting in self._machine.queued(query.response_id)]
        found = await asyncio.gather(*(self._explain_on(name, query) for name in list(self._schedulers)))
        return RequestTraces((*own, *itertools.chain.from_iterable(found)))

    async def abort(self, aborted: Keys) -> None:
        now = time.monotonic()
        self._left.extendleft((now, _left(*each, now)) for each in self._machine.queued_among(aborted.keys))
        self._sessions.left((request_id for request_id, _ in aborted.keys), now)
        await self._handle(RequestsAborted(aborted.keys))

    async def left_waiting(self) -> LeftWaiting:
        now = time.monotonic()
        return LeftWaiting(tuple(replace(each, ago_s=now - at) for at, each in self._left if each.response_id))

    async def sessions(self, query: SessionsQuery) -> SessionsView:
        return self._sessions.view(query, time.monotonic())

    async def announce(self, announced: Announce) -> AnnounceReply:
        ingress = self._hear(announced.ingress_id)
        event = IngressAnnounced(announced.ingress_id, announced.sums, announced.listed, announced.open)
        answers = await self._handle(event)
        late, ingress.late_refusals = ingress.late_refusals, []
        lost = tuple(answers.lost.get(announced.ingress_id, ()))
        refusals = (*answers.refusals, *late)
        ingress.load = announced.load
        others = total_load(seen.load for name, seen in self._ingresses.items() if name != announced.ingress_id)
        placed, ingress.placed = tuple(ingress.placed), []
        asked = tuple(answers.asked)
        return AnnounceReply(lost, refusals, tuple(self._schedulers), placed, others, self._outlook(), asked)

    async def introduce(self, row: ComponentStatus) -> None:
        self._hear(row.name.removeprefix("ingress-")).row = row

    async def ingress_rows(self) -> ComponentRows:
        now = time.monotonic()
        rows = [
            row if now - seen.heard_at < LOST_AFTER_S else replace(row, state="lost", degraded="")
            for seen in self._ingresses.values()
            if (row := seen.row) is not None
        ]
        return ComponentRows(tuple(rows))

    async def model(self) -> ServedModel | None:
        lives = self._machine.lives()
        if not lives:
            return None
        ready = min(lives, key=lambda ready: ready.max_model_len)
        return ServedModel(ready, ready.block_size if self._follows_prefixes else 0)

    async def replica_state(self, state: ReplicaState) -> None:
        self._scheduler(state.replica)
        for refusal in state.refusals:
            self._refuse_late(refusal)
        name, ready = state.replica, state.ready
        await self._handle(ReplicaAway(name) if ready is None else ReplicaUp(name, ready, state.cache_seq, state.sums))

    async def replica_news(self, news: ReplicaNews) -> None:
        """Takes a replica's news, cache events first: requests that end have filled the cache."""
        if news.cache:
            await self._handle(KVCacheChanged(news.replica, news.worker_incarnation, news.cache))
        if news.started:
            await self._handle(RequestsStarted(news.started))
        if news.finished:
            now = time.monotonic()
            for finished in news.finished:
                self._sessions.ended(finished, now)
            await self._handle(RequestsEnded(news.finished))
        if news.profile is not None:
            self._cost = profile_cost(news.profile)
            await self._handle(StepsPriced(news.replica, self._cost))

    async def replica_loads(self) -> ReplicaLoads:
        return ReplicaLoads(self._machine.replica_views())

    async def placement(self) -> PlacementView:
        """Returns the view of placements, at most ``VIEW_S`` old."""
        now = time.monotonic()
        if self._shown is None or now - self._shown[0] > VIEW_S:
            self._shown = now, self._view()
        return self._shown[1]

    def _view(self) -> PlacementView:
        return PlacementView(
            placement=placement_of(self.context.config.scheduler),
            by_prefixes=self._machine.goes_by_prefixes,
            replicas=self._machine.replica_views(),
            prefixes=self._machine.busiest_prefixes(NUM_PREFIXES),
            reasons=self._notes.reasons(),
            recent=self._notes.recent(),
        )

    async def drain(self, name: ReplicaName) -> InFlight:
        await self._handle(ReplicaDraining(name.replica))
        return InFlight(self._machine.num_on(name.replica))

    async def end_drain(self, name: ReplicaName) -> None:
        await self._handle(ReplicaDraining(name.replica, ends=True))

    async def forget(self, name: ReplicaName) -> None:
        self._schedulers.pop(name.replica, None)
        await self._handle(ReplicaGone(name.replica))

    @property
    def state(self) -> str:
        return "ready" if self._machine.loads() else "waiting"

    @property
    def queue(self) -> int:
        return self._machine.num_in_flight

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._handled_at is None else time.monotonic() - self._handled_at

    @property
    def work_done(self) -> Mapping[str, float]:
        return {"requests placed": self._notes.num_placed}

    def recent(self) -> Iterable[Decision]:
        return map(_placed, reversed(self._notes.recent()))

    async def _handle(self, event: GlobalEvent) -> Answers:
        """Gives the machine an event. Messages to a Scheduler leave in the order of the events that caused them."""
        self._handled_at = now = time.monotonic()
        answers, calls = Answers(), []
        for instruction in self._decide(event, now):
            match instruction:
                case PlaceRequests(name, requests):
                    if not isinstance(event, RequestsArrived) or self._machine.pulls:
                        self._note_late(requests)
                    calls.append(asyncio.create_task(self._place(name, requests, answers)))
                case AbortOnReplica(name, keys):
                    calls.append(asyncio.create_task(self._abort_on(name, keys)))
                case AskReplica(name, keys):
                    calls.append(asyncio.create_task(self._ask(name, keys, answers)))
                case RecallRequests(name, keys):
                    self.spawn_aside(self._recall(name, keys))  # what gets lost here is found by the sums
                case AskCache(name):
                    self.spawn_aside(self._hear_cache(name))  # without an answer the machine asks again
                case AskIngress(_, parts):
                    answers.asked.update(parts)  # of the one whose announcement this answers
                case ReportLost(ingress_id, keys):
                    answers.lost.setdefault(ingress_id, []).extend(keys)
                case RefuseRequest(request_id, attempt, field_name, message):
                    answers.refusals.append(Refusal(request_id, attempt, field_name, message))
        if calls:
            await asyncio.gather(*calls)
        return answers

    def _note_late(self, requests: Iterable[Request]) -> None:
        """Keeps where requests went that had waited, for the answers to their ingress replicas' next announcements."""
        for request in requests:
            ingress = self._ingresses.setdefault(request.ingress_id, _IngressReplica(time.monotonic()))
            ingress.placed.append(self._machine.placed(request.request_id, request.attempt))

    async def _place(self, name: str, requests: Iterable[Request], answers: Answers) -> None:
        requests = tuple(requests)
        placements = tuple(self._placement(request) for request in requests)
        reply = await self._reach(name, self._scheduler(name).submit(Submit(requests, placements)), answers)
        if reply is not None:  # else the next announcement finds that the requests which were placed there are missing
            answers.refusals += reply.refusals
            answers.promises += reply.promises

    def _placement(self, request: Request) -> bytes:
        """Notes a placement; returns the packed decision for the request's trace, empty if the request has none."""
        choice = self._machine.choice(request.request_id)
        if choice is None:
            return b""
        placed_at = time.time()
        self._notes.add(request, choice, placed_at)
        if request.origin is None:
            return b""
        facts = {**self._machine.told(request.request_id), **self._sessions.told(request.request_id)}
        packed, before = self._packer.pack("placed", placed_at, facts), self._before.get(request.request_id)
        return before + on_clock(0.0, packed) if before else packed

    async def _explain_on(self, name: str, query: TraceQuery) -> tuple[RequestTrace, ...]:
        told = await self._reach(name, self._scheduler(name).explain(query))
        return () if told is None else told.records

    async def _foresee_on(self, name: str, made: list[ForecastMade]) -> None:
        await self._reach(name, self._scheduler(name).foresee(ForecastsMade(tuple(made))))

    async def _abort_on(self, name: str, keys: tuple[Key, ...]) -> None:
        await self._reach(name, self._scheduler(name).abort(Keys(keys)))

    async def _ask(self, name: str, keys: tuple[Key, ...], answers: Answers) -> None:
        unknown = await self._reach(name, self._scheduler(name).unknown(Keys(keys)), answers)
        if unknown is not None and unknown.keys:
            answers.add(await self._handle(KeysUnknown(name, unknown.keys)))

    async def _recall(self, name: str, keys: tuple[Key, ...]) -> None:
        """Has a replica give back what waits there, and places it again."""
        given = await self._reach(name, self._scheduler(name).recall(Keys(keys)))
        if given is None or not given.requests:
            return
        told = dict(zip((request.request_id for request in given.requests), given.placements, strict=True))
        self._before.update(told)
        answers = await self._handle(RequestsReturned(name, given.requests))
        for refusal in answers.refusals:
            self._refuse_late(refusal)
        for request in given.requests:
            self._before.pop(request.request_id, None)

    async def _hear_cache(self, name: str) -> None:
        reply = await self._reach(name, self._scheduler(name).cached())
        if reply is not None and reply.notice is not None:
            await self._handle(KVCacheChanged(name, reply.worker_incarnation, (reply.notice,)))

    def _scheduler(self, replica: str) -> SchedulerCalls:
        if replica not in self._schedulers:
            self._schedulers[replica] = self.context.peers.scheduler(replica)
        return self._schedulers[replica]

    async def _reach(self, name: str, call: Awaitable[T], answers: Answers | None = None) -> T | None:
        """Returns what a Scheduler answers; None if it is away.

        Its replica then gets no requests until it reports again; the replica's worker runs on meanwhile. ``answers``
        gets what follows from that.
        """
        try:
            return await call
        except PeerLost:
            lost = await self._handle(ReplicaAway(name))
            if answers is not None:
                answers.add(lost)
            return None

    def _hear(self, ingress_id: str) -> _IngressReplica:
        seen = self._ingresses.setdefault(ingress_id, _IngressReplica(0.0))
        seen.heard_at = time.monotonic()
        return seen

    def _refuse_late(self, refusal: Refusal) -> None:
        """Keeps a refusal for the answer to the ingress replica's next announcement."""
        ingress_id = refusal.request_id.rpartition("-")[0]
        if ingress_id in self._ingresses:
            self._ingresses[ingress_id].late_refusals.append(refusal)

    async def _tick(self) -> None:
        peers = self.context.peers
        counts = initial_counts(self.context.config)
        for turn in itertools.count():
            await self._lose_dead()
            self._sessions.look(self._machine.is_in_flight, time.monotonic())
            counts = await current_counts(peers, counts)
            await self._learn(peers.length_predictor(turn % counts.length_predictors))
            outlook = self._outlook()
            self._queue_delay.set(queue_delay_s(outlook, outlook.num_replicas))
            await asyncio.sleep(TICK_S)

    async def _look_at_waiting(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self._handle(TimePassed())

    async def _lose_dead(self) -> None:
        """Aborts the requests of ingress replicas that have died; a replica that is only silent may be busy."""
        now = time.monotonic()
        silent = [name for name, seen in self._ingresses.items() if now - seen.heard_at > FORGET_AFTER_S]
        for ingress_id in await self.context.gone(silent):
            del self._ingresses[ingress_id]
            self._sessions.lose(ingress_id, now)
            await self._handle(IngressLost(ingress_id))

    async def _learn(self, predictor: LengthPredictorCalls) -> None:
        forecast = await answer_of(predictor.forecast())
        if forecast is not None and forecast.num_samples:  # else the last forecast still holds
            await self._handle(HistoryLearned(forecast))

    def _outlook(self) -> LoadSnapshot:
        config = self.context.config
        preset = config.scheduler.preset
        places = max_running(preset, config.engine.max_num_seqs, config.batch.batch_size)
        return self._machine.outlook(places, self._cost, joins=not is_batch_mode(preset))


class Router(FleetShell):
    """The shell of the GlobalScheduler, which places requests as they come."""

    kind = "Router"

    def __init__(self, context: ComponentContext) -> None:
        config = context.config
        settings = PolicySettings(block_size=config.engine.kv_block_size, placement=config.placement)
        places = config.engine.max_num_seqs
        machine = build_router(config.scheduler.preset, config.scheduler.placement, settings, places)
        super().__init__(context, machine, machine.handle)


def _placed(each: RecentPlacement) -> Decision:
    where: Facts = {"replica": each.replica, "reason": each.reason}
    return Decision("placement", each.placed_at, {**where, "known_tokens": each.known_len, "hit_tokens": each.hit_len})


def _waiting(response_id: str, request: Request, since: float) -> RequestTrace:
    """Makes the trace of a request that no replica has taken yet."""
    origin = request.origin
    assert origin is not None
    waits = on_clock(time.time() - time.monotonic(), pack_decisions([Decision("waits", since, {"reason": "replica"})]))
    trace_id = f"{response_id}/{request.request_id}/{request.attempt}"
    who = (origin.choice, origin.owner, ROUTER, request.attempt)
    return RequestTrace(trace_id, request.request_id, *who, ended=False, num_left_out=0, decisions=waits)


def _left(request: Request, since: float, now: float) -> EndedRequest:
    """Makes the row that is shown of a request whose client left while the request waited here."""
    origin, forecast = request.origin, request.forecast
    return EndedRequest(
        response_id="" if origin is None else origin.response_id,
        choice=0 if origin is None else origin.choice,
        reason="abort",
        output_len=len(request.output_ids),
        predicted_len=None if forecast is None else forecast.mean,
        took_s=now - since,
        most_len=None if forecast is None else forecast.quantiles[QUANTILES.index(0.9)],
        tenant=request.tenant,
        prompt_len=request.prompt_len,
    )

"""OpenAIBackend: represents a replica that is an external server, in place of a Scheduler and a ModelWorker."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import aclosing
from pathlib import Path

from farsight.actors.calls.scheduling import ReplicaCalls, TokenCalls
from farsight.actors.external.openai_server import BackendStream, OpenAIServer, find_api_key
from farsight.actors.external.openai_wire import BackendFailed, failed
from farsight.actors.log.log_outbox import LogOutbox
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import BackendMetrics, EngineMetrics
from farsight.actors.runtime.peer import LOOK_AGAIN_S, reaches, wait_for
from farsight.actors.worker.token_channels import TICK_S, TokenChannels
from farsight.core.forecast import ForecastsMade
from farsight.core.messages.fleet import ReplicaNews, ReplicaState
from farsight.core.messages.log import LogRecords, RequestTrace, RequestTraces, TraceQuery
from farsight.core.messages.plans import FinishedSequence, StartedRequest, WorkerReady
from farsight.core.messages.requests import Key, Keys, Refusal, Refusals, Submit
from farsight.core.messages.tokens import TokenBatches, TokenDelta, TokenPoll
from farsight.core.request import Request
from farsight.engine.vocabulary import PromptDecoder, vocabulary_size
from farsight.policies.compose import configured_backend
from farsight.policies.external.events import (
    AskServer,
    BackendEvent,
    BackendInstruction,
    BreakerChanged,
    CancelRequest,
    FailRequest,
    OutputEnded,
    OutputFailed,
    OutputGrew,
    ProbeDone,
    ProbeTick,
    ReturnRequest,
    SendRequest,
)
from farsight.policies.replica.decision_trace import account_closed
from farsight.policies.replica.events import (
    AccountClosed,
    ForecastsArrived,
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
    RequestStarted,
    request_trace,
)

SAY_AGAIN_S = 1.0
"""Seconds after which the Router gets the replica's state again, so that a new Router soon knows the replica."""

NEWS_S = 0.05
"""Seconds for which starts and ends of requests are collected before one message reports them to the Router."""

LOOK_S = 0.25
"""Seconds between two ``ProbeTick`` events to the state machine, and between two counts of the queues."""

logger = logging.getLogger(__name__)


class OpenAIBackend(Component, ReplicaCalls, TokenCalls):
    """Turns messages and the server's answers into events of the state machine, and carries out its instructions."""

    kind = "OpenAIBackend"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        config = context.config
        self._config = config.replica[int(context.index)]
        self._replica = context.name
        self._machine = configured_backend(config.scheduler, self._config.max_num_seqs)
        self._decoder = PromptDecoder(Path(context.site.model_dir))
        name, api_key = self._config.model or config.model.name, find_api_key(self._config)
        self._server = OpenAIServer(self._config, name, self._decoder.decode, api_key)
        self._incarnation = uuid.uuid4().hex[:12]
        self._channels = TokenChannels(self._incarnation)
        self._streams: dict[Key, BackendStream] = {}
        self._works: dict[Key, asyncio.Task[None]] = {}
        self._vocab_size = 0
        self._started: list[StartedRequest] = []
        self._ended: list[FinishedSequence] = []
        self._events_due = asyncio.Event()
        self._news_due = asyncio.Event()
        self._router_sends = False  # the last state that the Router received said that requests may come
        self._returned: list[tuple[Request, TokenDelta]] = []
        self._answered_at: float | None = None
        self._num_ended = 0
        self._router = context.peers.router()
        append = context.peers.log_store().append
        self._traces = LogOutbox[RequestTrace](append, lambda traces: LogRecords(traces=traces), context.degraded)
        self._queues = EngineMetrics(context.registry, config.model.name, self._replica)
        self._metrics = BackendMetrics(context.registry, config.model.name, self._replica)
        self._metrics.set_state(self._machine.breaker.state)

    async def start(self) -> None:
        """
        Raises:
            InvalidValueError: The model's directory does not tell the size of the vocabulary.
        """
        self._vocab_size = await asyncio.to_thread(vocabulary_size, Path(self.context.site.model_dir))
        await self._server.open()
        for work in (self._look, self._tell_router, self._tell_events, self._watch_ingresses, self._traces.run):
            self.spawn(work())

    async def stop(self) -> None:
        await super().stop()
        self._channels.close()
        self._queues.remove()
        await self._server.close()

    async def submit(self, submit: Submit) -> Refusals:
        return Refusals(tuple(self._handle(RequestsArrived(submit.requests, submit.placements))))

    async def foresee(self, forecasts: ForecastsMade) -> None:
        self._handle(ForecastsArrived(forecasts.made))

    async def abort(self, aborted: Keys) -> None:
        self._handle(RequestsAborted(aborted.keys))

    async def unknown(self, asked: Keys) -> Keys:
        return Keys(self._machine.unknown(asked.keys))

    async def explain(self, query: TraceQuery) -> RequestTraces:
        known = [each for each in self._traces if each.trace_id.startswith(f"{query.response_id}/")]
        known += [self._trace(account_closed(each), ended=False) for each in self._machine.accounts(query.response_id)]
        return RequestTraces(tuple(known))

    async def poll_tokens(self, poll: TokenPoll) -> TokenBatches:
        self._channels.hear(poll)
        for stream in self._streams.values():
            self._pace(stream)
        return await self._channels.answer(poll)

    @property
    def state(self) -> str:
        return "ready" if self._machine.breaker.closed else "waiting"

    @property
    def queue(self) -> int:
        return self._machine.num_waiting + self._machine.num_sent

    @property
    def last_step_age_s(self) -> float | None:
        return None if self._answered_at is None else time.monotonic() - self._answered_at

    @property
    def work_done(self) -> Mapping[str, float]:
        return {"requests ended": self._num_ended}

    @property
    def url(self) -> str:
        return self._config.url

    @property
    def breaker(self) -> str:
        breaker = self._machine.breaker
        return breaker.state.value if breaker.closed else f"{breaker.state.value}: {breaker.reason}"

    def _handle(self, event: BackendEvent) -> list[Refusal]:
        """Passes an event to the state machine and carries out its instructions; returns the refusals among them."""
        refusals = []
        for instruction in self._machine.handle(event, time.monotonic()):
            match instruction:
                case RefuseRequest(request_id, attempt, field, message):
                    refusals.append(Refusal(request_id, attempt, field, message))
                case _:
                    self._carry_out(instruction)
        return refusals

    def _carry_out(self, instruction: BackendInstruction) -> None:
        match instruction:
            case SendRequest(request):
                self._send(request)
            case CancelRequest(key):
                self._works[key].cancel()
            case ReturnRequest(request, reason):
                self._returned.append((request, _end(request, len(request.output_ids), "abort", reason)))
                self._release_returned()
            case FailRequest(request, output_len, reason):
                self._put(request, _end(request, output_len, "error", f"{self._replica}: {reason}"))
            case RequestStarted(started):
                self._started.append(started)
                self._queues.started(started.queue_s)
            case RequestEnded(finished):
                self._ended.append(finished)
                self._num_ended += 1
                self._events_due.set()
            case AccountClosed():
                self._traces.add(self._trace(instruction, ended=True))
            case AskServer(generates):
                self.spawn_aside(self._ask(generates))
            case BreakerChanged():
                self._note_breaker()

    def _note_breaker(self) -> None:
        breaker = self._machine.breaker
        self._metrics.set_state(breaker.state)
        self.note("breaker", state=breaker.state.value, reason=breaker.reason)
        self._news_due.set()
        why = f": {breaker.reason}" if breaker.reason else ""
        level = logging.INFO if breaker.closed else logging.WARNING
        logger.log(level, "%s (%s): the breaker is %s%s", self._replica, self._config.url, breaker.state.value, why)

    def _release_returned(self) -> None:
        """Returns requests to their ingress replicas, but not before the Router knows that the breaker is open.

        Otherwise the Router would place them on this replica again at once.
        """
        if self._machine.breaker.closed or not self._router_sends:
            returned, self._returned = self._returned, []
            for request, delta in returned:
                self._put(request, delta)

    def _put(self, request: Request, delta: TokenDelta) -> None:
        self._channels.put(request.ingress_id, [delta], self._machine.num_sent)

    def _send(self, request: Request) -> None:
        key = request.request_id, request.attempt
        self._streams[key] = stream = BackendStream(request)
        self._pace(stream)
        self._works[key] = task = self.spawn_aside(self._stream(key, stream))
        task.add_done_callback(lambda _: self._forget(key))

    def _forget(self, key: Key) -> None:
        del self._streams[key], self._works[key]

    async def _stream(self, key: Key, stream: BackendStream) -> None:
        """Sends one request and passes its output on until the end."""
        try:
            async with aclosing(self._server.complete(stream.request, stream.reading)) as chunks:
                async for chunk in chunks:
                    self._answered_at = time.monotonic()
                    delta = stream.take(chunk)
                    if delta is not None:
                        self._pass_on(key, stream, delta)
        except BackendFailed as error:
            self._metrics.failed(error.failure.kind)
            self._handle(OutputFailed(key, error.failure))
            return
        last = stream.end()
        if last.num_tokens:
            self._handle(OutputGrew(key, last.num_tokens))
        self._put(stream.request, last)
        self._handle(OutputEnded(key, stream.status, stream.cached_len))

    def _pass_on(self, key: Key, stream: BackendStream, delta: TokenDelta) -> None:
        request = stream.request
        self._handle(OutputGrew(key, delta.num_tokens))
        self._put(request, delta)
        self._pace(stream)

    def _pace(self, stream: BackendStream) -> None:
        """Reads from the server only while the client reads."""
        request = stream.request
        if self._channels.rests(request.ingress_id, request.request_id):
            stream.reading.clear()
        else:
            stream.reading.set()

    async def _ask(self, generates: bool) -> None:
        try:
            listed = await self._server.probe(generates=generates)
            limits = [limit for limit in (self._config.max_model_len, listed.max_model_len) if limit]
            if not limits:
                message = "the server does not report its limit of sequence length; set [[replica]] max_model_len"
                raise failed("model", message, trips=True)
        except BackendFailed as error:
            self._metrics.failed(error.failure.kind)
            self._handle(ProbeDone(error.failure))
            return
        self._answered_at = time.monotonic()
        self._handle(ProbeDone(None, min(limits)))

    def _ready(self) -> WorkerReady | None:
        if not self._machine.breaker.closed:
            return None
        max_model_len, block_size = self._machine.max_model_len, self.context.config.engine.kv_block_size
        kv_tokens = self._config.kv_tokens or self._config.max_num_seqs * max_model_len
        return WorkerReady(
            worker_incarnation=self._incarnation,
            num_blocks=max(1, kv_tokens // block_size),
            block_size=block_size,
            max_model_len=max_model_len,
            pool_limited=False,
            vocab_size=self._vocab_size,
            external=True,
        )

    def _trace(self, account: AccountClosed, *, ended: bool) -> RequestTrace:
        return request_trace(account, self._replica, time.time() - time.monotonic(), ended=ended)

    async def _look(self) -> None:
        """Tells the state machine the time at regular intervals, so that probes become due."""
        while True:
            self._handle(ProbeTick())
            self._queues.set_queues(self._machine.num_sent, self._machine.num_waiting)
            await asyncio.sleep(LOOK_S)

    async def _tell_router(self) -> None:
        while True:
            self._news_due.clear()
            state = ReplicaState(self._replica, self._ready(), (), sums=self._machine.sums())
            told = await reaches(self._router.replica_state(state))
            if told:
                self._router_sends = state.ready is not None
                self._release_returned()
            await wait_for(self._news_due, SAY_AGAIN_S if told else LOOK_AGAIN_S)

    async def _tell_events(self) -> None:
        """Reports starts and ends of requests. A report may be lost with a Router: its successor asks the ingress."""
        while True:
            await self._events_due.wait()
            await asyncio.sleep(NEWS_S)
            self._events_due.clear()
            news = ReplicaNews(self._replica, self._incarnation, tuple(self._started), tuple(self._ended))
            self._started, self._ended = [], []
            await reaches(self._router.replica_news(news))

    async def _watch_ingresses(self) -> None:
        """Aborts requests of ingress replicas that have died. Ray is asked about a silent one, which may be busy."""
        while True:
            await asyncio.sleep(TICK_S)
            for ingress_id in await self.context.gone(self._channels.silent(self._machine.ingress_ids)):
                keys = self._machine.keys_of(ingress_id)
                logger.warning("%d requests of an ingress replica that has died were aborted", len(keys))
                self._handle(RequestsAborted(keys))


def _end(request: Request, start: int, finish_reason: str, reason: str) -> TokenDelta:
    return TokenDelta(request.request_id, request.attempt, start, (), "", finish_reason, reason)

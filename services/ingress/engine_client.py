"""The ingress's side of the protocol: submits requests, receives their tokens, resumes lost attempts."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import itertools
import logging
import math
import os
import socket
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import nullcontext, suppress
from typing import Any

from prometheus_client import CollectorRegistry

from farsight.actors.log.log_outbox import LogOutbox
from farsight.actors.runtime.health import HealthServer
from farsight.actors.runtime.metrics import RequestMetrics, show_degraded
from farsight.actors.runtime.names import is_backend
from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerLost, Site, again_and_again, wait_for
from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Forecast, ForecastMade, ForecastsMade, StateQuestion
from farsight.core.images import EncodedImage, ImageFile
from farsight.core.messages.log import FinishedRequest, LogRecords, RequestTrace
from farsight.core.messages.requests import Keys, Refusal, Submit
from farsight.core.messages.status import ComponentStatus, Degraded
from farsight.core.messages.tokens import TokenDelta, TokenPoll
from farsight.core.request import Request
from farsight.policies.compose import predicts_requests
from farsight.services.api.backend import ModelInfo
from farsight.services.api.generation import PromptText
from farsight.services.ingress.first_check import CountedRequest, FirstCheck
from farsight.services.ingress.image_client import ImageClient
from farsight.services.ingress.ledger import RequestLedger
from farsight.services.ingress.overview import Overview
from farsight.services.ingress.predictor_client import PredictorClient, question_of
from farsight.services.ingress.streams import ClientStream, TokenInbox, fail_stream, prefix_hashes
from farsight.services.ingress.supervisor_link import REPLACED, OpenRequests

ANNOUNCE_S = 0.5
"""Seconds between announcements of the open requests to the Router, which answers with the lost ones."""

UNHEALTHY_AFTER_S = 5.0
"""Seconds without an answer of the Router after which this client is unhealthy: new requests would only wait."""

SLOW_DELTAS = 256
"""Unread deltas of a client from which on the worker pauses its sequence ..."""

READING_DELTAS = 64
"""... until no more than so many are left."""

OWN_ENGINE_S = 1.0
"""Seconds between checks for requests that are past their deadline and still on this engine."""

logger = logging.getLogger(__name__)


class EngineClient:
    """A ``Generator`` over the Router and the model workers.

    Args:
        site: Where the Router and the workers are.
        model: What clients may know about the model.
        keep: Keeps a Supervisor alive; runs as long as the client.
        prefix_block_size: Tokens of the blocks by which prompts are compared; 0 if the placement compares none.
        ingress_id: End of the name of this process's actor, by which other processes find out whether it lives
            (``actors.runtime.component``); random where there is no actor.
        listens: Whether this process shows its metrics on a port of its own.

    Attributes:
        overview: What operators see of the service from here.
        open_requests: Requests whose clients wait, by the weights that they run on.
    """

    def __init__(
        self,
        site: Site,
        model: ModelInfo,
        keep: Callable[[], Coroutine[Any, Any, None]] | None = None,
        *,
        prefix_block_size: int = 0,
        ingress_id: str = "",
        listens: bool = True,
    ) -> None:
        self._listens = listens
        self._prefix_block_size = prefix_block_size
        self._peers = site.peers()
        self._router = self._peers.router()
        self._config = site.config
        self._sends_text = any(each.prompt == "text" for each in site.config.replica)
        self._keep = keep
        self.ingress_id = ingress_id or uuid.uuid4().hex[:12]
        self._ledger = RequestLedger(self.ingress_id)
        self._ids = itertools.count()
        self._streams: dict[str, ClientStream] = {}
        self._slow: set[str] = set()
        self._outgoing_due = asyncio.Event()
        self._degraded = Degraded()
        log_store = self._peers.log_store()
        self._log = LogOutbox[FinishedRequest](log_store.append, LogRecords, self._degraded)
        self._traces = LogOutbox[RequestTrace](log_store.append, lambda new: LogRecords(traces=new), self._degraded)
        self._images = ImageClient(site, self._peers, self.ingress_id)
        self._made: list[ForecastMade] = []
        self.forecaster: PredictorClient | None = None
        if predicts_requests(site.config):
            self.forecaster = PredictorClient(self._peers, site.config, self._degraded, self._foresee)
        self._predictor_wait_s = site.config.predictor.wait_s
        self._pumps: dict[str, asyncio.Task[None]] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at: float | None = None
        self._token_at: float | None = None
        self.overview = Overview(site, self._peers, self)
        self.registry = CollectorRegistry()
        self._metrics = RequestMetrics(self.registry, model.name)
        self.first_check = FirstCheck(site.config.server, self._metrics.rejected)
        self.tally = self._metrics.tally
        self.open_requests = OpenRequests(
            site.config, model, self.first_check, self._streams, self._ledger, self._router, self._outgoing_due.set
        )
        show_degraded(self.registry, lambda: [(f"ingress-{self.ingress_id}", self._degraded)])
        self._health = HealthServer(self.registry, lambda: [self._row()])
        self._port = 0

    @property
    def model(self) -> ModelInfo:
        """What clients may know about the model that new requests run on."""
        return self.open_requests.model

    async def start(self) -> None:
        """Starts the background pumps, on the event loop that serves requests."""
        if self._listens:
            self._port = await self._health.start()
        work = [self._pump_outgoing, self._pump_announcements, self._log.run, self._traces.run]
        if self.model.image_input is not None:
            work.append(self._images.run)
        if self._keep is not None:
            work.append(self._keep)
        if self.forecaster is not None:
            work.append(self.forecaster.run)
        self._tasks = [asyncio.create_task(again_and_again(each, LOOK_AGAIN_S)) for each in work]

    async def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yields the deltas of one request, the last with a finish reason; closing early aborts the request.

        Raises:
            CapacityError: Too much is in flight already.
            InvalidValueError: No worker can ever run the request.
        """
        if self.open_requests.is_replaced(request):
            yield TokenDelta("", 0, len(request.output_ids), (), "", "error", REPLACED)
            return
        admitted = self.first_check.admit(request, key)
        try:
            stream = self._open(self._named(request, text), admitted)
        except BaseException:
            self.first_check.leave(admitted)
            raise
        try:
            with self._images.held(request) if request.images else nullcontext():
                if text is not None and self.forecaster is not None:
                    await self._ask(stream, text, self.forecaster)
                self._ledger.open(stream)
                self._outgoing_due.set()
                reason = None
                while reason is None:
                    delta = await stream.deltas.take()
                    self._note_read(stream)
                    reason = delta.finish_reason
                    yield delta
        finally:
            self.first_check.leave(admitted)
            self._close(stream)

    def _named(self, request: Request, text: PromptText | None) -> Request:
        return dataclasses.replace(
            request,
            request_id=f"{self.ingress_id}-{next(self._ids)}",
            ingress_id=self.ingress_id,
            # A stream that began at another ingress replica goes on with the weights that its log names.
            model_version=request.model_version if request.output_ids else self.open_requests.model_version,
            prefix_hashes=prefix_hashes(request, self._prefix_block_size),
            source=text.source if self._sends_text and text is not None else None,
        )

    def _open(self, request: Request, admitted: CountedRequest) -> ClientStream:
        # A request that goes on comes with its output so far, which its client has.
        stream = ClientStream(request, list(request.output_ids), num_tokens=len(request.output_ids), admitted=admitted)
        self._streams[request.request_id] = stream
        self._watch_deadline(stream)
        return stream

    def _watch_deadline(self, stream: ClientStream) -> None:
        """Starts the timer that fails a request without a first token in time."""
        seconds = min(self.open_requests.deadline_s, self.open_requests.own_deadline_s)
        if seconds < math.inf:
            stream.deadline = asyncio.get_running_loop().call_later(seconds, self._miss_deadline, stream)

    def _miss_deadline(self, stream: ClientStream) -> None:
        request_id = stream.request.request_id
        replica = self._ledger.replica_of(request_id)
        if replica is None:
            return  # the request has ended without a token
        waited_s = time.monotonic() - stream.began
        if (
            replica and not is_backend(replica) and waited_s < self.open_requests.own_deadline_s
        ):  # this engine runs every request in the end
            seconds = min(OWN_ENGINE_S, self.open_requests.own_deadline_s - waited_s)
            stream.deadline = asyncio.get_running_loop().call_later(seconds, self._miss_deadline, stream)
            return
        self._ledger.close(request_id, time.monotonic())
        where = f"it was on {replica}" if replica else "no replica takes requests"
        fail_stream(stream, stream.attempts, f"no token within {waited_s:.0f} s; {where}")
        self._outgoing_due.set()

    async def _ask(self, stream: ClientStream, text: PromptText, forecaster: PredictorClient) -> None:
        """Asks for a forecast of the output length, and waits for it as long as the settings allow."""
        wait_s = self._predictor_wait_s
        if forecaster.ask(question_of(stream.request, text)) and wait_s > 0:
            await wait_for(stream.predicted, wait_s)

    def _ask_again(self, request: Request, state: bytes, forecaster: PredictorClient) -> None:
        """Asks for a forecast after prefill, if there is one to improve on."""
        if request.forecast is not None:
            limit = request.sampling.max_new_tokens
            forecaster.ask(StateQuestion(request.request_id, request.prompt_len, limit, request.forecast, state))

    def _foresee(self, answers: list[tuple[str, Forecast]]) -> None:
        """Books forecasts; a forecast of a request that is on its way is sent after it."""
        for request_id, forecast in answers:
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # the request has ended
            stream.predicted.set()
            attempt = self._ledger.foresee(stream, forecast)
            if attempt is not None:
                self._made.append(ForecastMade(request_id, attempt, forecast))
        if self._made:
            self._outgoing_due.set()

    def _close(self, stream: ClientStream) -> None:
        """Closes a request whose client gets nothing more: aborts it if it runs, and logs it."""
        if stream.deadline is not None:
            stream.deadline.cancel()
        request, now = stream.request, time.monotonic()
        del self._streams[request.request_id]
        self._slow.discard(request.request_id)
        self._ledger.close(request.request_id, now)
        if self._ledger.has_outgoing:
            self._outgoing_due.set()
        record = stream.record(now)
        self._log.add(record)
        for trace in stream.trace.end(record):
            self._traces.add(trace)
        self._metrics.finished(
            record.finish_reason,
            record.jct_s,
            record.prompt_len,
            record.output_len,
            record.max_new_tokens,
            ttft_s=record.ttft_s,
            exemplar=stream.trace.exemplar,
        )

    async def _pump_outgoing(self) -> None:
        """Submits and aborts in order of arrival; requests that come during a call go with the next one."""
        while True:
            await self._outgoing_due.wait()
            self._outgoing_due.clear()
            requests, aborts = self._ledger.take_outgoing()
            self._note_resumed(requests)
            made, self._made = tuple(self._made), []
            try:
                if requests:
                    await self._submit(requests)
            except PeerLost:
                self._ledger.submit_failed(requests)
                await asyncio.sleep(LOOK_AGAIN_S)
            if made:
                with suppress(PeerLost):  # the requests go on without forecasts
                    await self._router.foresee(ForecastsMade(made))
            if aborts:
                with suppress(PeerLost):  # an attempt that still sends tokens is aborted again
                    await self._router.abort(Keys(aborts))
            self._after_faults()

    def _note_resumed(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.attempt and request.request_id in self._streams:
                facts = {"attempt": request.attempt, "output_tokens": len(request.output_ids)}
                self._streams[request.request_id].trace.note("resumed", facts)

    async def _submit(self, requests: tuple[Request, ...]) -> None:
        reply = await self._router.submit(Submit(tuple(map(self._aged, requests))))
        for stream in filter(None, (self._streams.get(request.request_id) for request in requests)):
            self.first_check.placed(stream.admitted)
        for promise in reply.promises:
            if promise.request_id in self._streams:
                self._streams[promise.request_id].note_end(promise)
        self._end_refused(self._ledger.submitted(reply))
        self._follow({placed.replica for placed in reply.placed if placed.replica})

    def _aged(self, request: Request) -> Request:
        stream = self._streams.get(request.request_id)
        return request if stream is None else request.aged(time.monotonic() - stream.began)

    async def _pump_announcements(self) -> None:
        while True:
            lists = self._ledger.is_asked
            try:
                reply = await self._router.announce(self._ledger.announce(self.first_check.announcing()))
                self._heard_at = time.monotonic()
                self.first_check.heard(reply)
                self._end_refused(self._ledger.announced(reply))
                self._follow(reply.replicas)
                self._unfollow(set(reply.replicas))
                await self._router.introduce(self._row())
            except PeerLost:
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            self._after_faults()
            if lists or not self._ledger.is_asked:  # else the Router waits for the list that follows
                await asyncio.sleep(ANNOUNCE_S)

    def _end_refused(self, refusals: Iterable[Refusal]) -> None:
        for refusal in refusals:
            stream = self._streams.get(refusal.request_id)
            if stream is not None:
                stream.reason = "error"
                stream.trace.note("refused", {"reason": refusal.message})
                value = getattr(stream.request.sampling, refusal.field, stream.request.max_total_len)
                stream.deltas.fail(InvalidValueError(refusal.field, value, refusal.message))

    def _follow(self, replicas: Iterable[str]) -> None:
        for replica in replicas:
            if replica not in self._pumps:
                pump = functools.partial(self._pump_tokens, replica)
                self._pumps[replica] = asyncio.create_task(again_and_again(pump, LOOK_AGAIN_S))

    def _unfollow(self, replicas: set[str]) -> None:
        """Stops asking replicas that no longer exist."""
        for replica in set(self._pumps) - replicas:
            if not self._ledger.runs_on(replica):
                self._pumps.pop(replica).cancel()

    async def _pump_tokens(self, replica: str) -> None:
        """Polls the tokens of one worker through all its lives."""
        worker = self._peers.worker(replica)
        is_external = is_backend(replica)
        inbox = TokenInbox()
        while True:
            try:
                poll = TokenPoll(self.ingress_id, inbox.ack_seq, tuple(self._slow))
                reply = await worker.poll_tokens(poll)
            except PeerLost:
                inbox = TokenInbox()
                self._ledger.worker_lost(replica)
                self._after_faults()
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            deltas = inbox.receive(reply)
            if is_external:
                self._note_returned(replica, deltas)
            self._deliver(replica, inbox.incarnation, deltas)

    def _deliver(self, replica: str, incarnation: str, deltas: Iterable[TokenDelta]) -> None:
        now = time.monotonic()
        for delta in self._ledger.receive(replica, incarnation, deltas, now):
            stream = self._streams[delta.request_id]
            self._measure(stream, delta, replica, now)
            stream.answered_by, stream.attempts = replica, delta.attempt + 1
            stream.reason = delta.finish_reason or stream.reason
            if delta.state and self.forecaster is not None:
                self._ask_again(stream.request, delta.state, self.forecaster)
            stream.deltas.put(delta)
            if len(stream.deltas) >= SLOW_DELTAS and delta.request_id not in self._slow:
                self._slow.add(delta.request_id)
                stream.trace.note("client_slow", {"unread_deltas": len(stream.deltas)})
        self._after_faults()

    def _note_returned(self, replica: str, deltas: Iterable[TokenDelta]) -> None:
        """Notes why another server did not answer; the client is told if no server does in the end."""
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None and delta.error is not None:
                stream.trouble = f"{replica}: {delta.error}" if delta.finish_reason == "abort" else ""

    def _after_faults(self) -> None:
        """Sends the requests that the ledger found lost again, and fails the ones that it gave up."""
        for given_up in self._ledger.take_given_up():
            stream = self._streams.get(given_up.request_id)
            if stream is not None:  # else its client has left
                fail_stream(stream, given_up.attempts, given_up.reason)
        if self._ledger.has_outgoing:
            self._outgoing_due.set()

    def _measure(self, stream: ClientStream, delta: TokenDelta, replica: str, now: float) -> None:
        count = delta.num_tokens
        if stream.token_at is None and (count or delta.finish_reason in ("stop", "length")):
            self._metrics.prompt(stream.request.prompt_len, outside=is_backend(replica))
        if not count:
            return
        if stream.token_at is None:
            if stream.deadline is not None:
                stream.deadline.cancel()
            stream.ttft_s = now - stream.began
            self.first_check.waited(stream.admitted, stream.ttft_s, count)
            self._metrics.first_token(stream.ttft_s, count, stream.trace.exemplar)
            stream.trace.note("first_token", {"ttft_s": stream.ttft_s})
        else:
            self._metrics.tokens(now - stream.token_at, count)
            self.first_check.progressed(stream.admitted, count, now - stream.token_at)
        stream.token_at = self._token_at = now
        stream.num_tokens += count

    def _note_read(self, stream: ClientStream) -> None:
        if len(stream.deltas) <= READING_DELTAS and stream.request.request_id in self._slow:
            self._slow.discard(stream.request.request_id)
            stream.trace.note("client_reads", {"unread_deltas": len(stream.deltas)})

    def _row(self) -> ComponentStatus:
        return ComponentStatus(
            name=f"ingress-{self.ingress_id}",
            kind="Ingress",
            pid=os.getpid(),
            node=socket.gethostname(),
            state="ready" if self.hears else "waiting",
            queue=len(self._streams),
            last_step_age_s=None if self._token_at is None else time.monotonic() - self._token_at,
            restarts=0,
            http_port=self._port,
            degraded=self._degraded.reason(time.monotonic()),
        )

    @property
    def num_open(self) -> int:
        """Requests whose clients wait."""
        return len(self._streams)

    @property
    def hears(self) -> bool:
        """Whether the Router has answered within ``UNHEALTHY_AFTER_S``; any thread may ask."""
        heard_at = self._heard_at
        return heard_at is not None and time.monotonic() - heard_at < UNHEALTHY_AFTER_S

    def own_traces(self, response_id: str) -> list[RequestTrace]:
        """Returns what this process knows of the decisions behind an answer."""
        ended = [trace for trace in self._traces if trace.trace_id.startswith(f"{response_id}/")]
        open_now = [stream.trace for stream in self._streams.values() if stream.trace.is_of(response_id)]
        return [*ended, *(each for trace in open_now for each in trace.so_far())]

    async def see(self, files: Sequence[ImageFile], salt: str) -> tuple[EncodedImage, ...]:
        return await self._images.see(files, salt)

    async def close(self) -> None:
        """Stops everything that ``start`` began."""
        tasks = [*self._tasks, *self._pumps.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._health.stop()
        self._images.close()
        self._peers.close()

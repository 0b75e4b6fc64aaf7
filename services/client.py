"""The ingress's side of the protocol: submits requests, receives their tokens, aborts them when a client goes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from core.codec import decode, encode
from core.errors import CapacityError, InvalidValueError
from core.messages import (
    Abort,
    PieceStatus,
    Refusals,
    StatusReply,
    Submit,
    TokenBatches,
    TokenDelta,
)
from core.request import Request, SamplingParams
from services.api.backend import ModelInfo
from services.api.errors import ApiError
from services.inbox import TokenInbox

HEARTBEAT_S = 1.0
RETRY_AFTER_S = 1.0

logger = logging.getLogger(__name__)


class _Stream:
    """One open request: its tokens on the way to the client."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.submitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.deltas: asyncio.Queue[TokenDelta] = asyncio.Queue()
        self.ended = False


class EngineClient:
    """A ``GenerationBackend`` over the control actor and the model workers.

    Args:
        control: Handle of the control actor.
        workers: Handles of the workers, one a replica; tokens come straight from them.
        model: What is served.
        max_requests: Open requests at most; counted at the first check.
        max_tokens: Their prompt tokens at most.
    """

    def __init__(
        self, control: Any, workers: Sequence[Any], model: ModelInfo, max_requests: int, max_tokens: int
    ) -> None:
        self.model = model
        self._control = control
        self._workers = workers
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._ingress_id = uuid.uuid4().hex[:12]
        self._ids = itertools.count()
        self._streams: dict[str, _Stream] = {}
        self._open_tokens = 0
        self._outgoing: list[_Stream] = []
        self._aborts: list[tuple[str, int]] = []
        self._outgoing_due = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._broken: str | None = None

    def start(self) -> None:
        """Starts the background pumps; call on the event loop that serves requests."""
        token_pumps = [self._pump_tokens(worker) for worker in self._workers]
        for pump in (*token_pumps, self._pump_outgoing(), self._pump_heartbeat()):
            self._tasks.append(asyncio.create_task(self._guard(pump)))

    async def stream(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> AsyncGenerator[TokenDelta, None]:
        """Deltas of one request, the last with a finish reason; closing early aborts it.

        Raises:
            ApiError: the engine is gone.
            CapacityError: too much is in the house already.
            InvalidValueError: the scheduler refuses it.
        """
        stream = self._open(prompt_ids, sampling)
        try:
            self._outgoing.append(stream)
            self._outgoing_due.set()
            await stream.submitted
            while not stream.ended:
                delta = await stream.deltas.get()
                stream.ended = delta.finish_reason is not None
                yield delta
        finally:
            self._close(stream)

    def _open(self, prompt_ids: tuple[int, ...], sampling: SamplingParams) -> _Stream:
        if self._broken is not None:
            raise ApiError(f"the model worker is gone: {self._broken}", status=503, kind="server_error")
        if len(self._streams) >= self._max_requests:
            raise CapacityError(
                f"{len(self._streams)} requests are open, the limit is {self._max_requests}", RETRY_AFTER_S
            )
        if self._streams and self._open_tokens + len(prompt_ids) > self._max_tokens:
            message = f"{self._open_tokens} prompt tokens are in the house, the limit is {self._max_tokens}"
            raise CapacityError(message, RETRY_AFTER_S)
        request_id = f"{self._ingress_id}-{next(self._ids)}"
        stream = _Stream(Request(request_id, 0, self._ingress_id, prompt_ids, sampling))
        self._streams[request_id] = stream
        self._open_tokens += len(prompt_ids)
        return stream

    def _close(self, stream: _Stream) -> None:
        request = stream.request
        del self._streams[request.request_id]
        self._open_tokens -= request.prompt_len
        if not stream.ended and self._broken is None:
            self._aborts.append((request.request_id, request.attempt))
            self._outgoing_due.set()

    async def _pump_outgoing(self) -> None:
        """Submits and aborts in order of arrival; what comes while a call is under way goes with the next one."""
        while True:
            await self._outgoing_due.wait()
            self._outgoing_due.clear()
            outgoing, self._outgoing = self._outgoing, []
            aborts, self._aborts = self._aborts, []
            if outgoing:
                await self._send(outgoing)
            if aborts:
                await self._control.abort.remote(encode(Abort(tuple(aborts))))

    async def _send(self, outgoing: list[_Stream]) -> None:
        reply = await self._control.submit.remote(encode(Submit(tuple(stream.request for stream in outgoing))))
        refused = {refusal.request_id: refusal for refusal in decode(reply, Refusals).refusals}
        for stream in outgoing:
            refusal = refused.get(stream.request.request_id)
            if stream.submitted.done():
                continue  # its client left meanwhile
            if refusal is None:
                stream.submitted.set_result(None)
            else:
                total = stream.request.max_total_len
                stream.submitted.set_exception(InvalidValueError(refusal.field, total, refusal.message))

    async def _pump_tokens(self, worker: Any) -> None:
        inbox = TokenInbox()
        while True:
            data = await worker.poll_tokens.remote(self._ingress_id, inbox.ack_seq)
            for delta in inbox.receive(decode(data, TokenBatches)):
                stream = self._streams.get(delta.request_id)
                if stream is not None and delta.attempt == stream.request.attempt:
                    stream.deltas.put_nowait(delta)

    async def _pump_heartbeat(self) -> None:
        while True:
            await self._control.heartbeat.remote(encode(self._piece()))
            await asyncio.sleep(HEARTBEAT_S)

    def _piece(self) -> PieceStatus:
        return PieceStatus(
            name=f"ingress-{self._ingress_id}",
            kind="Ingress",
            pid=os.getpid(),
            node=socket.gethostname(),
            state="ready" if self._broken is None else "failed",
            queue=len(self._streams),
            last_step_age_s=None,
        )

    async def _guard(self, pump: Any) -> None:
        """A pump that ends takes the backend with it: every open request is answered, new ones are refused."""
        try:
            await pump
        except asyncio.CancelledError:
            raise
        except Exception as error:  # an actor died, or a message was refused: both end this connection
            logger.exception("the connection to the engine broke")
            self._break(f"{type(error).__name__}: {error}")

    def _break(self, reason: str) -> None:
        if self._broken is not None:
            return
        self._broken = reason
        for request_id, stream in self._streams.items():
            if not stream.submitted.done():
                stream.submitted.set_result(None)
            stream.deltas.put_nowait(TokenDelta(request_id, 0, 0, (), "", "error", "the model worker is gone"))

    async def status(self) -> StatusReply:
        """One row for every logical piece."""
        await self._control.heartbeat.remote(encode(self._piece()))
        return decode(await self._control.status.remote(), StatusReply)

    async def healthy(self) -> bool:
        return self._broken is None

    async def close(self) -> None:
        """Stops the pumps."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

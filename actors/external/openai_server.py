"""HTTP to one OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from farsight.actors.external.openai_wire import (
    DONE,
    BackendFailed,
    Chunk,
    Decode,
    EventReader,
    ListedModel,
    ServerCall,
    TokenUsage,
    by_text,
    by_tokens,
    failed,
    find_model,
    parse_chunk,
    refusal,
)
from farsight.core.config.actors import ReplicaConfig
from farsight.core.errors import ConfigError
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import PromptSource, Request, SamplingParams, SequenceStatus

KEEP_ALIVE_S = 2.0
"""Idle connections are closed after so many seconds: earlier than the server closes them (uvicorn after 5 s)."""

_PROBE = Request("probe", 0, "", (0,), SamplingParams(1))
"""Prompt of a probe, which asks for one token; which token comes does not matter."""

_PROBE_CHAT = PromptSource(messages=(("user", "a"),))
_PROBE_TEXT = PromptSource("a")

MAX_PAGE_BYTES = 1 << 20
"""Most bytes that are read of a list of models or of a health page."""

MAX_REFUSAL_BYTES = 16_384


def find_api_key(config: ReplicaConfig) -> str:
    """Returns the API key of a replica; empty if none is configured.

    Raises:
        ConfigError: The environment variable is not set.
    """
    name = config.api_key_env
    key = os.environ.get(name, "") if name else ""
    if name and not key:
        raise ConfigError("replica.api_key_env", name, "the name of an environment variable that holds a key")
    return key


class OpenAIServer:
    """A server of ``model`` and the connections to it.

    Args:
        decode: Decodes token ids, for servers that take prompts as text.
        api_key: Sent as a bearer token; empty for none.
    """

    def __init__(self, config: ReplicaConfig, model: str, decode: Decode, api_key: str = "") -> None:
        self.model = model
        self._decode = decode
        self._config = config
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._has_health = True

    async def open(self) -> None:
        """Opens the HTTP session. Called on the event loop that uses it."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self._config.connect_timeout_s)
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector, headers=self._headers)

    async def close(self) -> None:
        """Closes the HTTP session and breaks off requests in progress."""
        if self._session is not None:
            await self._session.close()

    async def complete(self, request: Request, reading: asyncio.Event) -> AsyncGenerator[Chunk, None]:
        """Yields the chunks of one completion; the last non-empty chunk has the finish reason or the usage.

        Args:
            reading: Is set while the client reads. While it is not, nothing is read from the server either: the
                connection's buffers then fill and the server pauses, as it would for a slow client of its own.

        Raises:
            BackendFailed: The answer did not end, or came too slowly.
        """
        call = self._call(request)
        limit_s, waited_for = self._config.first_token_timeout_s, "first token"
        loop = asyncio.get_running_loop()
        due_at = loop.time() + limit_s
        events, ended, done = EventReader(), False, False
        may_lack = self._config.prompt == "text"  # chats or completions
        async with _reply(self._post(call), due_at, f"no {waited_for} within {limit_s:g} s", may_lack) as reply:
            while not done:
                if not reading.is_set():
                    await reading.wait()
                    due_at = loop.time() + limit_s
                data = await _in_time(reply.content.readany(), due_at, f"no {waited_for} within {limit_s:g} s")
                done = not data
                for event in events.feed(data):
                    if event == DONE:
                        done = True
                        break
                    chunk = parse_chunk(event, self.model)
                    ended = ended or chunk.finish_reason is not None
                    if chunk.text or ended:
                        limit_s, waited_for = self._config.token_timeout_s, "next token"
                        due_at = loop.time() + limit_s
                    yield chunk
        if not ended:
            raise failed("broken", "the stream ended before the answer did")

    async def probe(self, *, generates: bool) -> ListedModel:
        """Checks that the server answers and serves the model; with ``generates``, also that it generates a token.

        Raises:
            BackendFailed: A check failed.
        """
        if self._has_health:
            await self._check_health()
        listed = find_model(await self._get("/v1/models"), self.model)
        if generates:
            await self._generate()
        return listed

    async def _generate(self) -> None:
        """Asks for one token: by a chat if prompts go as text, else by a completion."""
        reading = asyncio.Event()
        reading.set()
        probes = [_PROBE]
        if self._config.prompt == "text":
            probes = [replace(_PROBE, source=source) for source in (_PROBE_CHAT, _PROBE_TEXT)]
        for request in probes:
            try:
                async with aclosing(self.complete(request, reading)) as chunks:
                    async for _ in chunks:
                        pass
                return
            except BackendFailed as error:
                if request is probes[-1] or not error.failure.of_request:
                    raise

    def _call(self, request: Request) -> ServerCall:
        if self._config.prompt == "text":
            return by_text(request, self.model, self._decode)
        return by_tokens(request, self.model)

    async def _check_health(self) -> None:
        """Sends ``GET /health``. A server that answers that it has no such path is not asked again."""
        try:
            await self._get("/health", may_lack=True)
        except BackendFailed as error:
            if not error.failure.of_request:
                raise
            self._has_health = False

    async def _get(self, path: str, *, may_lack: bool = False) -> bytes:
        assert self._session is not None
        limit_s = self._config.probe_timeout_s
        due_at = asyncio.get_running_loop().time() + limit_s
        message = f"no answer to GET {path} within {limit_s:g} s"
        asked = self._session.get(self._config.base_url + path, allow_redirects=False)  # as in _post
        async with _reply(asked, due_at, message, may_lack) as reply:
            body = b""
            while len(body) <= MAX_PAGE_BYTES and not reply.content.at_eof():
                body += await _in_time(reply.content.readany(), due_at, message)
            if len(body) > MAX_PAGE_BYTES:
                raise failed("broken", f"an answer to GET {path} of more than {MAX_PAGE_BYTES} bytes")
            return body

    def _post(self, call: ServerCall) -> Any:
        assert self._session is not None
        url = self._config.base_url + call.path
        headers = {"Content-Type": "application/json"}
        if call.traceparent:
            headers["traceparent"] = call.traceparent
        # No redirects: the server could name an address that no operator has configured, as in the inner network.
        return self._session.post(url, data=json.dumps(call.body), headers=headers, allow_redirects=False)


@asynccontextmanager
async def _reply(calling: Any, due_at: float, message: str, may_lack: bool) -> AsyncIterator[aiohttp.ClientResponse]:
    """Yields a reply with status 200 that comes until ``due_at``; every fault is raised as ``BackendFailed``.

    Args:
        message: Text of the fault if the reply is too late.
        may_lack: As in ``refusal``.
    """
    reply: aiohttp.ClientResponse = await _in_time(calling, due_at, message)
    try:
        if reply.status != 200:
            data = await _in_time(reply.content.read(MAX_REFUSAL_BYTES), due_at, message)
            raise BackendFailed(refusal(reply.status, data, may_lack=may_lack))
        yield reply
    except BaseException:  # also a stream that is left before its end: the server stops generating
        reply.close()
        raise
    reply.release()


async def _in_time(work: Any, due_at: float, message: str) -> Any:
    """Waits for ``work`` until ``due_at``.

    Raises:
        BackendFailed: The network failed, or the time is up.
    """
    try:
        async with asyncio.timeout_at(due_at):
            return await work
    except aiohttp.ConnectionTimeoutError as error:
        raise failed("connect", f"cannot connect: {error}") from error
    except TimeoutError as error:
        raise failed("timeout", message) from error
    except aiohttp.ClientConnectorError as error:
        raise failed("connect", f"cannot connect: {error.os_error.strerror or error}") from error
    except aiohttp.ClientPayloadError as error:
        raise failed("broken", "the connection broke during the answer") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise failed("broken", f"the connection broke: {error or type(error).__name__}") from error


class BackendStream:
    """Counts tokens without ids: one for each chunk with text, corrected at the end by the server's usage.

    Attributes:
        reading: As in ``OpenAIServer.complete``.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.reading = asyncio.Event()
        self._output_len = len(request.output_ids)
        self._finish_reason: str | None = None
        self._usage: TokenUsage | None = None

    def take(self, chunk: Chunk) -> TokenDelta | None:
        """Returns the delta of a chunk; None if it has no text. Keeps finish reason and usage for ``end``."""
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._usage = chunk.usage or self._usage
        return self._delta(chunk.text, 1) if chunk.text else None

    def end(self) -> TokenDelta:
        """Returns the last delta, which corrects the token count and gives the number of cached prompt tokens."""
        begun_at, missing = len(self.request.output_ids), 0
        if self._usage is not None:
            missing = max(0, begun_at + self._usage.completion_tokens - self._output_len)
        cached_len = 0 if begun_at else self.cached_len or 0
        return self._delta("", missing, self._finish_reason, cached_len)

    @property
    def cached_len(self) -> int | None:
        """Prompt tokens that the server had cached; None if it does not report them."""
        return None if self._usage is None else self._usage.cached_tokens

    @property
    def status(self) -> SequenceStatus:
        """How the sequence ended; every finish reason except the length limit counts as a stop."""
        is_cut = self._finish_reason == "length"
        return SequenceStatus.FINISHED_LENGTH if is_cut else SequenceStatus.FINISHED_STOPPED

    def _delta(self, text: str, num_tokens: int, finish_reason: str | None = None, cached_len: int = 0) -> TokenDelta:
        start = self._output_len
        self._output_len += num_tokens
        request_id, attempt = self.request.request_id, self.request.attempt
        return TokenDelta(
            request_id, attempt, start, (), text, finish_reason, cached_len=cached_len, num_unnamed=num_tokens
        )

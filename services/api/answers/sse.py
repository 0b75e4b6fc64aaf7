"""Streamed answers: server-sent events that begin with the first token and end with ``[DONE]``.

Chunks are plain dicts, which are cheap to encode.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing, suppress
from json.encoder import encode_basestring
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from farsight.core.messages.tokens import DeltaLogprobs, TokenDelta
from farsight.services.api.answers.parts import ChoiceParts, CompletionLogprobs, chat_logprobs
from farsight.services.api.answers.replies import UsageFields, completion_logprobs, first_prompt_entry, usage
from farsight.services.api.answers.served import ANSWER
from farsight.services.api.backend import Generator
from farsight.services.api.errors import ApiError, as_api_error
from farsight.services.api.generate import ClientGone, run_requests, while_connected
from farsight.services.api.generation import Generation, Used
from farsight.services.api.text.dialect import TokenTexts

DONE = b"data: [DONE]\n\n"
EARLY_S = 5.0
"""Without a first event for so long, the status line goes ahead with the promise of the end, if there is one."""
_MOST_IN_A_ROW = 16
"""Events after which others have a turn: a source that never waits would starve the disconnect watch."""

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


class StreamWriter(Protocol):
    """Writes the events of one answer in the form of one API."""

    def opening(self) -> bytes:
        """The events before the first output."""
        ...

    def output(self, index: int, delta: TokenDelta) -> bytes:
        """The events of one delta of a choice; may be empty."""
        ...

    def end(self, used: UsageFields) -> bytes:
        """The last events."""
        ...

    def failure(self, error: ApiError) -> bytes:
        """The last events of an answer that fails after its beginning."""
        ...


class AnswerEvents:
    """The events of one answer, output by output: as it is generated, or from the log of a resumable stream."""

    def __init__(self, generation: Generation, writer: StreamWriter) -> None:
        self.begun = False
        self._writer = writer
        self._used = Used(generation)

    def output(self, index: int, delta: TokenDelta) -> bytes:
        """Writes the events of one delta, the opening before the first."""
        self._used.add(index, delta)
        data = b"" if self.begun else self._writer.opening()
        data += self._writer.output(index, delta)
        self.begun = self.begun or bool(data)
        return data

    def end(self) -> bytes:
        """Writes the last events, with what the answer used."""
        return self._writer.end(usage(self._used))


async def chunks(backend: Generator, generation: Generation, writer: StreamWriter) -> AsyncGenerator[bytes, None]:
    """The events of one answer.

    Raises:
        Exception: The error that refuses the request before the first event. A later failure becomes an event.
    """
    events = AnswerEvents(generation, writer)
    try:
        async with aclosing(run_requests(backend, generation)) as deltas:
            async for index, delta in deltas:
                if chunk := events.output(index, delta):
                    yield chunk
        tail = events.end()
    except Exception as error:
        if not events.begun:
            raise
        tail = writer.failure(as_api_error(error))
    yield tail


def failed_chunk(error: ApiError) -> bytes:
    """As a stream of chunks ends that fails."""
    return event(error.body()) + DONE


class EventStream(Response):
    """Sends events as they arrive; a disconnect ends the source.

    The status line waits for the first event, and is 204 if there is none. It carries the promise of the end; a client
    that waits longer than ``EARLY_S`` gets it first, and a later failure becomes an event.

    Args:
        show: Says whether the status line may go ahead without a promise, because its headers name the answer; called
            each ``EARLY_S`` until it does. None where only a promise goes ahead.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        headers: Mapping[str, str] | None = None,
        failure: Callable[[ApiError], bytes] = failed_chunk,
        show: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(headers={**_HEADERS, **(headers or {})})
        del self.headers["content-length"]
        self._events = events
        self._failure = failure
        self._show = show
        self._promise = ANSWER.get()
        self._early: asyncio.TimerHandle | None = None
        self._begun: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientGone):
            await while_connected(receive, self._send_events(send))

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await self._first(events, send)
            if first is None:
                await send({"type": "http.response.start", "status": 204, "headers": []})
                await _send_body(send, b"", more=False)
                return
            if self._begun is None:
                await self._begin(send)
            await _send_body(send, first, more=True)
            num_sent = 1
            async for chunk in events:
                await _send_body(send, chunk, more=True)
                num_sent += 1
                if num_sent % _MOST_IN_A_ROW == 0:
                    await asyncio.sleep(0)
            await _send_body(send, b"", more=False)

    async def _first(self, events: AsyncGenerator[bytes, None], send: Send) -> bytes | None:
        """The first event; the status line may go before it."""
        self._wait_early(send)
        try:
            first = await anext(events, None)
            return b"" if first is None and self._begun is not None else first
        except Exception as error:
            if self._begun is None:
                raise
            return self._failure(as_api_error(error))
        finally:
            if self._early is not None:
                self._early.cancel()
            if self._begun is not None:
                await self._begun

    def _wait_early(self, send: Send) -> None:
        self._early = asyncio.get_running_loop().call_later(EARLY_S, self._begin_early, send)

    def _begin_early(self, send: Send) -> None:
        is_promised = self._promise is not None and bool(self._promise.headers())
        if is_promised if self._show is None else self._show():
            self._begun = asyncio.create_task(self._begin(send))
        elif self._show is not None:
            self._wait_early(send)

    async def _begin(self, send: Send) -> None:
        if self._promise is not None:
            self.headers.update(self._promise.headers())
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    """Ignores the exception by which some servers report a disconnected client; it is no failure of ours."""
    try:
        await send({"type": "http.response.body", "body": body, "more_body": more})
    except OSError as error:
        raise ClientGone from error


class ChunkWriter:
    """Writes the server-sent events of one stream; every chunk has the same id.

    Args:
        generation: Chunks of a chat carry a ``delta``, those of a completion a ``text``. With ``include_usage`` they
            have a ``usage`` field: null in all chunks but the last.
        texts: Names the tokens of log probabilities.
        created: Unix seconds; None for now.
    """

    def __init__(self, generation: Generation, texts: TokenTexts, created: int | None = None) -> None:
        chat = self._chat = generation.chat
        self._include_usage = generation.include_usage
        self._generation = generation
        self._texts = texts = texts.named(by_id=generation.names_ids)
        self._parts: list[ChoiceParts] = []  # of each choice, where outputs may hold more than text
        if generation.form is not None:
            choices = range(len(generation.requests))
            self._parts = [
                ChoiceParts(generation.form, generation.response_id, choice, stream=True) for choice in choices
            ]
        self._is_plain = not (generation.continuous_usage or generation.shows_token_ids or self._parts)
        self._used = Used(generation)  # counted only where each chunk says it
        # Choices of completions whose prompt's tokens are not shown yet; a chat's opening shows them.
        self._unnamed = set[int]() if chat else set(range(len(generation.requests)))
        # Echoed prompt by choice, until it is written; in a stream every request is a choice.
        echoes = () if chat else generation.echoes  # a chat's goes with the opening
        self._echoes = dict(enumerate(echo.text for echo in echoes for _ in range(generation.n)))
        self._logprobs: list[CompletionLogprobs] = []
        if generation.shows_logprobs and not chat:
            prompts = (index // generation.n for index in range(len(generation.requests)))
            self._logprobs = [completion_logprobs(generation, prompt, texts) for prompt in prompts]
        self._plain: dict[
            int, tuple[bytes, bytes]
        ] = {}  # By choice: the JSON before and after the text of a usual chunk.
        self._head: dict[str, Any] = {
            "id": generation.response_id,
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": int(time.time()) if created is None else created,
            "model": generation.model,
        }
        if generation.service_tier:
            self._head["service_tier"] = generation.service_tier

    def opening(self) -> bytes:
        """The first chunk of each choice: a chat's names the role, a completion has none."""
        if not self._chat:
            return b""
        role = {"role": "assistant", "content": "".join(echo.text for echo in self._generation.echoes)}
        first, *others = range(len(self._generation.requests))
        prompt: dict[str, Any] = {}
        if self._generation.shows_token_ids:  # a chat's prompt is that of all its choices, as in whole answers
            prompt = {"prompt_token_ids": self._generation.prompts[0].prompt_ids}
        opened = self._chat_event(first, role, None, None, **prompt)
        return opened + b"".join(self._chat_event(index, role, None, None) for index in others)

    def output(self, index: int, delta: TokenDelta) -> bytes:
        """The chunks of one delta: text, the end of a choice, both or none; a chat choice ends with an own chunk."""
        is_usual = bool(delta.text) and delta.finish_reason is None and delta.logprobs is None
        if is_usual and self._is_plain and not self._echoes:
            head, tail = self._plain.get(index) or self._around_text(index)
            return head + encode_basestring(delta.text).encode() + tail
        if self._generation.continuous_usage:
            self._used.add(index, delta)
        text, reason = delta.text, delta.finish_reason
        if self._chat:
            return self._chat_output(index, delta)
        logprobs = None
        if delta.logprobs is not None and self._generation.shows_logprobs:
            logprobs = self._completion_logprobs(index, delta.logprobs)
        if self._echoes:
            text = self._echoes.pop(index, "") + text
        named = self._token_ids(index, delta)
        if not text and reason is None and logprobs is None and not named:
            return b""
        return self._event([{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, **named}])

    def _token_ids(self, index: int, delta: TokenDelta) -> dict[str, list[int]]:
        """Fields of a choice: its new tokens and, in its first chunk, those of its prompt."""
        if not self._generation.shows_token_ids or not delta.num_tokens:
            return {}
        found = {"token_ids": list(delta.token_ids)}
        if index in self._unnamed:
            self._unnamed.discard(index)
            found["prompt_token_ids"] = list(self._generation.prompts[index // self._generation.n].prompt_ids)
        return found

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """The fast path: most chunks differ only in their text, so the JSON around it is encoded once."""
        choice: dict[str, Any] = {"index": index, "text": "", "logprobs": None, "finish_reason": None}
        chunk = self._chat_event(index, {"content": ""}, None, None) if self._chat else self._event([choice])
        head, _, tail = chunk.rpartition(b'""')
        self._plain[index] = head, tail
        return head, tail

    def _chat_output(self, index: int, delta: TokenDelta) -> bytes:
        content = b""
        named: Mapping[str, list[int]] | None = self._token_ids(index, delta)
        shown = delta.logprobs if self._generation.shows_logprobs else None
        logprobs = None if shown is None else chat_logprobs(self._texts, shown.output)
        reason = delta.finish_reason
        if self._parts:
            deltas = self._parts[index].deltas(delta.text, ended=reason is not None)
            reason = self._parts[index].finish_reason(reason)
        else:
            deltas = [{"content": delta.text}] if delta.text else []
        if not deltas and (shown is not None or named):
            deltas = [{"content": ""}]
        for number, each in enumerate(deltas or ([{}] if reason is not None else []), 1):
            content += self._chat_event(index, each, logprobs, reason if number >= len(deltas) else None, named)
            logprobs = named = None  # both belong to the tokens, which the first event stands for
        return content

    def _completion_logprobs(self, index: int, logprobs: DeltaLogprobs) -> dict[str, Any]:
        if index not in self._echoes:
            return self._logprobs[index].add(logprobs.output)
        first = first_prompt_entry(self._generation, index // self._generation.n)
        return self._logprobs[index].add(logprobs.output, [first, *logprobs.prompt])

    def end(self, used: UsageFields) -> bytes:
        told = event({**self._head, "choices": [], "usage": used.model_dump()}) if self._include_usage else b""
        return told + DONE

    def failure(self, error: ApiError) -> bytes:
        return failed_chunk(error)

    def _chat_event(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Any,
        finish_reason: str | None,
        named: Mapping[str, list[int]] | None = None,
        **beside: Any,
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        return self._event([{**choice, **(named or {})}], **beside)

    def _event(self, choices: list[dict[str, Any]], **beside: Any) -> bytes:
        """Writes one chunk; ``beside``: its fields beside its choices."""
        chunk = {**self._head, **beside, "choices": choices}
        if self._generation.continuous_usage:
            chunk["usage"] = usage(self._used).model_dump()
        elif self._include_usage:
            chunk["usage"] = None
        return event(chunk)


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"

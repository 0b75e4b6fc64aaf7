"""Sends requests with aiohttp; a request's answer records its failure."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from farsight.core.errors import FarsightError
from farsight.services.bench.answers import SHOWN_CHARS, Answer, CountedBy, Failure, StreamReader, shown
from farsight.services.bench.targets import PATHS, BenchTarget, BodyForm, Call, Endpoint

READ_BUFFER_BYTES = 1 << 20
LOOKUP_TIMEOUT_S = 30.0


class Client:
    """Sends calls to one server.

    Args:
        session: An open session.
        url: The endpoint.
    """

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def send(self, call: Call, due_at: float | None = None) -> Answer:
        """Sends one call and reads its answer to the end.

        Args:
            due_at: Due time of the call in an open loop.
        """
        now = time.perf_counter()
        answer = Answer(call.id, call.kind, now, late_s=None if due_at is None else max(0.0, now - due_at))
        try:
            async with self._session.post(self._url, data=call.body) as response:
                if response.status == 200:
                    await _read(response, answer, call.output_tokens)
                else:
                    detail = shown(await response.content.read(SHOWN_CHARS))
                    answer.failure = Failure(f"HTTP {response.status}", detail)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            answer.failure = Failure(_kind(error), f"{type(error).__name__}: {error}"[:SHOWN_CHARS])
        answer.ended_at = time.perf_counter()
        if answer.failure is None and call.exact:
            answer.failure = _wrong_length(answer, call)
        return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer, asked_tokens: int) -> None:
    reader = StreamReader(answer)
    if response.content_type == "application/json":  # an answer as a whole, which is like one event
        reader.feed(b"data: " + await response.read(), time.perf_counter())
    else:
        async for data in response.content.iter_any():
            reader.feed(data, time.perf_counter())
    reader.finish(asked_tokens)


def _wrong_length(answer: Answer, call: Call) -> Failure | None:
    """Checks the length by ``usage``: the number of chunks is no proof, since one chunk may hold several tokens."""
    is_guess = answer.counted_by is CountedBy.CHUNKS and answer.num_tokens > 0
    if is_guess or answer.num_tokens == call.output_tokens:
        return None
    return Failure("wrong length", f"{answer.num_tokens} tokens instead of {call.output_tokens}")


def _kind(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "cannot connect"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "stream cut"
    if isinstance(error, aiohttp.ClientError | OSError):
        return "disconnected"
    return "malformed stream"


@asynccontextmanager
async def open_client(target: BenchTarget, form: BodyForm, timeout_s: float, keep_alive: bool) -> AsyncIterator[Client]:
    """A client for one server.

    Args:
        timeout_s: Time limit of a whole request in seconds.
        keep_alive: Reuse connections. A server may close an idle connection just as a request is sent on it; that
        request fails by no fault of the engine, so callers default to one connection per request.
    """
    # No limit on connections: the load alone sets the number of requests in flight.
    connector = aiohttp.TCPConnector(limit=0, force_close=not keep_alive)
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers=target.headers, read_bufsize=READ_BUFFER_BYTES
    ) as session:
        yield Client(session, target.root + PATHS[form.endpoint])


@dataclass(frozen=True, slots=True)
class TargetModel:
    """A model as a server lists it; ``max_model_len`` is 0 where the server does not tell it."""

    name: str
    max_model_len: int


async def find_model(target: BenchTarget) -> TargetModel:
    """Returns the target's model as the server lists it; the first one if the target names none.

    Raises:
        FarsightError: The server lists none, and the target does not name one either.
    """
    url = f"{target.root}/v1/models"
    timeout = aiohttp.ClientTimeout(total=LOOKUP_TIMEOUT_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout, headers=target.headers) as session, session.get(url) as reply:
            reply.raise_for_status()
            listed = (await reply.json(content_type=None))["data"]
            found = next(each for each in listed if target.model in ("", each["id"]))
            length = found.get("max_model_len")
            return TargetModel(str(found["id"]), length if type(length) is int and length > 0 else 0)
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, StopIteration, TimeoutError) as error:
        if target.model:
            return TargetModel(target.model, 0)
        raise FarsightError(f"{url} lists no model ({_reason(error)}); pass --model") from error


async def count_prompt(target: BenchTarget, endpoint: Endpoint, call: Call) -> int:
    """Returns the prompt's tokens as the server counts them in ``usage``; 0 if it does not answer or not tell."""
    body = json.loads(call.body) | {"stream": False}
    body.pop("stream_options", None)
    timeout = aiohttp.ClientTimeout(total=LOOKUP_TIMEOUT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, headers=target.headers) as session,
            session.post(target.root + PATHS[endpoint], json=body) as reply,
        ):
            counted = (await reply.json(content_type=None))["usage"]["prompt_tokens"]
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError, TimeoutError):
        return 0
    return counted if type(counted) is int else 0


def _reason(error: Exception) -> str:
    """Why a server could not be asked, without the library's own objects."""
    if isinstance(error, aiohttp.ClientConnectorError):
        return os.strerror(error.errno) if error.errno else "no connection"
    if isinstance(error, TimeoutError):
        return f"no answer within {LOOKUP_TIMEOUT_S:g} s"
    if isinstance(error, LookupError | TypeError | ValueError | StopIteration):
        return "its answer is no list of models"
    return " ".join(str(error).split())

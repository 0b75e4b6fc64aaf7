"""Runs the requests of one HTTP body and cancels them when the client disconnects."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.types import Receive

from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Fault, Request
from farsight.services.api.backend import Generator
from farsight.services.api.errors import ApiError
from farsight.services.api.generation import ChoiceResult, Generation

_T = TypeVar("_T")
_QUEUED_DELTAS = 64
"""Most deltas buffered for a slow client; beyond this the server stops reading its backend streams."""


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


def run_requests(backend: Generator, generation: Generation) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    """Yields the deltas of all requests as they arrive, each with its request's index. Closing it closes every backend
    stream.

    Raises:
        ApiError: A request failed after its start, or its stream ended without a finish reason.
        Exception: Any error that the backend raised.
    """
    return _run_one(backend, generation, 0) if len(generation.requests) == 1 else _run_several(backend, generation)


async def collect(
    backend: Generator, generation: Generation, saw: Callable[[TokenDelta], None] | None = None
) -> list[ChoiceResult]:
    """Returns the complete outputs, in the order of the requests.

    Args:
        saw: Called with each delta when it comes.
    """
    results = [ChoiceResult() for _ in generation.requests]
    async with aclosing(run_requests(backend, generation)) as deltas:
        async for index, delta in deltas:
            if saw is not None:
                saw(delta)
            results[index].add(delta)
    return results


def _without_output(delta: TokenDelta) -> TokenDelta:
    """Reduces the deltas of a prompt-only request to the finish reason and the facts about the prompt."""
    logprobs = None if delta.logprobs is None else dataclasses.replace(delta.logprobs, output=())
    return dataclasses.replace(delta, token_ids=(), num_unnamed=0, text="", finish_reason="length", logprobs=logprobs)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
    """Returns the result of ``work`` and cancels it as soon as the client disconnects.

    Call it after the body has been read: from then on the only message left from the server is the disconnect.

    Raises:
        ClientGone: The client disconnected first.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel((task, watch))


async def _run_one(
    backend: Generator, generation: Generation, index: int
) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    deltas = backend.stream(generation.requests[index], generation.texts[index // generation.num_tries])
    async with aclosing(deltas) as stream:
        async for delta in stream:
            if delta.finish_reason in ("error", "abort"):
                raise _failed(delta)
            yield index, _without_output(delta) if generation.prompt_only else delta
            if delta.finish_reason is not None:
                return
    raise ApiError("The generation ended early.", status=500, code="internal_error")


async def run_prefill(backend: Generator, request: Request) -> TokenDelta:
    """Returns the one delta of a request that generates nothing.

    Raises:
        ApiError: The request failed after its start, or its stream ended early.
        Exception: Any error that the backend raised.
    """
    async with aclosing(backend.stream(request)) as deltas:
        async for delta in deltas:
            if delta.finish_reason in ("error", "abort"):
                raise _failed(delta)
            if delta.finish_reason is not None:
                return delta
    raise ApiError("The computation ended early.", status=500, code="internal_error")


async def _run_several(backend: Generator, generation: Generation) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    queue: asyncio.Queue[tuple[int, TokenDelta] | Exception | None] = asyncio.Queue(_QUEUED_DELTAS)

    async def pump(index: int) -> None:
        try:
            async with aclosing(_run_one(backend, generation, index)) as deltas:
                async for item in deltas:
                    await queue.put(item)
        except Exception as error:
            await queue.put(error)
        else:
            await queue.put(None)

    pumps = [asyncio.create_task(pump(index)) for index in range(len(generation.requests))]
    try:
        num_open = len(pumps)
        while num_open:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        await _cancel(pumps)


def _failed(delta: TokenDelta) -> ApiError:
    """Returns the error for a failed request; it recommends a retry unless the request caused the failure."""
    reason = delta.error or "the request was aborted by the server"
    message = f"The generation failed: {reason}."
    match delta.fault:
        case Fault.REQUEST:
            return ApiError(message, status=400, code="no_token_possible")
        case Fault.MODEL:
            again = "The request would fail again."
            return ApiError(f"{message} {again}", status=500, code="model_failed")
    again = "The request may be sent again."
    return ApiError(f"{message} {again}", status=503, code="generation_failed")


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancels the tasks and waits until each has cleaned up, even if the caller is cancelled meanwhile."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.exception()  # Retrieve the exception: a failure during cancellation has no other reader.

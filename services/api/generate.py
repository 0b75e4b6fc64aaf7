"""Runs the requests of one HTTP body and cancels them when the client disconnects."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.types import Receive

from core.messages.tokens import TokenDelta, TokenLogprobs
from core.request import Fault, Request
from services.api.backend import Generator
from services.api.errors import INVALID_REQUEST, SERVER_ERROR, ApiError
from services.api.pictures.collecting import check_places, pictures_of
from services.api.pictures.placing import expanded, placed
from services.api.requests import Generation, check_prompt_len, prompt_of_chat, too_long
from services.api.schemas import ChatTurn
from services.api.text.prompts import PromptEncoder

_T = TypeVar("_T")
_QUEUED_DELTAS = 64
"""Most deltas buffered for a slow client; beyond this the server stops reading its backend streams."""


class ClientGone(Exception):
    """The client closed the connection before its answer was complete."""


@dataclass(slots=True)
class ChoiceResult:
    """The output of one request so far.

    Attributes:
        cached_len: Prompt tokens whose KV came from the prefix cache.
        gpu_s: GPU-seconds that it took.
    """

    texts: list[str] = field(default_factory=list)
    num_tokens: int = 0
    finish_reason: str | None = None
    cached_len: int = 0
    gpu_s: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    token_ids: list[int] = field(default_factory=list)

    def add(self, delta: TokenDelta) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.num_tokens += delta.num_tokens
        self.finish_reason = delta.finish_reason
        self.cached_len += first_cached_len(delta)
        self.gpu_s += delta.gpu_s
        if delta.logprobs is not None:
            self.logprobs += delta.logprobs.output
            self.prompt_logprobs += delta.logprobs.prompt

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def likelihood(self) -> float:
        """Mean log probability of a token."""
        return sum(values[0] for _, values in self.logprobs) / max(len(self.logprobs), 1)


def first_cached_len(delta: TokenDelta) -> int:
    """The cached prompt tokens that a delta adds; a resumed attempt adds none, since its first attempt counted them.

    An external server reports them with the last delta, which has no token ids.
    """
    return delta.cached_len if delta.start == 0 or not delta.token_ids else 0


@dataclass(slots=True)
class Used:
    """Output tokens, cached prompt tokens and GPU-seconds of an answer so far."""

    generation: Generation
    num_tokens: int = 0
    num_cached: int = 0
    gpu_s: float = 0.0

    def add(self, index: int, delta: TokenDelta) -> None:
        """Counts an output; a prompt's cached tokens are those of its first try."""
        self.num_tokens += delta.num_tokens
        self.gpu_s += delta.gpu_s
        if delta.cached_len and index % self.generation.num_tries == 0:
            self.num_cached += first_cached_len(delta)


async def run_requests(backend: Generator, generation: Generation) -> AsyncGenerator[tuple[int, TokenDelta], None]:
    """Yields the deltas of all requests as they arrive, each with its request's index. Closing it closes every backend
    stream.

    Raises:
        ApiError: A request failed after its start, or its stream ended without a finish reason.
        Exception: Any error that the backend raised.
    """
    deltas = _run_one(backend, generation, 0) if len(generation.requests) == 1 else _run_several(backend, generation)
    async with aclosing(deltas):
        async for index, delta in deltas:
            yield index, _without_output(delta) if generation.prompt_only else delta


async def collect(backend: Generator, generation: Generation) -> list[ChoiceResult]:
    """The complete outputs, in the order of the requests."""
    results = [ChoiceResult() for _ in generation.requests]
    async with aclosing(run_requests(backend, generation)) as deltas:
        async for index, delta in deltas:
            results[index].add(delta)
    return results


async def with_pictures(backend: Generator, generation: Generation, salt: str) -> Generation:
    """The generation with the images of its prompt, each in as many tokens as it has.

    Args:
        salt: As for ``Generator.see``.

    Raises:
        ApiError, InvalidValueError: A picture that cannot be read, or a prompt that does not fit with it.
        CapacityError: Too many pictures wait.
    """
    image_input = backend.model.image_input
    if not generation.pictures or image_input is None:
        return generation
    images = await backend.see(generation.pictures, salt)
    [prompt] = generation.prompts
    prompt = placed(prompt, images, image_input)
    room = check_prompt_len("messages", prompt.prompt_len, backend.model)
    most = prompt.sampling.max_new_tokens
    if most > room and generation.limit_field:
        why = f"a prompt of {prompt.prompt_len} tokens and the output must fit"
        raise too_long(generation.limit_field, str(most), room, why, backend.model)
    if most > room:
        sampling = dataclasses.replace(prompt.sampling, max_new_tokens=room)
        prompt = dataclasses.replace(prompt, sampling=sampling)
    return dataclasses.replace(generation, prompts=(prompt,), pictures=())


async def prompt_ids_of(body: ChatTurn, backend: Generator, encoder: PromptEncoder, salt: str) -> tuple[int, ...]:
    """The prompt of a conversation. Its pictures are encoded, and kept for the request that will follow.

    Args:
        salt: As for ``Generator.see``.

    Raises:
        ApiError, InvalidValueError, CapacityError: As ``with_pictures``.
    """
    image_input = backend.model.image_input
    rendered = await encoder.render_chat_soon(prompt_of_chat(body, image_input))
    ids = await asyncio.to_thread(encoder.encode_rendered, rendered)
    pictures = pictures_of(message.content for message in body.messages or ())
    if not pictures or image_input is None:
        return ids
    check_places(ids, len(pictures), image_input)
    return expanded(ids, await backend.see(pictures, salt), image_input)[0]


def shown_choices(generation: Generation, results: Sequence[ChoiceResult]) -> list[ChoiceResult]:
    """The ``n`` most likely outputs of each prompt, best first; unsorted if each prompt has only ``n``."""
    tries, n = generation.num_tries, generation.n
    if tries == n:
        return list(results)
    shown = []
    for first in range(0, len(results), tries):
        shown += sorted(results[first : first + tries], key=lambda result: -result.likelihood)[:n]
    return shown


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
            yield index, delta
            if delta.finish_reason is not None:
                return
    raise ApiError("The generation ended early.", status=500, kind=SERVER_ERROR, code="internal_error")


async def run_prefill(backend: Generator, request: Request) -> TokenDelta:
    """The one delta of a request that generates nothing.

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
    raise ApiError("The computation ended early.", status=500, kind=SERVER_ERROR, code="internal_error")


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
    """The error for a failed request; it recommends a retry only if the failure was not caused by the request."""
    reason = delta.error or "the request was aborted by the server"
    message = f"The generation failed: {reason}."
    match delta.fault:
        case Fault.REQUEST:
            return ApiError(message, status=400, kind=INVALID_REQUEST, code="no_token_possible")
        case Fault.MODEL:
            again = "The request would fail again."
            return ApiError(f"{message} {again}", status=500, kind=SERVER_ERROR, code="model_failed")
    again = "The request may be sent again."
    return ApiError(f"{message} {again}", status=503, kind=SERVER_ERROR, code="generation_failed")


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

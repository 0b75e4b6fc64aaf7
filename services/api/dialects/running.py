"""Runs the chat that a request of another API has become."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response

from farsight.services.api.access.metered import served_as
from farsight.services.api.access.presented import own_salt, owner_of, salt_of, sent_key
from farsight.services.api.answers.replies import UsageFields, usage_of
from farsight.services.api.answers.served import ANSWER, AnswerPromise, served, traced
from farsight.services.api.answers.sse import EventStream, StreamWriter, chunks
from farsight.services.api.backend import Generator
from farsight.services.api.bodies import body_error
from farsight.services.api.generate import collect, while_connected
from farsight.services.api.generation import ChoiceResult, Generation
from farsight.services.api.requests import generation_of, prompt_ids_of, with_pictures
from farsight.services.api.schemas import ChatCompletionRequest
from farsight.services.api.text.prompts import PromptEncoder


class AnswerWriter(StreamWriter, Protocol):
    """Writes one answer in the form of one API, as the events of a stream or as a whole."""

    def reply(self, result: ChoiceResult, used: UsageFields) -> dict[str, Any]:
        """Returns the whole answer."""
        ...


@dataclass(frozen=True, slots=True)
class Running:
    """What every answer needs.

    Attributes:
        shares_across_keys: Whether requests of different keys share cached prefixes.
    """

    backend: Generator
    encoder: PromptEncoder
    shares_across_keys: bool

    async def begin(self, chat: ChatCompletionRequest, request: Request, id_prefix: str) -> Generation:
        """The chat as it will run, under a new id; from here on the answer has a promise."""
        generation = await generation_of(chat, self.backend.model, self.encoder)
        generation = await seeing(generation, request, self.backend, self.shares_across_keys)
        named = named_for(dataclasses.replace(generation, id_prefix=id_prefix), request, self.shares_across_keys)
        ANSWER.set(AnswerPromise(len(named.requests)))
        return named

    async def answer(
        self,
        request: Request,
        generation: Generation,
        writer: AnswerWriter,
        keep: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
    ) -> Response:
        """The answer, as a stream or as a whole.

        Args:
            keep: Stores a whole answer before it is sent.

        Raises:
            ClientGone: The client has disconnected.
        """
        if generation.stream:
            return EventStream(chunks(self.backend, generation, writer), failure=writer.failure)
        results = await while_connected(request.receive, collect(self.backend, generation))
        headers = MutableHeaders()
        promise = ANSWER.get()
        if promise is not None:
            headers.update(promise.headers())
        whole = writer.reply(results[0], usage_of(generation, results))
        if keep is not None:
            await keep(whole)
        return JSONResponse(whole, headers=dict(headers))

    async def prompt_ids(self, chat: ChatCompletionRequest, request: Request) -> tuple[int, ...]:
        """As ``prompt_ids_of``.

        Raises:
            ClientGone: The client has disconnected.
        """
        salt = own_salt(request.headers, chat.cache_salt or "", self.shares_across_keys)
        work = prompt_ids_of(chat, self.backend, self.encoder, salt)
        return await while_connected(request.receive, work)


async def seeing(generation: Generation, request: Request, backend: Generator, shares_across_keys: bool) -> Generation:
    """With the images of its pictures, unless the client leaves meanwhile.

    Raises:
        ClientGone: It has left.
        ApiError, InvalidValueError, CapacityError: As ``with_pictures``.
    """
    if not generation.pictures:
        return generation
    salt = own_salt(request.headers, generation.prompts[0].cache_salt, shares_across_keys)
    return await while_connected(request.receive, with_pictures(backend, generation, salt))


def named_for(generation: Generation, request: Request, shares_across_keys: bool) -> Generation:
    """Sets the id of the answer, its owner, and the cache salt that decides which requests share prefixes with it."""
    key = sent_key(request.headers)
    salt = str if shares_across_keys else functools.partial(salt_of, key)
    named = generation.named(owner_of(key), salt)
    served(named.response_id)
    return traced(served_as(named))


def as_chat(fields: Callable[[], ChatCompletionRequest]) -> ChatCompletionRequest:
    """The chat, or what of it is wrong as an error of the request."""
    try:
        return fields()
    except ValidationError as error:
        raise body_error(error) from error

"""Runs completions and chats, and the chats that requests of other APIs have become."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import Request
from pydantic import ValidationError
from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse, Response

from farsight.core.messages.tokens import TokenDelta
from farsight.services.api.access.keys import CURRENT, own_salt, owner_of, salt_of, sent_key
from farsight.services.api.answers.replies import UsageFields, usage_of
from farsight.services.api.answers.served import ANSWER, AnswerPromise, served, traced
from farsight.services.api.answers.sse import EventStream, StreamWriter, chunks
from farsight.services.api.backend import Generator
from farsight.services.api.bodies import body_error
from farsight.services.api.errors import ApiError
from farsight.services.api.field_groups import PRIORITY_TIER
from farsight.services.api.fields import MAX_APPLICATION_CHARS, checked_session, shown
from farsight.services.api.generate import collect, while_connected
from farsight.services.api.generation import ChoiceResult, Generation
from farsight.services.api.requests import generation_of, prompt_ids_of, with_pictures
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.api.text.prompts import PromptEncoder

SESSION_HEADER, APPLICATION_HEADER = "x-session-id", "x-farsight-application"
"""The conversation that a request is a turn of, and the program that sends it."""

READING_RATE_HEADER = "x-farsight-reading-rate"
"""Tokens a second at which the reader of a stream takes it in."""


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

    async def read(self, body: CompletionRequest | ChatCompletionRequest) -> Generation:
        """As ``generation_of``."""
        return await generation_of(body, self.backend.model, self.encoder)

    async def begin(
        self,
        generation: Generation,
        request: Request,
        id_prefix: str = "",
        response_id: str = "",
        continues: str = "",
    ) -> Generation:
        """The generation as it will run: with its images, and under the id of its answer, which has a promise now.

        Args:
            response_id: The id, where it is known already; empty for a new one.
            continues: As in ``Request``.

        Raises:
            ClientGone: The client has left while its pictures were read.
            ApiError, InvalidValueError, CapacityError: As ``with_pictures``, or a header that says no reading rate.
        """
        key = sent_key(request.headers)
        if generation.pictures:
            salt = own_salt(request.headers, generation.prompts[0].cache_salt, self.shares_across_keys)
            generation = await while_connected(request.receive, with_pictures(self.backend, generation, salt))
        salted = str if self.shares_across_keys else functools.partial(salt_of, key)
        rate = _reading_rate(generation, request.headers.get(READING_RATE_HEADER))
        texts = tuple(text and text.sent_by(key) for text in generation.texts)
        headers = request.headers
        session = checked_session(SESSION_HEADER, headers.get(SESSION_HEADER, ""))
        application = headers.get(APPLICATION_HEADER) or headers.get("user-agent", "").partition("/")[0]
        application = application[:MAX_APPLICATION_CHARS]
        told = {"application": application, "continues": continues}
        prompts = tuple(
            dataclasses.replace(each, session=session or each.session, **told) for each in generation.prompts
        )
        generation = dataclasses.replace(generation, id_prefix=id_prefix, texts=texts, prompts=prompts)
        named = generation.named(owner_of(key), salted, rate, response_id)
        served(named.response_id)
        ANSWER.set(AnswerPromise(len(named.requests)))
        return traced(_served_as(named))

    async def answer(
        self,
        request: Request,
        generation: Generation,
        writer: AnswerWriter,
        keep: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
        *,
        saw: Callable[[TokenDelta], None] | None = None,
        stream: type[EventStream] = EventStream,
    ) -> Response:
        """The answer, as a stream or as a whole.

        Args:
            keep: Stores a whole answer before it is sent.
            saw: Called with each delta of a whole answer when it comes.
            stream: How a stream is sent.

        Raises:
            ClientGone: The client has disconnected.
        """
        if generation.stream:
            return stream(chunks(self.backend, generation, writer), failure=writer.failure)
        results = await while_connected(request.receive, collect(self.backend, generation, saw))
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


def _reading_rate(generation: Generation, header: str | None) -> float | None:
    """Returns ``Request.reading_rate``: a program acts on a whole call, so that no one reads a forced one."""
    if not generation.stream or (generation.form is not None and generation.form.forced):
        return None
    if header is None:
        return 0.0
    try:
        rate = float(header)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        expected = "tokens a second above 0"
        message = f"{READING_RATE_HEADER}: got {shown(header)!r}, expected {expected}"
        raise ApiError(message, param=READING_RATE_HEADER, code="invalid_value")
    return rate


def _served_as(generation: Generation) -> Generation:
    """With the tier that the caller's tenant gets: one that may not go first is served as the others."""
    caller = CURRENT.get()
    if caller is None or generation.service_tier != "priority" or caller.tenant.priority(PRIORITY_TIER) < 0:
        return generation
    return dataclasses.replace(generation, service_tier="default")


def as_chat(fields: Callable[[], ChatCompletionRequest]) -> ChatCompletionRequest:
    """The chat, or what of it is wrong as an error of the request."""
    try:
        return fields()
    except ValidationError as error:
        raise body_error(error) from error

"""From the texts of a body to vectors: the requests that compute them, and what is made of their answers."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from farsight.core.errors import InvalidValueError
from farsight.core.request import Origin, Request, SamplingParams, check_token_ids
from farsight.services.api.backend import Generator, ModelInfo
from farsight.services.api.errors import ApiError
from farsight.services.api.generate import run_prefill
from farsight.services.api.requests import check_encoded, check_model, check_text_len, too_long, unnamed_request
from farsight.services.api.text.prompts import ChatEnd, ChatPrompt, PromptEncoder
from farsight.services.api.vectors.schemas import EmbeddingRequest, PrefillFields

MAX_IN_FLIGHT = 32
"""Requests of one body that run at once: one body of many texts must not fill the service for others."""

Floats = np.ndarray


@dataclass(frozen=True, slots=True)
class Vectors:
    """
    Attributes:
        rows: float32, one each.
        prompt_tokens, gpu_s: Sums.
    """

    rows: list[Floats]
    prompt_tokens: int
    gpu_s: float


def embedding_requests(body: EmbeddingRequest, model: ModelInfo, encoder: PromptEncoder) -> list[Request]:
    """Makes the requests; raises ApiError or InvalidValueError, which names the input, if the model cannot take it."""
    check_embeds(body.model, model)
    most = model.abilities.dim
    if body.dimensions is not None and body.dimensions > most:
        raise InvalidValueError("dimensions", body.dimensions, f"at most {most}, the length of the model's embeddings")
    special = body.add_special_tokens is not False
    return text_requests(body.inputs, body, model, encoder, special=special)


def text_requests(
    texts: Sequence[tuple[str, str | list[int]]],
    body: PrefillFields,
    model: ModelInfo,
    encoder: PromptEncoder,
    *,
    special: bool = True,
) -> list[Request]:
    """Requests for the embeddings of texts, each with the name of its field."""
    check_embeds(body.model, model)
    found = [_ids(field, text, body, model, encoder, special=special) for field, text in texts]
    return [_request(ids, model.abilities.pooling, body, model) for ids in found]


def pair_requests(
    pairs: Sequence[tuple[str, str]], field: str, body: PrefillFields, model: ModelInfo, encoder: PromptEncoder
) -> list[Request]:
    """Requests for the scores of pairs by a model that reads both texts at once.

    Raises:
        ApiError, InvalidValueError: The model has another kind of classifier, or cannot take a pair; names it.
    """
    check_model(body.model, model)
    if model.abilities.num_labels != 1:
        message = f"model: {model.name!r} tells {model.abilities.num_labels} classes apart, expected one score"
        raise ApiError(message, param="model", code="model_cannot_score")
    found = []
    for index, (first, second) in enumerate(pairs):
        name = f"{field}[{index}]"
        check_text_len(name, first + second, model, encoder)
        ids, second_at = _pair(first, second, model, encoder)
        check_encoded(name, ids, model)
        ids = _fitting(name, ids, body, model)
        found.append(_request(ids, "score", body, model, second_at=min(second_at, len(ids))))
    return found


def _pair(first: str, second: str, model: ModelInfo, encoder: PromptEncoder) -> tuple[tuple[int, ...], int]:
    """Returns the token ids of two texts, and where the second begins: 0 for a decoder, whose template knows roles."""
    abilities = model.abilities
    if not abilities.score_ids:
        return encoder.encode_pair(first, second)
    told = [{"role": "system", "content": abilities.instruction}] if abilities.instruction else []
    pair = [{"role": "query", "content": first}, {"role": "document", "content": second}]
    end = ChatEnd.NEW_TURN if abilities.begins_turn else ChatEnd.AFTER_MESSAGES
    return encoder.encode_rendered(encoder.render_chat(ChatPrompt([*told, *pair], end))), 0


def check_embeds(name: str | None, model: ModelInfo) -> None:
    """Raises ApiError: 404 if another model is served here, 400 if it makes no embeddings."""
    check_model(name, model)
    if not model.abilities.pooling:
        message = (
            f"model: {model.name!r} makes no embeddings here; it serves {model.abilities.offers or 'nothing else'}"
        )
        raise ApiError(message, param="model", code="model_cannot_embed")


def _ids(
    field: str, text: str | list[int], body: PrefillFields, model: ModelInfo, encoder: PromptEncoder, *, special: bool
) -> tuple[int, ...]:
    if not isinstance(text, str):
        check_token_ids(field, text, model.vocab_size)
        return _fitting(field, tuple(text), body, model)
    if body.truncate_prompt_tokens is None:
        check_text_len(field, text, model, encoder)
    ids = encoder.encode_prompt(text, add_special_tokens=special).ids
    check_encoded(field, ids, model)
    return _fitting(field, ids, body, model)


def _fitting(field: str, ids: tuple[int, ...], body: PrefillFields, model: ModelInfo) -> tuple[int, ...]:
    # The context of a request has one more token, which nothing computes.
    most, asked = model.max_model_len - 1, body.truncate_prompt_tokens
    if asked is not None:
        ids = ids[: most if asked < 0 else asked]
    if not ids:
        raise ApiError(f"{field}: got no tokens, expected at least one", param=field, code="invalid_value")
    if len(ids) > most:
        raise too_long(field, f"{len(ids)} tokens", most, "truncate_prompt_tokens shortens it to what fits", model)
    return ids


def _request(
    ids: tuple[int, ...], pooling: str, body: PrefillFields, model: ModelInfo, *, second_at: int = 0
) -> Request:
    score_ids = model.abilities.score_ids if pooling == "score" else ()
    sampling = SamplingParams(1, pooling=pooling, second_at=second_at, allowed_token_ids=score_ids)
    targets = {"priority": body.request_priority, "deadline_s": body.deadline_s, "slo": body.request_slo}
    return unnamed_request(ids, sampling, model_version=model.version, **targets)


async def compute(
    backend: Generator, requests: Sequence[Request], origin: Callable[[int], Origin], salt: str
) -> Vectors:
    """The vectors of the requests, in their order; if one fails, the others are cancelled.

    Raises:
        ApiError, FarsightError: As ``run_prefill``.
    """
    room = asyncio.Semaphore(MAX_IN_FLIGHT)
    rows: list[Floats | None] = [None] * len(requests)
    gpu_s = 0.0

    async def run(index: int, request: Request) -> None:
        nonlocal gpu_s
        async with room:
            delta = await run_prefill(
                backend, dataclasses.replace(request, origin=origin(index), cache_salt=salt + request.cache_salt)
            )
        gpu_s += delta.gpu_s
        rows[index] = np.frombuffer(delta.vector, "<f4")

    try:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                group.create_task(run(index, request))
    except ExceptionGroup as several:
        raise several.exceptions[0] from several
    return Vectors([row for row in rows if row is not None], sum(each.prompt_len for each in requests), gpu_s)


def shortened(row: Floats, dimensions: int | None, *, normalizes: bool) -> Floats:
    """The first ``dimensions`` numbers of a row, at length 1 where the model's embeddings have it."""
    kept = row if dimensions is None else row[:dimensions]
    if not normalizes:
        return kept
    length = float(np.linalg.norm(kept))
    return kept / np.float32(length) if length > 0 else kept


def cosine(one: Floats, other: Floats) -> float:
    """0 where one of them has no length."""
    lengths = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float(one @ other) / lengths if lengths else 0.0


def logistic(logit: float) -> float:
    """``1 / (1 + exp(-logit))``, whatever its size."""
    return float(0.5 * (1.0 + np.tanh(0.5 * logit)))

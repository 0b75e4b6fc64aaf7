"""Turns a checked HTTP body into requests of the backend: token ids and sampling parameters within the limits."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from core.errors import InvalidValueError
from core.request import Origin, Request, SamplingParams, check_token_ids
from services.api.backend import ModelInfo
from services.api.errors import ApiError
from services.api.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from services.api.text.echo import Echo
from services.api.text.prompts import PromptEncoder, PromptText, of_chat, of_completion

DEFAULT_MAX_TOKENS = 16
_THREAD_FROM_CHARS = 16_384
"""Characters; a text of this length or more is tokenised in a thread, so that it does not delay other streams."""

_MESSAGE_SIZE = 32
"""Characters whose tokenisation takes as long as the chat template takes for one field of a message."""

_T = TypeVar("_T")
_R = TypeVar("_R")


@dataclass(frozen=True, slots=True)
class Generation:
    """The requests of one HTTP body, and which results the client gets.

    Attributes:
        requests: ``num_tries`` of the first prompt, then those of the second, and so on.
        texts: The prompts as text, one for each; None where a prompt came as token ids.
        n: Choices returned for each prompt: the most likely of its outputs.
        shows_logprobs: Whether the client gets log probabilities; they are also computed to rank ``best_of`` outputs.
        echoes: The text put before the outputs of each prompt; empty without ``echo``.
        prompt_only: The client asked for 0 tokens; the one token that every request yields is not returned.
        response_id: The id of the client's answer.
    """

    requests: list[Request]
    texts: list[PromptText | None]
    n: int = 1
    shows_logprobs: bool = False
    echoes: tuple[Echo, ...] = ()
    prompt_only: bool = False
    response_id: str = ""

    @property
    def num_tries(self) -> int:
        return len(self.requests) // len(self.texts)

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once whatever its number of choices."""
        return sum(request.prompt_len for request in self.requests[:: self.num_tries])

    def named(self, response_id: str, owner: bytes, salt: Callable[[str], str]) -> Generation:
        """The same requests under the id of the client's answer.

        Args:
            owner: As ``Origin.owner``.
            salt: From a request's own cache salt to the one that it is run with.
        """
        named = [
            dataclasses.replace(request, origin=Origin(response_id, choice, owner), cache_salt=salt(request.cache_salt))
            for choice, request in enumerate(self.requests)
        ]
        return dataclasses.replace(self, requests=named, response_id=response_id)


@dataclass(frozen=True, slots=True)
class _Limit:
    """An upper bound on output tokens, and the name of the field that holds it."""

    field: str
    max_new_tokens: int


async def completion_requests(body: CompletionRequest, model: ModelInfo, encoder: PromptEncoder) -> Generation:
    """``best_of`` requests, or else ``n``, for each prompt.

    Raises:
        ApiError, InvalidValueError: A prompt or a parameter that this model cannot take.
    """
    check_model(body.model, model)
    limit = None if body.max_tokens is None else _Limit("max_tokens", max(body.max_tokens, 1))
    # Ranking the outputs by likelihood needs their log probabilities.
    logprobs = 0 if body.logprobs is None and body.num_tries > (body.n or 1) else body.logprobs
    requests: list[Request] = []
    texts: list[PromptText | None] = []
    echoes = []
    for field, prompt in body.prompts:
        if isinstance(prompt, str):
            encode = partial(encoder.encode_prompt, parse_special=bool(body.parse_special))
            encoded = await _run(encode, prompt, len(prompt))
            prompt_ids = encoded.ids
            _check_encoded(field, prompt_ids, model)
        else:
            encoded = None
            prompt_ids = tuple(prompt)
            check_token_ids(field, prompt_ids, model.vocab_size)
        room = _check_prompt_len(field, len(prompt_ids), model)
        texts.append(of_completion(prompt, body.instruction) if isinstance(prompt, str) else None)
        request = _request(body, prompt_ids, limit, min(DEFAULT_MAX_TOKENS, room), model)
        requests += _tries(request, body.num_tries, logprobs, bool(body.echo and body.logprobs is not None))
        if body.echo:
            if isinstance(prompt, str):
                offsets = encoded.offsets() if encoded is not None and body.logprobs is not None else ()
                echoes.append(Echo(prompt, offsets))
            else:
                echoes.append(await _run(encoder.echo, prompt_ids, len(prompt_ids)))
    return Generation(
        requests=requests,
        texts=texts,
        n=body.n or 1,
        shows_logprobs=body.logprobs is not None,
        echoes=tuple(echoes),
        prompt_only=body.max_tokens == 0,
    )


async def chat_requests(body: ChatCompletionRequest, model: ModelInfo, encoder: PromptEncoder) -> Generation:
    """``n`` requests of one conversation.

    Raises:
        ApiError, InvalidValueError: Messages or a parameter that this model cannot take.
    """
    check_model(body.model, model)
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    size = sum(_MESSAGE_SIZE + len(text) for message in messages for text in message.values())
    prompt_ids = await _run(encoder.encode_chat, messages, size)
    _check_encoded("messages", prompt_ids, model)
    room = _check_prompt_len("messages", len(prompt_ids), model)
    limit = None
    if body.max_completion_tokens is not None:
        limit = _Limit("max_completion_tokens", body.max_completion_tokens)
    elif body.max_tokens is not None:
        limit = _Limit("max_tokens", body.max_tokens)
    logprobs = body.num_top_logprobs
    requests = _tries(_request(body, prompt_ids, limit, room, model), body.n or 1, logprobs, False)
    return Generation(requests, [of_chat(messages)], n=len(requests), shows_logprobs=logprobs is not None)


def _tries(request: Request, count: int, logprobs: int | None, prompt_logprobs: bool) -> list[Request]:
    """Repeats the request, each copy with the next seed, so that a choice does not depend on the number of choices."""
    if count == 1 and logprobs is None:
        return [request]
    first = dataclasses.replace(request.sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    each = [dataclasses.replace(first, seed=(first.seed + i) % 2**64) for i in range(count)]
    return [dataclasses.replace(request, sampling=sampling) for sampling in each]


def check_model(name: str, model: ModelInfo) -> None:
    """
    Raises:
        ApiError: 404: another model is served here.
    """
    if name != model.name:
        message = f"model: got {name!r}, expected {model.name!r}, the one model that is served here"
        raise ApiError(message, status=404, param="model", code="model_not_found")


async def _run(function: Callable[[_T], _R], value: _T, size: int) -> _R:
    """Tokenises or decodes in a thread if the input is long.

    Args:
        size: Length of the input, in characters or tokens.
    """
    if size < _THREAD_FROM_CHARS:
        return function(value)
    return await asyncio.to_thread(function, value)


def _check_encoded(field: str, prompt_ids: tuple[int, ...], model: ModelInfo) -> None:
    """Refuses tokens beyond the vocabulary: a tokenizer may have added tokens that the model cannot embed."""
    highest = max(prompt_ids, default=0)
    if highest >= model.vocab_size:
        expected = f"text without tokens beyond the model's vocabulary of {model.vocab_size}"
        raise InvalidValueError(field, f"text with token {highest}", expected)


def _check_prompt_len(field: str, prompt_len: int, model: ModelInfo) -> int:
    """The number of output tokens that fit after the prompt."""
    if prompt_len == 0:
        raise ApiError(f"{field}: got no tokens, expected at least one", param=field, code="invalid_value")
    room = model.max_model_len - prompt_len
    if room < 1:
        raise _too_long(field, f"{prompt_len} tokens", model.max_model_len - 1, "one more must fit", model)
    return room


def _too_long(field: str, found: str, limit: int, why: str, model: ModelInfo) -> ApiError:
    bound = f"the context of {model.max_model_len} tokens"
    if model.pool_limited:
        bound = f"the KV pool's {model.max_model_len} tokens; --kv-memory raises it"
    message = f"{field}: got {found}, expected at most {limit} ({why} into {bound})"
    return ApiError(message, param=field, code="context_length_exceeded")


def unnamed_request(prompt_ids: tuple[int, ...], sampling: SamplingParams, **fields: Any) -> Request:
    """A request that no backend has named yet.

    Args:
        fields: Further fields of ``Request``.
    """
    return Request("", 0, "", prompt_ids, sampling, **fields)


def _request(
    body: SamplingFields, prompt_ids: tuple[int, ...], limit: _Limit | None, default: int, model: ModelInfo
) -> Request:
    """A request without a name; the backend gives it one."""
    room = model.max_model_len - len(prompt_ids)
    if limit is not None and limit.max_new_tokens > room:
        why = f"a prompt of {len(prompt_ids)} tokens and the output must fit"
        raise _too_long(limit.field, str(limit.max_new_tokens), room, why, model)
    sampling = _sampling(body, default if limit is None else limit.max_new_tokens, model)
    return unnamed_request(prompt_ids, sampling, priority=body.priority or 0, cache_salt=body.cache_salt or "")


def _sampling(body: SamplingFields, max_new_tokens: int, model: ModelInfo) -> SamplingParams:
    """The sampling parameters of a prompt: all prompts share the client's seed; without one each draws its own."""
    if body.benchmark_len is not None and not model.benchmark_mode:
        only = "null: it is for benchmarks, and taken by `farsight serve --benchmark-mode` alone"
        raise InvalidValueError("benchmark_len", body.benchmark_len, only)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=min(max(body.top_k or 0, 0), model.vocab_size),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        stop=body.stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        min_p=_given(body.min_p, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=body.logit_bias,
        min_tokens=body.min_tokens or 0,
        benchmark_len=body.benchmark_len,
    )
    sampling.check_vocabulary(model.vocab_size)
    return sampling


def _given(value: float | None, default: float) -> float:
    return default if value is None else value

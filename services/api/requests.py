"""Turns a checked HTTP body into requests of the backend: token ids and sampling parameters within the limits."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.errors import InvalidValueError
from core.request import Origin, Request, SamplingParams, check_token_ids
from services.api.backend import ModelInfo
from services.api.errors import ApiError
from services.api.fields import shown
from services.api.schemas import ChatCompletionRequest, CompletionRequest, SamplingFields
from services.api.text.echo import Echo
from services.api.text.grammars import grammar_of
from services.api.text.prompts import PromptEncoder, PromptText, of_chat, of_completion

DEFAULT_MAX_TOKENS = 16
_THREAD_FROM_CHARS = 16_384
"""Characters; a text of this length or more is tokenised in a thread, so that it does not delay other streams."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What one HTTP body asks for: its requests, and which results the client gets in which form.

    Attributes:
        prompts: A request for each prompt, without a name; ``named`` makes ``num_tries`` of each.
        texts: The prompts as text; None where a prompt came as token ids.
        model: As the client names it.
        chat: Whether this is a chat, and not a completion.
        num_tries: Outputs run for each prompt.
        n: Choices returned for each prompt: the most likely of its outputs.
        stream, include_usage: Whether the answer is a stream, and whether that says its usage.
        shows_logprobs: Whether the client gets log probabilities; they are also computed to rank ``best_of`` outputs.
        echoes: The text put before the outputs of each prompt; empty without ``echo``.
        prompt_only: The client asked for 0 tokens; the one token that every request yields is not returned.
        response_id: The id of the client's answer.
        requests: ``num_tries`` of the first prompt, then those of the second, and so on; empty before ``named``.
    """

    prompts: tuple[Request, ...]
    texts: tuple[PromptText | None, ...]
    model: str
    chat: bool
    num_tries: int = 1
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    shows_logprobs: bool = False
    echoes: tuple[Echo, ...] = ()
    prompt_only: bool = False
    response_id: str = ""
    requests: tuple[Request, ...] = ()

    @property
    def num_prompt_tokens(self) -> int:
        """Prompt tokens, each prompt counted once whatever its number of choices."""
        return sum(request.prompt_len for request in self.prompts)

    def without_prompts(self) -> Generation:
        """For the wire: prompts go apart from it."""
        return dataclasses.replace(self, prompts=())

    def with_prompts(self, prompts: tuple[Request, ...]) -> Generation:
        return dataclasses.replace(self, prompts=prompts)

    def named(self, owner: bytes, salt: Callable[[str], str]) -> Generation:
        """With the requests that run, under a new id of the client's answer.

        Each try of a prompt has the next seed, so that a choice does not depend on the number of choices.

        Args:
            owner: As ``Origin.owner``.
            salt: From a request's own cache salt to the one that it is run with.
        """
        response_id = f"{'chatcmpl' if self.chat else 'cmpl'}-{uuid.uuid4().hex}"
        tries = [(prompt, number) for prompt in self.prompts for number in range(self.num_tries)]
        requests = tuple(
            dataclasses.replace(
                prompt,
                sampling=_with_next_seed(prompt.sampling, number),
                origin=Origin(response_id, choice, owner),
                cache_salt=salt(prompt.cache_salt),
            )
            for choice, (prompt, number) in enumerate(tries)
        )
        return dataclasses.replace(self, requests=requests, response_id=response_id)


def _with_next_seed(sampling: SamplingParams, number: int) -> SamplingParams:
    return dataclasses.replace(sampling, seed=(sampling.seed + number) % 2**64) if number else sampling


@dataclass(frozen=True, slots=True)
class _Limit:
    """An upper bound on output tokens, and the name of the field that holds it."""

    field: str
    max_new_tokens: int


async def generation_of(
    body: CompletionRequest | ChatCompletionRequest, model: ModelInfo, encoder: PromptEncoder
) -> Generation:
    """What a checked body asks for; a chat is rendered, a long text tokenised and a grammar tried in a
    thread.

    Raises:
        ApiError, InvalidValueError: A prompt, messages or a parameter that this model cannot take.
        CapacityError: Too many chats wait for the template.
    """
    if isinstance(body, ChatCompletionRequest):
        check_model(body.model, model)
        text = await encoder.render_chat_soon(_messages(body))
        if len(text) < _THREAD_FROM_CHARS and body.constraint is None:
            return _of_chat(body, text, model, encoder)
        return await asyncio.to_thread(_of_chat, body, text, model, encoder)
    if _size(body) < _THREAD_FROM_CHARS and body.constraint is None:
        return make_generation(body, model, encoder)
    return await asyncio.to_thread(make_generation, body, model, encoder)


def _size(body: CompletionRequest) -> int:
    """Length of the prompts, in characters or tokens."""
    return sum(len(prompt) for _, prompt in body.prompts)


def make_generation(
    body: CompletionRequest | ChatCompletionRequest, model: ModelInfo, encoder: PromptEncoder
) -> Generation:
    """As ``generation_of``, in this thread."""
    check_model(body.model, model)
    if isinstance(body, CompletionRequest):
        return _of_completion(body, model, encoder)
    return _of_chat(body, encoder.render_chat(_messages(body)), model, encoder)


def _of_completion(body: CompletionRequest, model: ModelInfo, encoder: PromptEncoder) -> Generation:
    limit = None if body.max_tokens is None else _Limit("max_tokens", max(body.max_tokens, 1))
    # Ranking the outputs by likelihood needs their log probabilities.
    logprobs = 0 if body.logprobs is None and body.num_tries > (body.n or 1) else body.logprobs
    scores_prompt = bool(body.echo and body.logprobs is not None)
    requests: list[Request] = []
    texts: list[PromptText | None] = []
    echoes: list[Echo] = []
    for field, prompt in body.prompts:
        if isinstance(prompt, str):
            _check_text_len(field, prompt, model, encoder)
            encoded = encoder.encode_prompt(prompt, parse_special=bool(body.parse_special))
            prompt_ids = encoded.ids
            _check_encoded(field, prompt_ids, model)
            texts.append(of_completion(prompt, body.instruction))
        else:
            encoded = None
            prompt_ids = tuple(prompt)
            check_token_ids(field, prompt_ids, model.vocab_size)
            texts.append(None)
        room = _check_prompt_len(field, len(prompt_ids), model)
        request = _request(body, prompt_ids, limit, min(DEFAULT_MAX_TOKENS, room), model)
        requests.append(_scored(request, logprobs, scores_prompt))
        if body.echo and isinstance(prompt, str):
            echoes.append(Echo(prompt, encoded.offsets() if encoded is not None and scores_prompt else ()))
        elif body.echo:
            echoes.append(encoder.echo(prompt_ids))
    return Generation(
        prompts=tuple(requests),
        texts=tuple(texts),
        model=body.model,
        chat=False,
        num_tries=body.num_tries,
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        shows_logprobs=body.logprobs is not None,
        echoes=tuple(echoes),
        prompt_only=body.max_tokens == 0,
    )


def _messages(body: ChatCompletionRequest) -> list[dict[str, str]]:
    return [message.model_dump(exclude_none=True) for message in body.messages]


def _of_chat(body: ChatCompletionRequest, text: str, model: ModelInfo, encoder: PromptEncoder) -> Generation:
    _check_text_len("messages", text, model, encoder)
    prompt_ids = encoder.encode_rendered(text)
    _check_encoded("messages", prompt_ids, model)
    room = _check_prompt_len("messages", len(prompt_ids), model)
    limit = None
    if body.max_completion_tokens is not None:
        limit = _Limit("max_completion_tokens", body.max_completion_tokens)
    elif body.max_tokens is not None:
        limit = _Limit("max_tokens", body.max_tokens)
    logprobs, num_tries = body.num_top_logprobs, body.n or 1
    return Generation(
        prompts=(_scored(_request(body, prompt_ids, limit, room, model), logprobs, False),),
        texts=(of_chat(_messages(body)),),
        model=body.model,
        chat=True,
        num_tries=num_tries,
        n=num_tries,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        shows_logprobs=logprobs is not None,
    )


def _scored(request: Request, logprobs: int | None, prompt_logprobs: bool) -> Request:
    if logprobs is None:
        return request
    sampling = dataclasses.replace(request.sampling, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    return dataclasses.replace(request, sampling=sampling)


def check_model(name: str, model: ModelInfo) -> None:
    """
    Raises:
        ApiError: 404: another model is served here.
    """
    if name != model.name:
        message = f"model: got {shown(name)!r}, expected {model.name!r}, the one model that is served here"
        raise ApiError(message, status=404, param="model", code="model_not_found")


def _check_text_len(field: str, text: str, model: ModelInfo, encoder: PromptEncoder) -> None:
    """Refuses a text that cannot fit, however its tokens fall, before it is tokenised."""
    least = encoder.least_tokens(text, model.max_model_len)
    if least >= model.max_model_len:
        found = f"{len(text)} characters, which are {least} tokens or more"
        raise _too_long(field, found, model.max_model_len - 1, "one more must fit", model)


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
    fields = {"priority": body.priority or 0, "cache_salt": _salt(body), "model_version": model.version}
    return unnamed_request(prompt_ids, sampling, **fields)


def _salt(body: SamplingFields) -> str:
    """Only requests of one tenant that name the same salt and the same key share prefixes."""
    salt = body.cache_salt or ""
    return salt if body.prompt_cache_key is None else f"{salt}\0{body.prompt_cache_key}"


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
        grammar=_grammar(body, model),
    )
    sampling.check_vocabulary(model.vocab_size)
    return sampling


def _grammar(body: SamplingFields, model: ModelInfo) -> str:
    constraint = body.constraint
    if constraint is None:
        return ""
    if model.emulated:
        expected = "null: an emulated device makes its tokens up, so they follow nothing"
        raise InvalidValueError(constraint.field, constraint.kind, expected)
    return grammar_of(constraint)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value

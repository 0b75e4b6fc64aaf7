"""Turns a checked HTTP body into requests of the backend: token ids and sampling parameters within the limits."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import CallForm
from farsight.core.request import PromptSource, Request, SamplingParams, check_token_ids
from farsight.services.api.backend import Generator, ImageInput, ModelInfo
from farsight.services.api.errors import ApiError
from farsight.services.api.fields import shown
from farsight.services.api.generation import Echo, Generation, PromptText
from farsight.services.api.pictures.content import check_pictures, check_places, expanded, pictures_of, placed
from farsight.services.api.schemas import ChatCompletionRequest, ChatTurn, CompletionRequest, SamplingFields
from farsight.services.api.structured import Constraint
from farsight.services.api.text.grammars import chat_grammar, own_grammar
from farsight.services.api.text.prompts import ChatEnd, ChatPrompt, PromptEncoder, of_chat, of_completion
from farsight.tokenization.tool_formats.parts import OutputForm
from farsight.tokenization.tool_formats.regions import text_arguments

DEFAULT_MAX_TOKENS = 16
_THREAD_FROM_CHARS = 16_384
"""Characters; a text of this length or more is tokenised in a thread, so that it does not delay other streams."""


@dataclass(frozen=True, slots=True)
class _Limit:
    """An upper bound on output tokens, and the name of the field that holds it."""

    field: str
    max_new_tokens: int


async def generation_of(
    body: CompletionRequest | ChatCompletionRequest, model: ModelInfo, encoder: PromptEncoder
) -> Generation:
    """Returns what a checked body asks for; a thread renders a chat, tokenises a long text and tries a grammar.

    Raises:
        ApiError, InvalidValueError: A prompt, messages or a parameter that this model cannot take.
        CapacityError: Too many chats wait for the template.
    """
    if isinstance(body, ChatCompletionRequest):
        check_generates(body.model, model)
        text = await encoder.render_chat_soon(prompt_of_chat(body, model.image_input))
        if len(text) < _THREAD_FROM_CHARS and body.constraint is None and not body.tools:
            return _of_chat(body, text, model, encoder)
        return await asyncio.to_thread(_of_chat, body, text, model, encoder)
    size = sum(len(prompt) for _, prompt in body.prompts)  # in characters, or tokens
    if size < _THREAD_FROM_CHARS and body.constraint is None:
        return make_generation(body, model, encoder)
    return await asyncio.to_thread(make_generation, body, model, encoder)


def make_generation(
    body: CompletionRequest | ChatCompletionRequest, model: ModelInfo, encoder: PromptEncoder
) -> Generation:
    """Does what ``generation_of`` does, in this thread."""
    check_generates(body.model, model)
    if isinstance(body, CompletionRequest):
        return _of_completion(body, model, encoder)
    return _of_chat(body, encoder.render_chat(prompt_of_chat(body, model.image_input)), model, encoder)


def _of_completion(body: CompletionRequest, model: ModelInfo, encoder: PromptEncoder) -> Generation:
    limit = None if body.max_tokens is None else _Limit("max_tokens", max(body.max_tokens, 1))
    # Ranking the outputs by likelihood needs their log probabilities.
    logprobs = 0 if body.logprobs is None and body.num_tries > (body.n or 1) else body.logprobs
    scores_prompt = bool(body.echo and body.logprobs is not None)
    requests: list[Request] = []
    texts: list[PromptText | None] = []
    echoes: list[Echo] = []
    for field, prompt in body.prompts:
        prompt_ids, offsets = _prompt_ids(field, prompt, body, model, encoder)
        of_text = of_completion(prompt, body.instruction) if isinstance(prompt, str) else None
        texts.append(of_text and _called(of_text, body))
        room = check_prompt_len(field, len(prompt_ids), model)
        request = _request(body, prompt_ids, limit, min(DEFAULT_MAX_TOKENS, room), model, encoder)
        requests.append(_scored(request, logprobs, scores_prompt, body.prompt_logprobs))
        if body.echo and isinstance(prompt, str) and offsets is not None:
            echoes.append(Echo(prompt, offsets() if scores_prompt else ()))
        elif body.echo:
            echoes.append(encoder.echo(prompt_ids))
    return Generation(
        prompts=tuple(requests),
        texts=tuple(texts),
        model=body.model or model.name,
        chat=False,
        num_tries=body.num_tries,
        n=body.n or 1,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        shows_logprobs=body.logprobs is not None,
        num_logprobs=body.logprobs or 0,
        **_shown_fields(body),
        echoes=tuple(echoes),
        prompt_only=body.max_tokens == 0,
    )


def _prompt_ids(
    field: str, prompt: str | list[int], body: CompletionRequest, model: ModelInfo, encoder: PromptEncoder
) -> tuple[tuple[int, ...], Callable[[], tuple[int, ...]] | None]:
    """Token ids of a prompt and, where they are those of a whole text, what gives the character of each."""
    if not isinstance(prompt, str):
        check_token_ids(field, prompt, model.vocab_size)
        return _truncated(tuple(prompt), body, model), None
    if body.truncate_prompt_tokens is None:
        check_text_len(field, prompt, model, encoder)
    encoded = encoder.encode_prompt(
        prompt, parse_special=bool(body.parse_special), add_special_tokens=body.add_special_tokens is not False
    )
    check_encoded(field, encoded.ids, model)
    prompt_ids = _truncated(encoded.ids, body, model)
    return prompt_ids, encoded.offsets if len(prompt_ids) == len(encoded.ids) else None


def _truncated(prompt_ids: tuple[int, ...], body: SamplingFields, model: ModelInfo) -> tuple[int, ...]:
    """The last or first tokens of a prompt, where its client allows to drop others."""
    most = body.truncate_prompt_tokens
    if most is None:
        return prompt_ids
    kept = model.max_model_len - (body.max_new_tokens or 1) if most < 0 else most
    return prompt_ids[:kept] if body.truncation_side == "right" else prompt_ids[-kept:]


def prompt_of_chat(body: ChatTurn, image_input: ImageInput | None = None) -> ChatPrompt:
    """Returns the messages, their tools and where they end, as the encoder renders them.

    Raises:
        InvalidValueError: There are pictures, and the model does not see, or too many.
    """
    check_pictures((message.content for message in body.messages or ()), image_input)
    end = ChatEnd.NEW_TURN if body.add_generation_prompt is not False else ChatEnd.AFTER_MESSAGES
    if body.continue_final_message:
        end = ChatEnd.IN_FINAL_MESSAGE
    return ChatPrompt(
        _messages(body), end, body.shown_tools, body.template_arguments, "" if image_input is None else image_input.text
    )


def _messages(body: ChatTurn) -> list[dict[str, Any]]:
    return [message.for_template() for message in body.messages or ()]


def _of_chat(body: ChatCompletionRequest, text: str, model: ModelInfo, encoder: PromptEncoder) -> Generation:
    if body.truncate_prompt_tokens is None:
        check_text_len("messages", text, model, encoder)
    prompt_ids = encoder.encode_rendered(text)
    check_encoded("messages", prompt_ids, model)
    prompt_ids = _truncated(prompt_ids, body, model)
    pictures = pictures_of(message.content for message in body.messages)
    if pictures and body.truncate_prompt_tokens is not None:
        raise InvalidValueError("truncate_prompt_tokens", body.truncate_prompt_tokens, "null beside pictures")
    if pictures and model.image_input is not None:
        check_places(prompt_ids, len(pictures), model.image_input)
    room = check_prompt_len("messages", len(prompt_ids), model)
    limit = None
    if body.max_completion_tokens is not None:
        limit = _Limit("max_completion_tokens", body.max_completion_tokens)
    elif body.max_tokens is not None:
        limit = _Limit("max_tokens", body.max_tokens)
    logprobs, num_tries = body.num_top_logprobs, body.n or 1
    form = encoder.dialect.form(
        text,
        [tool.name for tool in body.usable_tools],
        forced=body.must_call,
        parallel=body.may_call_in_parallel,
        shows_reasoning=body.include_reasoning is not False,
        reasons=not (body.continue_final_message or _follows_text(body.constraint)),
        custom=body.custom_tools,
        texts=[pair for tool in body.usable_tools for pair in text_arguments(tool.name, tool.parameters)],
    )
    request = _request(body, prompt_ids, limit, room, model, encoder, form)
    request = _scored(request, logprobs, False, body.prompt_logprobs)
    return Generation(
        prompts=(request,),
        texts=(_called(_prompt_text(body, text), body),),
        model=body.model or model.name,
        chat=True,
        echoes=last_turn(_messages(body)) if body.echo else (),
        form=form,
        num_tries=num_tries,
        n=num_tries,
        stream=bool(body.stream),
        include_usage=body.include_usage,
        shows_logprobs=logprobs is not None,
        num_logprobs=logprobs or 0,
        pictures=pictures,
        limit_field="" if limit is None else limit.field,
        **_shown_fields(body),
    )


def _follows_text(constraint: Constraint | None) -> bool:
    """Whether all of an output has to follow something that is no JSON Schema, so that no reasoning goes before."""
    return constraint is not None and constraint.kind not in ("schema", "object")


def _prompt_text(body: ChatCompletionRequest, rendered: str) -> PromptText:
    """A server that takes text gets the rendered prompt where messages alone do not say all of it."""
    found = of_chat(_messages(body))
    says_all = body.shown_tools is None and not body.template_arguments
    if says_all and not any(each.role == "tool" or each.content is None for each in body.messages):
        return found
    return dataclasses.replace(found, source=PromptSource(str.__str__(rendered)))


def _called(text: PromptText, body: CompletionRequest | ChatCompletionRequest) -> PromptText:
    """Returns the text with what the body tells of its client and of the form of the call."""
    has_tools = isinstance(body, ChatCompletionRequest) and bool(body.usable_tools)
    call = CallForm("", bool(body.stream), has_tools, body.constraint is not None)
    return dataclasses.replace(text, call=call).sent_by(body.user or "")


def _shown_fields(body: SamplingFields) -> dict[str, Any]:
    """Returns the fields of ``Generation`` that completions and chats share."""
    return {
        "num_prompt_logprobs": body.prompt_logprobs,
        "shows_token_ids": bool(body.return_token_ids),
        "names_ids": bool(body.return_tokens_as_token_ids),
        "continuous_usage": body.continuous_usage,
        "beams": body.beams(body.n or 1, ignore_eos=bool(body.ignore_eos)),
        "service_tier": body.tier or "",
    }


def _scored(request: Request, logprobs: int | None, echoes: bool, prompt_logprobs: int | None) -> Request:
    """With what the engine computes of log probabilities; answers show less of them where less is asked for.

    Args:
        logprobs, prompt_logprobs: Likeliest tokens that are wanted beside those of the output, and of the prompt.
        echoes: Whether those of the output are wanted for the prompt as well.
    """
    if logprobs is None and prompt_logprobs is None:
        return request
    sampling = dataclasses.replace(
        request.sampling,
        logprobs=max(logprobs or 0, prompt_logprobs or 0),
        prompt_logprobs=echoes or prompt_logprobs is not None,
    )
    return dataclasses.replace(request, sampling=sampling)


def check_model(name: str | None, model: ModelInfo) -> None:
    """Raises ApiError (404) if another model is served here."""
    if name is not None and name not in model.names:
        expected = " or ".join(map(repr, model.names))
        message = f"model: got {shown(name)!r}, expected {expected}, the one model that is served here"
        raise ApiError(message, status=404, param="model", code="model_not_found")


def check_generates(name: str | None, model: ModelInfo) -> None:
    """Raises ApiError: 404 if another model is served here, 400 if it continues no text."""
    check_model(name, model)
    if not model.abilities.generates:
        message = f"model: {model.name!r} is an encoder and generates no text; it serves {model.abilities.offers}"
        raise ApiError(message, param="model", code="model_cannot_generate")


def check_text_len(field: str, text: str, model: ModelInfo, encoder: PromptEncoder) -> None:
    """Refuses a text that cannot fit, however its tokens fall, before it is tokenised."""
    least = encoder.least_tokens(text, model.max_model_len)
    if least >= model.max_model_len:
        found = f"{len(text)} characters, which are {least} tokens or more"
        raise too_long(field, found, model.max_model_len - 1, "one more must fit", model)


def check_encoded(field: str, prompt_ids: tuple[int, ...], model: ModelInfo) -> None:
    """Refuses tokens beyond the vocabulary: a tokenizer may have added tokens that the model cannot embed."""
    highest = max(prompt_ids, default=0)
    if highest >= model.vocab_size:
        expected = f"text without tokens beyond the model's vocabulary of {model.vocab_size}"
        raise InvalidValueError(field, f"text with token {highest}", expected)


def check_prompt_len(field: str, prompt_len: int, model: ModelInfo) -> int:
    """Returns the number of output tokens that fit after the prompt."""
    if prompt_len == 0:
        raise ApiError(f"{field}: got no tokens, expected at least one", param=field, code="invalid_value")
    room = model.max_model_len - prompt_len
    if room < 1:
        raise too_long(field, f"{prompt_len} tokens", model.max_model_len - 1, "one more must fit", model)
    return room


def too_long(field: str, found: str, limit: int, why: str, model: ModelInfo) -> ApiError:
    bound = f"the context of {model.max_model_len} tokens"
    if model.pool_limited:
        bound = f"the KV pool's {model.max_model_len} tokens; --kv-memory raises it"
    message = f"{field}: got {found}, expected at most {limit} ({why} into {bound})"
    return ApiError(message, param=field, code="context_length_exceeded")


def unnamed_request(prompt_ids: tuple[int, ...], sampling: SamplingParams, **fields: Any) -> Request:
    """Makes a request that no backend has named yet.

    Args:
        fields: Further fields of ``Request``.
    """
    return Request("", 0, "", prompt_ids, sampling, **fields)


def _request(
    body: SamplingFields,
    prompt_ids: tuple[int, ...],
    limit: _Limit | None,
    default: int,
    model: ModelInfo,
    encoder: PromptEncoder,
    form: OutputForm | None = None,
) -> Request:
    """Makes a request without a name; the backend gives it one."""
    room = model.max_model_len - len(prompt_ids)
    if limit is not None and limit.max_new_tokens > room:
        why = f"a prompt of {len(prompt_ids)} tokens and the output must fit"
        raise too_long(limit.field, str(limit.max_new_tokens), room, why, model)
    sampling = _sampling(body, default if limit is None else limit.max_new_tokens, model, encoder, form)
    return unnamed_request(
        prompt_ids,
        sampling,
        priority=body.request_priority,
        deadline_s=body.deadline_s,
        slo=body.request_slo,
        cache_salt=_salt(body),
        model_version=model.version,
        session=body.session,
    )


def _salt(body: SamplingFields) -> str:
    """Only requests of one tenant that name the same salt and the same key share prefixes."""
    salt = body.cache_salt or ""
    return salt if body.prompt_cache_key is None else f"{salt}\0{body.prompt_cache_key}"


def _sampling(
    body: SamplingFields, max_new_tokens: int, model: ModelInfo, encoder: PromptEncoder, form: OutputForm | None
) -> SamplingParams:
    """The sampling parameters of a prompt: all prompts share the client's seed; without one each draws its own."""
    if body.benchmark_len is not None and not model.benchmark_mode:
        only = "null: it is for benchmarks, and taken by `farsight serve --benchmark-mode` alone"
        raise InvalidValueError("benchmark_len", body.benchmark_len, only)
    sampling = SamplingParams(
        max_new_tokens=max_new_tokens,
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=min(max(body.top_k or 0, 0), model.vocab_size),
        seed=secrets.randbits(63) if body.seed is None or body.seed < 0 else body.seed,
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
        grammar=_grammar(body, model, encoder, form),
        shown_ids=() if form is None else encoder.dialect.shown_ids(),
        reasoning=encoder.dialect.budget(None if model.emulated else form, body.most_reasoning),
        allowed_token_ids=tuple(dict.fromkeys(body.allowed_token_ids or ())),
        bad_words=tuple(ids for word in body.bad_words or () for ids in encoder.word_ids(word)),
    )
    sampling.check_vocabulary(model.vocab_size)
    return sampling


def _grammar(body: SamplingFields, model: ModelInfo, encoder: PromptEncoder, form: OutputForm | None) -> str:
    if form is None:
        return own_grammar(body, emulated=bool(model.emulated))
    assert isinstance(body, ChatCompletionRequest)
    return chat_grammar(body, encoder.dialect, form, emulated=bool(model.emulated))


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def last_turn(messages: Sequence[Mapping[str, Any]]) -> tuple[Echo, ...]:
    """Returns the text of a last message of the assistant, which the answer goes on with; nothing of other roles."""
    last = messages[-1]
    text = last.get("content")
    return (Echo(text),) if last["role"] == "assistant" and isinstance(text, str) and text else ()


async def with_pictures(backend: Generator, generation: Generation, salt: str) -> Generation:
    """Puts the images of its prompt into the generation, each in as many tokens as it has.

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
    """Returns the prompt of a conversation. Its pictures are encoded, and kept for the request that will follow.

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

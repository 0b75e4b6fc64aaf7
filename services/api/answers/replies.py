"""Response models of whole answers; ``sse`` writes the chunks of streams."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field, SerializerFunctionWrapHandler, model_serializer

from farsight.core.messages.status import ProcessUse, StatusReply
from farsight.core.messages.tokens import TokenLogprobs
from farsight.services.api.answers.parts import (
    ChoiceParts,
    CompletionLogprobs,
    chat_logprobs,
    likeliest,
    prompt_logprobs,
)
from farsight.services.api.backend import ModelInfo
from farsight.services.api.generation import GPU_SECONDS_DIGITS, ChoiceResult, Generation, Used, shown_choices
from farsight.services.api.text.dialect import TokenTexts
from farsight.tokenization.tool_formats.parts import CallArguments, CallStart, ReasoningPart, TextPart

_Model = TypeVar("_Model", bound=BaseModel)


class ModelCard(BaseModel):
    """``emulated`` names the profile of an emulated device, whose answers are made up; null if the model computes.

    ``preset`` names the policies that serve it, and ``input_modalities`` says what it reads: ``text``, ``image``.
    ``root`` is the path of the model and its tokenizer on the server's machine; null for a key without the role
    ``observe`` or ``admin``.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "farsight"
    max_model_len: int
    emulated: str | None = None
    preset: str | None = None
    input_modalities: list[str] = ["text"]
    root: str | None = None


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class PromptTokensDetails(BaseModel):
    """``cached_tokens``: prompt tokens whose KV came from the prefix cache."""

    cached_tokens: int


class UsageFields(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    gpu_seconds: float = Field(
        0.0, description="Extension; the answer's part of the time of the steps that computed it. 0 from other servers."
    )


class TextLogprobs(BaseModel):
    """Each list has one item per token; null for the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


TokenIds = Annotated[list[int] | None, Field(description="Extension; null without return_token_ids.")]


class PromptLogprob(BaseModel):
    """``rank`` is 1 for the likeliest token; null for one that is not among those asked for."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = Annotated[
    list[dict[str, PromptLogprob] | None] | None,
    Field(description="Extension; for each token, by id; null without prompt_logprobs."),
]


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None
    token_ids: TokenIds = None
    prompt_token_ids: TokenIds = None
    prompt_logprobs: PromptLogprobs = None


ServedTier = Annotated[str | None, Field(description="Tier that served it; null without service_tier.")]


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageFields
    service_tier: ServedTier = None


class FunctionMade(BaseModel):
    name: str
    arguments: str


class CallMade(BaseModel):
    """A call that the client is to run: it sends the result in a message of role ``tool``."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionMade


class CustomMade(BaseModel):
    name: str
    input: str


class CustomCallMade(BaseModel):
    """A call of a custom tool."""

    id: str
    type: Literal["custom"] = "custom"
    custom: CustomMade


class ChatAnswer(BaseModel):
    """``content`` is null beside calls without text; ``tool_calls`` and ``reasoning_content`` are there if they hold
    something."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[CallMade | CustomCallMade] | None = None

    @model_serializer(mode="wrap")
    def _shown(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = write(self)
        empty = [name for name in ("reasoning_content", "tool_calls") if fields[name] is None]
        return {name: value for name, value in fields.items() if name not in empty}


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprob]
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatAnswer
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    token_ids: TokenIds = None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageFields
    service_tier: ServedTier = None
    prompt_token_ids: TokenIds = None
    prompt_logprobs: PromptLogprobs = None


class Health(BaseModel):
    status: Literal["ok"] = "ok"


class Version(BaseModel):
    version: str


class ServerLoad(BaseModel):
    """``server_load``: answers that this ingress replica is generating."""

    server_load: int


class ActorStatus(BaseModel):
    """``url`` and ``breaker`` describe replicas that are external servers and are empty for other components.
    ``last_end`` is the reason for the last replacement of the process. ``degraded`` says why a component that is ready
    works less well than it should."""

    name: str
    kind: str
    pid: int
    node: str
    state: str
    queue: int
    last_step_age_s: float | None
    restarts: int
    http_port: int
    url: str = ""
    breaker: str = ""
    last_end: str = ""
    degraded: str = ""


class KVStatus(BaseModel):
    """The KV pools of all replicas in blocks, and the transfers between device and host."""

    num_blocks: int
    free_blocks: int
    num_host_blocks: int
    free_host_blocks: int
    flying_blocks: int
    offloads: int
    uploads: int
    offloaded_bytes: int
    uploaded_bytes: int
    refused_offloads: int
    recomputed_tokens: int


class LearnedVersion(BaseModel):
    """A model that was learned while serving, such as the trees that predict output lengths.

    ``score`` is its error on held-out requests; ``current`` says whether it is in use.
    """

    kind: str
    version: int
    created_at: float
    score: float | None
    num_examples: int
    current: bool


class Status(BaseModel):
    """The service now.

    Attributes:
        emulated: As in ``ModelCard``.
        queue_delay_s: As in ``StatusReply``.
        no_forecasts: Which presets make forecasts of each request, where the served one makes none; else null.
        preset: The policies that serve the model; null where it is not known.
    """

    actors: list[ActorStatus]
    kv: KVStatus
    learned: list[LearnedVersion] = []
    learnt: list[LearnedVersion] = []  # the old name of `learned`, until version 0.3
    emulated: str | None = None
    queue_delay_s: float | None = None
    no_forecasts: str | None = None
    preset: str | None = None
    processes: tuple[ProcessUse, ...] = ()


def model_card(model: ModelInfo, name: str, *, tells_root: bool) -> ModelCard:
    """Describes the model under one of its names; with ``tells_root`` also where it lies."""
    return ModelCard(
        id=name,
        created=model.created,
        max_model_len=model.max_model_len,
        emulated=model.emulated or None,
        preset=model.preset or None,
        input_modalities=["text"] if model.image_input is None else ["text", "image"],
        root=(model.root or None) if tells_root else None,
    )


def status_reply(reply: StatusReply, model: ModelInfo) -> Status:
    actors = [_as(ActorStatus, component) for component in reply.components]
    learned = [_as(LearnedVersion, artefact) for artefact in reply.artefacts]
    traffic = dataclasses.asdict(reply.kv.traffic)
    pools = {name: getattr(reply.kv, name) for name in KVStatus.model_fields if name not in traffic}
    return Status(
        actors=actors,
        kv=KVStatus(**pools, **traffic),
        learned=learned,
        learnt=learned,
        emulated=model.emulated or None,
        queue_delay_s=reply.queue_delay_s,
        no_forecasts=model.no_forecasts or None,
        preset=model.preset or None,
        processes=reply.processes,
    )


def _as(model: type[_Model], record: object) -> _Model:
    """The fields of a record that the response model shows."""
    return model(**{name: getattr(record, name) for name in model.model_fields})


def usage(used: Used) -> UsageFields:
    """Returns what a reply says of what its answer used."""
    num_prompt_tokens = used.generation.num_prompt_tokens
    return UsageFields(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=used.num_tokens,
        total_tokens=num_prompt_tokens + used.num_tokens,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=used.num_cached),
        gpu_seconds=round(used.gpu_s, GPU_SECONDS_DIGITS),
    )


def usage_of(generation: Generation, results: Sequence[ChoiceResult]) -> UsageFields:
    """Token counts of all requests that ran, shown or not; a prompt's cached tokens are those of its first output."""
    num_cached = sum(result.cached_len for result in results[:: generation.num_tries])
    gpu_s = sum(result.gpu_s for result in results)
    return usage(Used(generation, sum(result.num_tokens for result in results), num_cached, gpu_s))


def completion(generation: Generation, results: Sequence[ChoiceResult], texts: TokenTexts) -> Completion:
    texts = texts.named(by_id=generation.names_ids)
    choices = []
    for index, result in enumerate(shown_choices(generation, results)):
        prompt = index // generation.n
        logprobs = None
        if generation.shows_logprobs:
            known = [first_prompt_entry(generation, prompt), *result.prompt_logprobs] if generation.echoes else []
            output, known = (likeliest(each, generation.num_logprobs) for each in (result.logprobs, known))
            lists = completion_logprobs(generation, prompt, texts).add(output, known)
            logprobs = TextLogprobs(**lists)
        text = generation.echoes[prompt].text + result.text if generation.echoes else result.text
        choices.append(
            CompletionChoice(
                index=index,
                text=text,
                logprobs=logprobs,
                finish_reason=result.finish_reason,
                token_ids=result.token_ids if generation.shows_token_ids else None,
                prompt_token_ids=_prompt_token_ids(generation, prompt),
                prompt_logprobs=_prompt_logprobs(generation, result, texts),
            )
        )
    return Completion(choices=choices, **_head(generation, results))


def _head(generation: Generation, results: Sequence[ChoiceResult]) -> dict[str, Any]:
    """Returns the fields that answers of both kinds have."""
    return {
        "id": generation.response_id,
        "created": int(time.time()),
        "model": generation.model,
        "usage": usage_of(generation, results),
        "service_tier": generation.service_tier or None,
    }


def _prompt_token_ids(generation: Generation, prompt: int) -> list[int] | None:
    return list(generation.prompts[prompt].prompt_ids) if generation.shows_token_ids else None


def _prompt_logprobs(generation: Generation, result: ChoiceResult, texts: TokenTexts) -> Any:
    if generation.num_prompt_logprobs is None:
        return None
    return prompt_logprobs(texts, result.prompt_logprobs, generation.num_prompt_logprobs)


def chat_completion(generation: Generation, results: Sequence[ChoiceResult], texts: TokenTexts) -> ChatCompletion:
    texts = texts.named(by_id=generation.names_ids)
    choices = []
    for index, result in enumerate(results):
        message = _chat_answer(generation, result.text, index)
        wants_results = bool(message.tool_calls) and result.finish_reason == "stop"
        logprobs = None
        if generation.shows_logprobs:
            logprobs = ChatLogprobs(**chat_logprobs(texts, likeliest(result.logprobs, generation.num_logprobs)))
        choices.append(
            ChatChoice(
                index=index,
                message=message,
                logprobs=logprobs,
                finish_reason="tool_calls" if wants_results else result.finish_reason,
                token_ids=result.token_ids if generation.shows_token_ids else None,
            )
        )
    return ChatCompletion(
        choices=choices,
        **_head(generation, results),
        prompt_token_ids=_prompt_token_ids(generation, 0),
        prompt_logprobs=_prompt_logprobs(generation, results[0], texts),
    )


def _chat_answer(generation: Generation, text: str, choice: int) -> ChatAnswer:
    """Takes a whole output apart, behind the text that it goes on with."""
    content = generation.echoes[0].text if generation.echoes else ""
    if generation.form is None:
        return ChatAnswer(content=content + text)
    reasoning = ""
    calls: list[CallMade | CustomCallMade] = []
    parts = ChoiceParts(generation.form, generation.response_id, choice, stream=False)
    for part in parts.read(text, ended=True):
        match part:
            case TextPart():
                content += part.text
            case ReasoningPart():
                reasoning += part.text
            case CallStart():
                name = part.name
                if parts.is_custom(part.index):
                    calls.append(CustomCallMade(id=parts.id_of(part), custom=CustomMade(name=name, input="")))
                else:
                    calls.append(CallMade(id=parts.id_of(part), function=FunctionMade(name=name, arguments="")))
            case CallArguments():
                match calls[part.index]:
                    case CallMade() as call:
                        call.function.arguments += part.text
                    case CustomCallMade() as custom:
                        custom.custom.input += part.text
    told = None if calls and not content else content
    return ChatAnswer(content=told, reasoning_content=reasoning or None, tool_calls=calls or None)


def completion_logprobs(generation: Generation, prompt: int, texts: TokenTexts) -> CompletionLogprobs:
    """Token counts of one choice of a prompt."""
    echo = generation.echoes[prompt] if generation.echoes else None
    return CompletionLogprobs(texts, generation.prompts[prompt].prompt_ids, echo)


def first_prompt_entry(generation: Generation, prompt: int) -> TokenLogprobs:
    """The first token of an echoed prompt has an id but no log probability."""
    return (generation.prompts[prompt].prompt_ids[0],), ()

"""Request bodies. Types are strict, unknown fields are refused, ``null`` means "not given"."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, PlainValidator, model_validator

from farsight.services.api.field_groups import (
    MAX_CALLS,
    MAX_SCHEMA_DEPTH,
    AnyCall,
    BeamFields,
    TargetFields,
    ToolFields,
)
from farsight.services.api.fields import (
    CHAT_NEUTRAL,
    COMPLETION_NEUTRAL,
    CONTENT,
    EXPECTED,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_CHOICES,
    MAX_LOGPROBS,
    MAX_N,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    MESSAGE_NEUTRAL,
    PROMPT,
    NeutralOnly,
    StrictModel,
    checked_session,
    refused,
)
from farsight.services.api.pictures.content import MixedContent, check_content
from farsight.services.api.structured import Constraint, ResponseFormat, SchemaOrText, StructuredOutputs, constraint_of
from farsight.tokenization.grammars.rewriting import nesting

MAX_THINKING_TOKENS = 2**31 - 1
MAX_TEMPLATE_CHARS = 4096
"""Limit of a request's values for the chat template, as JSON text."""
OWN_TEMPLATE_NAMES = frozenset(
    ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "unk_token")
)
"""What a chat template is told by this server alone."""


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def check_prompt(value: Any, most: int = MAX_PROMPTS) -> str | list[str] | list[int] | list[list[int]]:
    """A field that holds one or several prompts, each as text or token ids.

    Raises:
        PydanticCustomError: It holds something else, or more than ``most`` of them.
    """
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise refused("", value, PROMPT)
    if _is_ids(value):
        return value
    several = all(isinstance(item, str) for item in value) or all(isinstance(item, list) for item in value)
    if several and len(value) > most:
        raise refused("", f"{len(value)} prompts", f"at most {most} prompts in a request")
    for index, item in enumerate(value):
        _check_prompt_item(value[0], index, item)
    return value


def _check_prompt_item(first: Any, index: int, item: Any) -> None:
    """All items of a list must be of the kind of the first."""
    if isinstance(first, int) and not isinstance(first, bool):
        if type(item) is not int:
            raise refused(f"[{index}]", item, "a token id, an integer, like the first item")
    elif isinstance(first, str):
        if not isinstance(item, str):
            raise refused(f"[{index}]", item, "a string")
    elif not _is_ids(item) or not item:
        raise refused(f"[{index}]", item, "a non-empty list of token ids" if isinstance(first, list) else PROMPT)


def _check_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or len(stops) > MAX_STOP_STRINGS:
        raise refused("", value, EXPECTED["stop"])
    for index, item in enumerate(stops):
        suffix = "" if isinstance(value, str) else f"[{index}]"
        if not isinstance(item, str) or not item:
            raise refused(suffix, item, "a non-empty string")
        if len(item) > MAX_STOP_CHARS:
            raise refused(suffix, f"{len(item)} characters", f"at most {MAX_STOP_CHARS} characters in a stop string")
    return tuple(stops)


def _check_logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    if value is None:
        return ()
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise refused("", value, EXPECTED["logit_bias"])
    biases = {}
    for key, bias in value.items():
        if not key.isascii() or not key.isdigit() or len(key) > 10 or int(key) in biases:
            raise refused("", key, "token ids, each once, as the names of the object's fields")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise refused(f".{key}", bias, "a number from -100 to 100")
        biases[int(key)] = float(bias)
    return tuple(biases.items())


Prompt = Annotated[
    str | list[str] | list[int] | list[list[int]],
    PlainValidator(check_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
_StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_StopStrings = Annotated[list[_StopString], Field(max_length=MAX_STOP_STRINGS)]
Stop = Annotated[
    tuple[str, ...],
    PlainValidator(_check_stop, json_schema_input_type=_StopString | _StopStrings | None),
]
_Biases = Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)]
LogitBias = Annotated[
    tuple[tuple[int, float], ...],
    PlainValidator(_check_logit_bias, json_schema_input_type=_Biases | None),
]
Content = Annotated[
    str | MixedContent | None, PlainValidator(check_content, json_schema_input_type=str | list[dict[str, Any]] | None)
]


BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARS)]


def named_prompts(
    field: str, value: str | list[str] | list[int] | list[list[int]]
) -> list[tuple[str, str | list[int]]]:
    """Returns the prompts of a field that ``check_prompt`` takes, each with its name, as errors give it."""
    match value:
        case str() as text:
            return [(field, text)]
        case [int(), *_]:
            return [(field, cast(list[int], value))]
    items = cast(Sequence[str | list[int]], value)
    return [(f"{field}[{index}]", item) for index, item in enumerate(items)]


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = Field(None, description="Extension; every chunk says the usage so far.")


class SamplingFields(BeamFields, TargetFields):
    """The fields that both endpoints share."""

    model: str | None = Field(None, description="A name that is served here; the first of them if not given.")
    temperature: float | None = Field(None, ge=0, le=2, description="0 is greedy; 1 if not given.")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="Extension; 0 and -1 keep all tokens.")
    seed: int | None = Field(None, ge=-1, lt=2**64, description="Drawn at random if not given, or -1.")
    stop: Stop = Field(
        (),
        description=f"A string of up to {MAX_STOP_CHARS} characters, or up to {MAX_STOP_STRINGS}, that end the output.",
    )
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, max_length=MAX_STOP_TOKEN_IDS, description=f"Extension; up to {MAX_STOP_TOKEN_IDS} token ids."
    )
    ignore_eos: bool | None = Field(None, description="Extension; continue after the end-of-sequence token.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, description="Names your end user: forecasts of lengths learn by it.")
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0, description="Extension; least number of output tokens.")
    min_p: float | None = Field(
        None, ge=0, le=1, description="Extension; smallest probability of a token, relative to the most likely."
    )
    repetition_penalty: float | None = Field(
        None, ge=0.01, le=100, description="Extension; applies to tokens of prompt and output."
    )
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias = Field(
        (), description=f"Value added to a token's logit, -100 to 100, by token id; up to {MAX_BIASES}."
    )
    n: int | None = Field(None, ge=1, le=MAX_N, description="Choices per prompt; choice i is sampled with seed + i.")
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Extension; only requests with the same salt share cached prefixes.",
    )
    prompt_cache_key: str | None = Field(
        None,
        min_length=1,
        max_length=1024,
        description="Only requests with the same key share cached prefixes, as with cache_salt.",
    )
    nvext: dict[str, Any] | None = Field(
        None, description="Hints of NVIDIA Dynamo's clients; of them session_id is read, from agent_hints or beside it."
    )
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="Extension; log probabilities of the prompt's tokens."
    )
    truncate_prompt_tokens: int | None = Field(
        None, ge=-1, description="Extension; keep so many last tokens of a prompt; -1 keeps what the context takes."
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Extension; where truncate_prompt_tokens drops tokens; 'left', at the beginning, if null."
    )
    allowed_token_ids: list[Annotated[int, Field(ge=0)]] | None = Field(
        None, min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, description="Extension; the only tokens of the output."
    )
    bad_words: list[BadWord] | None = Field(
        None, max_length=MAX_BAD_WORDS, description="Extension; texts that the output must not hold."
    )
    return_token_ids: bool | None = Field(None, description="Extension; also the token ids of prompt and output.")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Extension; log probabilities name tokens 'token_id:5'."
    )
    response_format: ResponseFormat | None = Field(None, description="JSON, of a schema where one is given.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Extension; what the output must follow.")
    guided_json: SchemaOrText = Field(None, description="Extension; a JSON Schema.")
    guided_regex: str | None = Field(None, min_length=1, description="Extension; a regular expression.")
    guided_choice: list[str] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="Extension; the output is one of these texts."
    )
    guided_grammar: str | None = Field(None, min_length=1, description="Extension; a grammar in Lark or GBNF.")
    benchmark_len: int | None = Field(
        None, ge=1, description="Extension; the output ends here as if by EOS. With --benchmark-mode only."
    )

    @model_validator(mode="after")
    def _check_together(self) -> SamplingFields:
        if self.stream_options is not None and not self.stream:
            raise refused(".stream_options", self.stream_options.model_dump(), "null where stream is not true")
        if self.prompt_logprobs is not None and self.stream:
            raise refused(".prompt_logprobs", self.prompt_logprobs, "null where stream is true")
        constraint = self.constraint
        if constraint is not None and self.ignore_eos:
            raise refused(".ignore_eos", True, f"false beside {constraint.field}: EOS ends an output that is complete")
        self.check_beams(self.n or 1, constraint.field if constraint else "")
        if self.truncate_prompt_tokens == 0:
            raise refused(".truncate_prompt_tokens", 0, EXPECTED["truncate_prompt_tokens"])
        return self

    @property
    def session(self) -> str:
        """The conversation that the client says it is in; empty where it does not say."""
        hints = self.nvext or {}
        for found in (hints.get("agent_hints"), hints):
            name = found.get("session_id") if isinstance(found, dict) else None
            if name is not None:
                return checked_session("nvext.session_id", name)
        return self.prompt_cache_key or ""

    @property
    def constraint(self) -> Constraint | None:
        """What the output must follow; None for nothing."""
        guided = self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar
        return constraint_of(self.response_format, self.structured_outputs, guided)

    @property
    def max_new_tokens(self) -> int | None:
        """The limit of output tokens that the client has set."""
        return self.max_tokens

    @property
    def most_reasoning(self) -> int | None:
        """Most tokens of the reasoning; None without a limit."""
        return None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        """Whether every chunk of a stream says the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)


class CompletionRequest(SamplingFields):
    """``POST /v1/completions``"""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = COMPLETION_NEUTRAL

    prompt: Prompt
    max_tokens: int | None = Field(None, ge=0, description="16 if not given; 0 only with echo.")
    best_of: int | None = Field(
        None, ge=1, le=MAX_N, description="Outputs run per prompt; the n most likely are returned."
    )
    echo: bool | None = Field(None, description="Put the prompt before the output.")
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    add_special_tokens: bool | None = Field(
        None, description="Extension; false leaves out the special tokens that the tokenizer puts around a text."
    )
    parse_special: bool | None = Field(
        None, description="Extension; parse control tokens in the prompt's text instead of treating them as plain text."
    )
    instruction: str | None = Field(
        None,
        description="Extension; the text that your prompts share, for length predictions; not in the prompt.",
    )

    @model_validator(mode="after")
    def _check_numbers(self) -> CompletionRequest:
        if self.max_tokens == 0 and not self.echo:
            raise refused(".max_tokens", 0, "an integer >= 1, or 0 where echo is true")
        n = self.n or 1
        if self.best_of is not None and self.best_of < n:
            raise refused(".best_of", self.best_of, f"an integer >= n = {n}")
        if self.best_of is not None and self.best_of > n and self.stream:
            raise refused(".best_of", self.best_of, f"n = {n} where stream is true")
        if self.num_tries * len(self.prompts) > MAX_SEQUENCES:
            name = "n" if self.best_of is None else "best_of"
            most = f"at most {MAX_SEQUENCES // len(self.prompts)} with {len(self.prompts)} prompts"
            raise refused(f".{name}", self.num_tries, most)
        return self

    @property
    def num_tries(self) -> int:
        """The number of outputs to run for each prompt."""
        return self.best_of or self.n or 1

    @property
    def prompts(self) -> list[tuple[str, str | list[int]]]:
        """The prompts, each with the name of its field in the request."""
        return named_prompts("prompt", self.prompt)


class ChatMessage(StrictModel):
    """``content`` is null, or not there, only beside ``tool_calls`` or ``reasoning_content``.

    Clients keep notes of their own in messages: what has no name of a field, or nearly one, is not looked at.
    """

    neutral: ClassVar[Mapping[str, NeutralOnly]] = MESSAGE_NEUTRAL
    takes_unknown: ClassVar[bool] = True

    role: str = Field(pattern=r"^[A-Za-z0-9_.\-]{1,64}$")
    content: Content
    name: str | None = None
    tool_calls: list[AnyCall] | None = Field(None, max_length=MAX_CALLS, description="Calls that this answer made.")
    tool_call_id: str | None = Field(None, max_length=256, description="The call that a tool's message answers.")
    reasoning_content: str | None = Field(None, description="Extension; the reasoning of an earlier answer.")

    @model_validator(mode="before")
    @classmethod
    def _without_content(cls, data: Any) -> Any:
        if (
            isinstance(data, dict)
            and "content" not in data
            and (data.get("tool_calls") or data.get("reasoning_content"))
        ):
            return {**data, "content": None}
        return data

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.content is None and not (self.tool_calls or self.reasoning_content):
            raise refused(".content", None, CONTENT)
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool"), ("reasoning_content", "assistant")):
            if getattr(self, name) and self.role != role:
                raise refused(f".{name}", "a value", f"null in a message of role {self.role!r}")
        if isinstance(self.content, MixedContent) and self.role not in ("user", "tool"):
            raise refused(".content", "a picture", f"text alone in a message of role {self.role!r}")
        return self

    def for_template(self) -> dict[str, Any]:
        """As chat templates take it: a string of content, or parts where there are pictures, and the arguments of
        calls as objects."""
        content = self.content.for_template() if isinstance(self.content, MixedContent) else self.content or ""
        rest = self.model_dump(exclude_none=True, exclude={"role", "content", "tool_calls"})
        found = {"role": self.role, "content": content, **rest}
        if self.tool_calls:
            found["tool_calls"] = [call.for_template() for call in self.tool_calls]
        return found


def _check_arguments(value: Any) -> Any:
    if not isinstance(value, dict):
        raise refused("", value, EXPECTED["chat_template_kwargs"])
    if nesting(value, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise refused("", "a deeper object", f"at most {MAX_SCHEMA_DEPTH} levels")
    if len(json.dumps(value)) > MAX_TEMPLATE_CHARS:
        raise refused("", "a larger object", f"at most {MAX_TEMPLATE_CHARS} characters")
    taken = sorted(value.keys() & OWN_TEMPLATE_NAMES)
    if taken or not all(name.isidentifier() for name in value):
        raise refused("", sorted(value), f"names other than {', '.join(sorted(OWN_TEMPLATE_NAMES))}")
    return value


TemplateArguments = Annotated[dict[str, Any], PlainValidator(_check_arguments, json_schema_input_type=dict[str, Any])]


class ChatTurn(ToolFields):
    """Messages, the tools that they may call, and where they end."""

    messages: list[ChatMessage] | None = Field(None, min_length=1)
    add_generation_prompt: bool | None = Field(
        None, description="Extension; false ends the conversation before the assistant's turn."
    )
    continue_final_message: bool | None = Field(
        None, description="Extension; the output goes on with the last message instead of a new one."
    )

    chat_template_kwargs: TemplateArguments | None = Field(
        None, description="Extension; values for the chat template, such as enable_thinking."
    )
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        None, description="For chat templates that know it; 'none' also switches thinking off."
    )

    @property
    def template_arguments(self) -> dict[str, Any]:
        """What the chat template is told beside messages and tools."""
        found: dict[str, Any] = {}
        if self.reasoning_effort is not None:
            found["reasoning_effort"] = self.reasoning_effort
        if self.reasoning_effort == "none":
            found["enable_thinking"] = False
        return found | (self.chat_template_kwargs or {})

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates take them."""
        if not self.tools or self.tool_choice == "none":
            return None
        functions = [tool.function.model_dump(exclude_none=True, exclude={"strict"}) for tool in self.tools]
        return [{"type": "function", "function": function} for function in functions]

    @model_validator(mode="after")
    def _check_continuation(self) -> ChatTurn:
        if self.continue_final_message and self.add_generation_prompt:
            raise refused(".add_generation_prompt", True, "false where continue_final_message is true")
        return self


class ChatCompletionRequest(SamplingFields, ChatTurn):
    """``POST /v1/chat/completions``"""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = CHAT_NEUTRAL

    messages: list[ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, description="The older name of max_completion_tokens, which goes first.")
    max_completion_tokens: int | None = Field(None, ge=1, description="Default: the rest of the context.")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="Requires logprobs.")
    echo: bool | None = Field(None, description="Extension; a last message of the assistant goes before the answer.")
    include_reasoning: bool | None = Field(None, description="Extension; false leaves the reasoning out of the answer.")
    thinking_token_budget: int | None = Field(
        None, ge=0, le=MAX_THINKING_TOKENS, description="Extension; most tokens of the reasoning, which then ends."
    )

    @model_validator(mode="after")
    def _check_top_logprobs(self) -> ChatCompletionRequest:
        if self.top_logprobs and not self.logprobs:
            raise refused(".top_logprobs", self.top_logprobs, "0 or null where logprobs is not true")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def most_reasoning(self) -> int | None:
        return self.thinking_token_budget

    @property
    def num_top_logprobs(self) -> int | None:
        """The number of log probabilities per token; None if the client wants none."""
        return (self.top_logprobs or 0) if self.logprobs else None

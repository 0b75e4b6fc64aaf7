"""Anthropic's ``POST /v1/messages``: its fields, and the chat that they become."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from farsight.core.errors import InvalidValueError
from farsight.core.images import ImageFile
from farsight.services.api.field_groups import MAX_SCHEMA_DEPTH, MAX_TOOLS, Name
from farsight.services.api.fields import MAX_STOP_STRINGS, NO_EFFECT, NeutralOnly, StrictModel, needed, shown
from farsight.services.api.pictures.content import (
    MixedContent,
    NoPicture,
    content_of,
    picture_from,
    web_picture,
)
from farsight.services.api.schemas import ChatCompletionRequest
from farsight.tokenization.grammars.rewriting import nesting

_MEDIA_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

_BLOCK_NEUTRAL: dict[str, NeutralOnly] = {
    "cache_control": NO_EFFECT,
    "citations": NeutralOnly(([], {"enabled": False}), "citations are not supported"),
}


class Block(StrictModel):
    """A part of a message. Which fields it has depends on its type; ``chat_messages`` checks them."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = _BLOCK_NEUTRAL | {"caller": NO_EFFECT, "title": NO_EFFECT}

    type: str
    text: str | None = None
    id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256)
    input: dict[str, Any] | None = None
    tool_use_id: str | None = Field(None, max_length=256)
    content: str | list[Block] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    source: dict[str, Any] | None = None


class MessageTurn(StrictModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class MessagesTool(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        "cache_control": NO_EFFECT,
        "eager_input_streaming": NO_EFFECT,
        "input_examples": NO_EFFECT,
        "defer_loading": NeutralOnly((False,), "all tools are shown to the model"),
        "allowed_callers": NO_EFFECT,
    }

    name: Name
    type: Literal["custom"] | None = None
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class MessagesToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(StrictModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1)
    display: str | None = None


class OutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(StrictModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


_NEUTRAL: dict[str, NeutralOnly] = {
    "metadata": NO_EFFECT,
    "cache_control": NO_EFFECT,
    "betas": NO_EFFECT,
    "inference_geo": NO_EFFECT,
    "speed": NO_EFFECT,
    "service_tier": NeutralOnly(("auto", "standard_only"), "there is one tier"),
    "container": NeutralOnly((), "nothing is run here"),
    "mcp_servers": NeutralOnly(([],), "no server is asked from here"),
    "context_management": NeutralOnly(({}, {"edits": []}), "the conversation is taken as it is"),
}


class CountTokensRequest(StrictModel):
    """``POST /v1/messages/count_tokens``"""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = _NEUTRAL

    model: str | None = None
    messages: list[MessageTurn] = Field(min_length=1)
    system: str | list[Block] | None = None
    tools: list[MessagesTool] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self) -> ChatCompletionRequest:
        """The chat that this is.

        Raises:
            ValidationError: A field of the chat cannot be as it is here.
        """
        return ChatCompletionRequest.model_validate(self.chat_fields())

    def chat_fields(self) -> dict[str, Any]:
        messages = [] if self.system is None else [{"role": "system", "content": _text(self.system, "system")}]
        for index, message in enumerate(self.messages):
            messages += chat_messages(message, f"messages[{index}]")
        found: dict[str, Any] = {"model": self.model, "messages": messages, **self._tool_fields()}
        if self.thinking is not None:
            found["chat_template_kwargs"] = {"enable_thinking": self.thinking.type != "disabled"}
            found["thinking_token_budget"] = self.thinking.budget_tokens
        if self.output_config is not None and self.output_config.effort is not None:
            found["reasoning_effort"] = {"max": "xhigh"}.get(self.output_config.effort, self.output_config.effort)
        if self.output_config is not None and self.output_config.format is not None:
            schema = {"name": "output", "schema": self.output_config.format.schema_}
            found["response_format"] = {"type": "json_schema", "json_schema": schema}
        return found

    def _tool_fields(self) -> dict[str, Any]:
        if not self.tools:
            return {}
        tools = []
        for tool in self.tools:
            function = {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
            described = {} if tool.description is None else {"description": tool.description}
            tools.append({"type": "function", "function": function | described})
        found: dict[str, Any] = {"tools": tools}
        choice = self.tool_choice
        if choice is not None:
            named = {"type": "function", "function": {"name": choice.name or ""}}
            found["tool_choice"] = {"auto": "auto", "any": "required", "tool": named, "none": "none"}[choice.type]
            found["parallel_tool_calls"] = not choice.disable_parallel_tool_use
        return found


class MessagesRequest(CountTokensRequest):
    """``POST /v1/messages``"""

    max_tokens: int = Field(ge=1)
    stop_sequences: list[str] | None = Field(None, max_length=MAX_STOP_STRINGS)
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    top_p: float | None = Field(None, gt=0, le=1)
    cache_salt: str | None = Field(None, min_length=1, max_length=1024, description="Extension; as for a chat.")

    def chat_fields(self) -> dict[str, Any]:
        names = ("max_tokens", "stream", "temperature", "top_k", "top_p", "cache_salt")
        given = {name: getattr(self, name) for name in names}
        return {**super().chat_fields(), **given, "stop": list(self.stop_sequences or ())}


def chat_messages(message: MessageTurn, place: str) -> list[dict[str, Any]]:
    """A message as those of a chat: each result of a tool is one of its own, before the text beside it.

    Raises:
        InvalidValueError: a block that cannot be in a chat.
    """
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, calls, thoughts = [], [], []
    parts: list[str | ImageFile] = []
    for index, block in enumerate(message.content):
        where = f"{place}.content[{index}]"
        match block.type:
            case "text":
                parts.append(needed(block.text, where, "text"))
            case "image" if message.role == "user":
                parts.append(_picture(block.source, f"{where}.source"))
            case "tool_use" if message.role == "assistant":
                if nesting(block.input, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
                    raise InvalidValueError(f"{where}.input", "a deeper object", f"at most {MAX_SCHEMA_DEPTH} levels")
                function = {"name": needed(block.name, where, "name"), "arguments": json.dumps(block.input or {})}
                calls.append({"id": needed(block.id, where, "id"), "type": "function", "function": function})
            case "tool_result" if message.role == "user":
                content = "" if block.content is None else _content(block.content, f"{where}.content")
                called = needed(block.tool_use_id, where, "tool_use_id")
                results.append({"role": "tool", "tool_call_id": called, "content": content})
            case "thinking" if message.role == "assistant":
                thoughts.append(needed(block.thinking, where, "thinking"))
            case "redacted_thinking":
                continue
            case _:
                expected = "'text', 'image' or 'tool_result' (user), 'tool_use' or 'thinking' (assistant)"
                raise InvalidValueError(f"{where}.type", block.type, expected)
    found: dict[str, Any] = {"role": message.role, "content": content_of(parts)}
    if calls:
        found["tool_calls"] = calls
    if thoughts:
        found["reasoning_content"] = "\n".join(thoughts)
    return [*results, *([found] if parts or calls or thoughts or not results else [])]


def _text(content: str | list[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    for index, block in enumerate(content):
        if block.type != "text":
            raise InvalidValueError(f"{place}[{index}].type", block.type, "'text'")
    return "\n".join(block.text or "" for block in content)


def _content(content: str | list[Block], place: str) -> str | MixedContent:
    """What a tool has answered."""
    if isinstance(content, str):
        return content
    parts: list[str | ImageFile] = []
    for index, block in enumerate(content):
        if block.type not in ("text", "image"):
            raise InvalidValueError(f"{place}[{index}].type", block.type, "'text' or 'image'")
        is_text = block.type == "text"
        parts.append((block.text or "") if is_text else _picture(block.source, f"{place}[{index}].source"))
    return content_of(parts)


def _picture(source: dict[str, Any] | None, place: str) -> ImageFile:
    """The picture of an image block."""
    given = source or {}
    kind = given.get("type")
    if kind not in ("base64", "url"):
        raise InvalidValueError(f"{place}.type", kind, "'base64' or 'url'")
    name = "data" if kind == "base64" else "url"
    if kind == "base64" and given.get("media_type") not in _MEDIA_TYPES:
        raise InvalidValueError(f"{place}.media_type", given.get("media_type"), f"one of {', '.join(_MEDIA_TYPES)}")
    for other in sorted(given.keys() - {"type", "media_type", name}):
        raise InvalidValueError(f"{place}.{other}", given[other], f"only the fields 'type', 'media_type' and {name!r}")
    text, field = given.get(name), f"{place}.{name}"
    if not isinstance(text, str):
        raise InvalidValueError(field, text, "a string")
    try:
        return picture_from(text, field) if kind == "base64" else web_picture(text, field)
    except NoPicture as error:
        raise InvalidValueError(field, shown(text), str(error)) from error

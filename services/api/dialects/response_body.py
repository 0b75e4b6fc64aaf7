"""OpenAI's ``POST /v1/responses``: its fields, and the chat that they become."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, Tag

from farsight.core.errors import InvalidValueError
from farsight.core.images import ImageFile
from farsight.services.api.field_groups import MAX_TOOLS, Name, of_type
from farsight.services.api.fields import MAX_TOP_LOGPROBS, NO_EFFECT, NeutralOnly, StrictModel, is_empty, needed, shown
from farsight.services.api.pictures.content import MixedContent, NoPicture, content_of, picture_of
from farsight.services.api.schemas import ChatCompletionRequest
from farsight.services.api.structured import Schema

MAX_ITEMS = 4096
"""Items of one input."""


class ContentPart(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        "annotations": NO_EFFECT,
        "logprobs": NO_EFFECT,
        "prompt_cache_breakpoint": NO_EFFECT,
        "file_id": NeutralOnly((), "files are not read here, send the picture as image_url"),
    }

    type: str
    text: str | None = None
    image_url: str | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputItem(StrictModel):
    """A message, a call of a function, its output, or reasoning; ``chat_messages`` checks which fields it has."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        "status": NO_EFFECT,
        "phase": NO_EFFECT,
        "encrypted_content": NO_EFFECT,
        "namespace": NO_EFFECT,
        "caller": NO_EFFECT,
    }

    type: str = "message"
    id: str | None = Field(None, max_length=256)
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = Field(None, max_length=256)
    name: str | None = Field(None, max_length=256)
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None


class FunctionTool(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        "defer_loading": NeutralOnly((False,), "all tools are shown to the model"),
        "allowed_callers": NO_EFFECT,
        "output_schema": NO_EFFECT,
    }

    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class CustomInputFormat(StrictModel):
    type: Literal["text", "grammar"]
    definition: str | None = None
    syntax: str | None = None


class CustomToolParam(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = FunctionTool.neutral

    type: Literal["custom"]
    name: Name
    description: str | None = None
    format: CustomInputFormat | None = None


AnyToolParam = Annotated[
    Annotated[FunctionTool, Tag("FunctionTool")] | Annotated[CustomToolParam, Tag("CustomToolParam")],
    of_type({"custom": "CustomToolParam"}, "FunctionTool"),
]


class NamedToolParam(StrictModel):
    type: Literal["function", "custom"]
    name: Name

    def for_chat(self) -> dict[str, Any]:
        return {"type": self.type, self.type: {"name": self.name}}


class AllowedToolsParam(StrictModel):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[NamedToolParam] = Field(min_length=1, max_length=MAX_TOOLS)


ToolChoiceParam = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[NamedToolParam, Tag("NamedToolParam")]
    | Annotated[AllowedToolsParam, Tag("AllowedToolsParam")],
    of_type({"function": "NamedToolParam", "custom": "NamedToolParam", "allowed_tools": "AllowedToolsParam"}, "str"),
]


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = Field(None, max_length=256)
    description: str | None = None
    strict: bool | None = None
    schema_: Schema | None = Field(None, alias="schema")


class TextConfig(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {"verbosity": NO_EFFECT}

    format: TextFormat | None = None


class Reasoning(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        "summary": NO_EFFECT,
        "generate_summary": NO_EFFECT,
        "context": NO_EFFECT,
        "mode": NO_EFFECT,
    }

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None


class ResponsesRequest(StrictModel):
    """``POST /v1/responses``"""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {
        "safety_identifier": NO_EFFECT,
        "stream_options": NO_EFFECT,
        "prompt_cache_retention": NO_EFFECT,
        "include": NO_EFFECT,
        "max_tool_calls": NO_EFFECT,
        "service_tier": NeutralOnly(("auto", "default"), "there is one tier"),
        "conversation": NeutralOnly((), "conversations are not stored, send them as items of input"),
        "prompt": NeutralOnly((), "prompts are not stored, send the text as input"),
        "truncation": NeutralOnly(("disabled",), "a conversation that is too long is refused"),
        "moderation": NeutralOnly((), "nothing is moderated"),
    }

    model: str | None = None
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_ITEMS)]
    instructions: str | None = None
    tools: list[AnyToolParam] | None = Field(None, max_length=MAX_TOOLS)
    tool_choice: ToolChoiceParam | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    stream: bool | None = None
    store: bool | None = Field(
        None, description="Keep the response, so that others can go on with it; if null, as the server is set up."
    )
    background: bool | None = Field(None, description="Answer at once, and compute the response; store must be true.")
    previous_response_id: str | None = Field(
        None, min_length=1, max_length=256, description="A stored response that the input goes on with."
    )
    metadata: dict[str, str] | None = None
    user: str | None = None
    prompt_cache_key: str | None = Field(None, min_length=1, max_length=1024)
    seed: int | None = Field(None, ge=-1, lt=2**64, description="Extension; as for a chat.")
    stop: str | list[str] | None = Field(None, description="Extension; as for a chat.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Extension; as for a chat.")

    def items(self) -> list[dict[str, Any]]:
        """The input as items."""
        if isinstance(self.input, str):
            return [{"type": "message", "role": "user", "content": self.input}]
        return [item.model_dump(mode="json", exclude_none=True) for item in self.input]

    def chat(self, earlier: Sequence[dict[str, Any]] = ()) -> ChatCompletionRequest:
        """The chat that this is.

        Args:
            earlier: Items of the conversation that the input goes on with.

        Raises:
            ApiError, ValidationError: A field cannot be in a chat.
        """
        messages = [] if self.instructions is None else [{"role": "system", "content": self.instructions}]
        known = [InputItem.model_validate(item) for item in earlier]
        if isinstance(self.input, str):
            messages += [*chat_messages(known), {"role": "user", "content": self.input}]
        else:
            messages += chat_messages([*known, *self.input])
        same = ("model", "temperature", "top_p", "stream", "prompt_cache_key", "user", "seed", "stop")
        fields: dict[str, Any] = {name: getattr(self, name) for name in (*same, "chat_template_kwargs")}
        fields |= {"messages": messages, "max_completion_tokens": self.max_output_tokens, **self._tool_fields()}
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _response_format(self.text.format)
        return ChatCompletionRequest.model_validate(fields)

    def _tool_fields(self) -> dict[str, Any]:
        choice: Any = self.tool_choice
        if not self.tools:
            return {"tool_choice": choice} if isinstance(choice, str) else {}
        if isinstance(choice, NamedToolParam):
            choice = choice.for_chat()
        elif isinstance(choice, AllowedToolsParam):
            named = {"mode": choice.mode, "tools": [each.for_chat() for each in choice.tools]}
            choice = {"type": choice.type, choice.type: named}
        return {
            "tools": [_tool_of_chat(tool) for tool in self.tools],
            "tool_choice": choice,
            "parallel_tool_calls": self.parallel_tool_calls,
        }


def _tool_of_chat(tool: FunctionTool | CustomToolParam) -> dict[str, Any]:
    fields = tool.model_dump(exclude_none=True, exclude={"type"})
    if isinstance(tool, CustomToolParam) and tool.format is not None and tool.format.type == "grammar":
        grammar = tool.format.model_dump(exclude_none=True, exclude={"type"})
        fields["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": tool.type, tool.type: fields}


def _response_format(given: TextFormat) -> dict[str, Any]:
    if given.type != "json_schema":
        return {"type": given.type}
    if given.schema_ is None:
        raise InvalidValueError("text.format.schema", None, "a JSON Schema")
    return {"type": "json_schema", "json_schema": {"name": given.name, "schema": given.schema_}}


def chat_messages(items: list[InputItem]) -> list[dict[str, Any]]:
    """The messages of a chat: calls that follow each other are those of one answer.

    Raises:
        InvalidValueError: an item that cannot be in a chat.
    """
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(items):
        place = f"input[{index}]"
        match item.type:
            case "message":
                role = needed(item.role, place, "role")
                _assistant(messages, role).update({"content": _content(item.content, f"{place}.content")})
            case "function_call":
                function = {
                    "name": needed(item.name, place, "name"),
                    "arguments": needed(item.arguments, place, "arguments"),
                }
                call = {"id": needed(item.call_id, place, "call_id"), "type": "function", "function": function}
                _assistant(messages, "assistant", open_only=True).setdefault("tool_calls", []).append(call)
            case "custom_tool_call":
                custom = {"name": needed(item.name, place, "name"), "input": needed(item.input, place, "input")}
                call = {"id": needed(item.call_id, place, "call_id"), "type": "custom", "custom": custom}
                _assistant(messages, "assistant", open_only=True).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                called = needed(item.call_id, place, "call_id")
                content = _content(item.output, f"{place}.output")
                messages.append({"role": "tool", "tool_call_id": called, "content": content})
            case "reasoning":
                parts = item.content or item.summary or []
                if not is_empty(parts):
                    thought = _content(parts, place)
                    if isinstance(thought, MixedContent):
                        raise InvalidValueError(place, "a picture", "text alone in reasoning")
                    messages.append({"role": "assistant", "reasoning_content": thought})
            case _:
                expected = "'message', 'function_call', 'custom_tool_call', their '..._output', or 'reasoning'"
                raise InvalidValueError(f"{place}.type", item.type, expected)
    return messages


def _assistant(messages: list[dict[str, Any]], role: str, *, open_only: bool = False) -> dict[str, Any]:
    """The message that an item belongs to: that of the assistant before it, where it goes on with it."""
    last = messages[-1] if messages else {}
    goes_on = role == "assistant" and last.get("role") == "assistant" and (open_only or "content" not in last)
    if not goes_on:
        messages.append({"role": role})
    return messages[-1]


_TEXTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")


def _content(content: str | list[ContentPart] | None, place: str) -> str | MixedContent:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidValueError(place, None, "a string or a list of texts and pictures")
    return content_of([_part(part, f"{place}[{index}]") for index, part in enumerate(content)])


def _part(part: ContentPart, place: str) -> str | ImageFile:
    if part.type == "input_image":
        field = f"{place}.image_url"
        url = needed(part.image_url, place, "image_url")
        try:
            return picture_of(url, field)
        except NoPicture as error:
            raise InvalidValueError(field, shown(url), str(error)) from error
    if part.type not in _TEXTS or part.text is None:
        expected = "'input_text' or 'output_text', with a text, or 'input_image', with an image_url"
        raise InvalidValueError(f"{place}.type", part.type, expected)
    return part.text

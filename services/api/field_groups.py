"""Groups of fields that requests of several endpoints have: tools, beam search, deadlines and tiers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from farsight.core.request import FLEX, NO_SLO, Slo
from farsight.services.api.fields import MAX_PRIORITY, NO_EFFECT, NeutralOnly, StrictModel, is_empty, refused
from farsight.services.api.generation import BeamParams
from farsight.tokenization.grammars.rewriting import nesting

MAX_TOOLS = 128

MAX_SCHEMA_CHARS = 64 * 1024
"""Limit of all tools of a request together, as JSON text."""

MAX_SCHEMA_DEPTH = 64

MAX_CALLS = 128
"""In one message of the history."""

_NAME = r"^[a-zA-Z0-9_.\-]{1,128}$"

Name = Annotated[str, Field(pattern=_NAME)]


class FunctionDefinition(StrictModel):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="JSON Schema of an object; no arguments if not given.")
    strict: bool | None = Field(None, description="Whether a call that the model chooses to make follows the schema.")


class ToolDefinition(StrictModel):
    neutral: ClassVar[Mapping[str, NeutralOnly]] = {"cache_control": NO_EFFECT}

    type: Literal["function"]
    function: FunctionDefinition


class InputGrammar(StrictModel):
    definition: str = Field(min_length=1)
    syntax: Literal["regex", "lark"]

    @model_validator(mode="after")
    def _check_syntax(self) -> InputGrammar:
        if self.syntax == "lark":
            raise refused(
                ".syntax", "lark", "'regex': calls are written as JSON, inside of which no Lark grammar holds"
            )
        return self


class InputFormat(StrictModel):
    type: Literal["text", "grammar"]
    grammar: InputGrammar | None = None

    @model_validator(mode="after")
    def _check_grammar(self) -> InputFormat:
        if (self.grammar is None) == (self.type == "grammar"):
            expected = "an object with definition and syntax" if self.grammar is None else "null where type is 'text'"
            raise refused(".grammar", None if self.grammar is None else "an object", expected)
        return self


class CustomDefinition(StrictModel):
    name: Name
    description: str | None = None
    format: InputFormat | None = Field(None, description="What the input follows; any text if not given.")


class CustomTool(StrictModel):
    """A tool that takes one text. The model knows it as a function of one argument, since templates know functions."""

    type: Literal["custom"]
    custom: CustomDefinition

    @property
    def function(self) -> FunctionDefinition:
        text: dict[str, Any] = {"type": "string"}
        if self.custom.format is not None and self.custom.format.grammar is not None:
            text["pattern"] = f"^(?:{self.custom.format.grammar.definition})$"
        schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
        return FunctionDefinition(
            name=self.custom.name, description=self.custom.description, parameters=schema, strict=True
        )


def of_type(by_type: Mapping[str, str], otherwise: str) -> Discriminator:
    """Chooses among models by their ``type``; tags are their names, which errors leave out of a field's path."""

    def tag_of(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
        return by_type.get(kind, otherwise) if isinstance(kind, str) else otherwise

    return Discriminator(tag_of)


AnyTool = Annotated[
    Annotated[ToolDefinition, Tag("ToolDefinition")] | Annotated[CustomTool, Tag("CustomTool")],
    of_type({"custom": "CustomTool"}, "ToolDefinition"),
]


class NamedFunction(StrictModel):
    name: Name


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction

    @property
    def name(self) -> str:
        return self.function.name


class NamedCustomTool(StrictModel):
    type: Literal["custom"]
    custom: NamedFunction

    @property
    def name(self) -> str:
        return self.custom.name


AnyNamedTool = Annotated[
    Annotated[NamedTool, Tag("NamedTool")] | Annotated[NamedCustomTool, Tag("NamedCustomTool")],
    of_type({"custom": "NamedCustomTool"}, "NamedTool"),
]


class ToolSubset(StrictModel):
    mode: Literal["auto", "required"]
    tools: list[AnyNamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedTools(StrictModel):
    """All tools are shown to the model, so that its prompt stays; only these can be called."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSubset


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("str")]
    | Annotated[NamedTool, Tag("NamedTool")]
    | Annotated[NamedCustomTool, Tag("NamedCustomTool")]
    | Annotated[AllowedTools, Tag("AllowedTools")],
    of_type({"function": "NamedTool", "custom": "NamedCustomTool", "allowed_tools": "AllowedTools"}, "str"),
]


class CalledFunction(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str = Field(description="A JSON object, as text.")


class ToolCall(StrictModel):
    """A call that an earlier answer made."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {"index": NO_EFFECT}

    id: str = Field(max_length=256)
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Chat templates take arguments as an object, and write it in the form of their model."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        if not isinstance(arguments, dict):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": self.type, "function": function}


class CalledCustom(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: str


class CustomToolCall(StrictModel):
    """A call of a custom tool that an earlier answer made."""

    neutral: ClassVar[Mapping[str, NeutralOnly]] = {"index": NO_EFFECT}

    id: str = Field(max_length=256)
    type: Literal["custom"]
    custom: CalledCustom

    def for_template(self) -> dict[str, Any]:
        """As the call of the function that the model knows."""
        function = {"name": self.custom.name, "arguments": {"input": self.custom.input}}
        return {"id": self.id, "type": "function", "function": function}


AnyCall = Annotated[
    Annotated[ToolCall, Tag("ToolCall")] | Annotated[CustomToolCall, Tag("CustomToolCall")],
    of_type({"custom": "CustomToolCall"}, "ToolCall"),
]


def _check_size(tools: list[Any]) -> None:
    if len(tools) > MAX_TOOLS:
        raise refused(".tools", f"{len(tools)} tools", f"a list of up to {MAX_TOOLS} tools")
    if nesting(tools, MAX_SCHEMA_DEPTH) > MAX_SCHEMA_DEPTH:
        raise refused(".tools", "schemas that are nested too deeply", f"at most {MAX_SCHEMA_DEPTH} levels")
    size = len(json.dumps(tools))
    if size > MAX_SCHEMA_CHARS:
        raise refused(".tools", f"{size} characters", f"at most {MAX_SCHEMA_CHARS} characters of all tools together")


class ToolFields(StrictModel):
    """The fields of a chat that concern tools."""

    tools: list[AnyTool] | None = Field(
        None,
        max_length=MAX_TOOLS,
        description=f"Functions and custom tools that the model may call; up to {MAX_TOOLS}.",
    )
    tool_choice: ToolChoice | None = Field(
        None, description="'auto' if there are tools; 'required' and a named tool make the output a call."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may hold several calls; true.")

    @model_validator(mode="before")
    @classmethod
    def _check_bounds(cls, data: Any) -> Any:
        """Checks number, depth and size, before any single tool is looked at."""
        tools = data.get("tools") if isinstance(data, dict) else None
        if isinstance(tools, list):
            _check_size(tools)
        return data

    @model_validator(mode="after")
    def _check_tools(self) -> ToolFields:
        names = [tool.function.name for tool in self.tools or ()]
        double = next((name for index, name in enumerate(names) if name in names[:index]), None)
        if double is not None:
            raise refused(".tools", double, "each name once")
        kinds = {(tool.type, tool.function.name) for tool in self.tools or ()}
        for place, chosen in self._chosen:
            if (chosen.type, chosen.name) not in kinds:
                expected = f"one of {[name for kind, name in sorted(kinds) if kind == chosen.type]}"
                raise refused(f".tool_choice{place}.{chosen.type}.name", chosen.name, expected)
        if self.tool_choice == "required" and not names:
            raise refused(".tool_choice", "required", "'none' or 'auto' where there are no tools")
        for index, tool in enumerate(self.tools or ()):
            kind = (tool.function.parameters or {}).get("type", "object")
            if kind != "object":
                raise refused(f".tools[{index}].function.parameters.type", kind, "'object'")
        return self

    @property
    def _chosen(self) -> list[tuple[str, NamedTool | NamedCustomTool]]:
        """The tools that ``tool_choice`` names, each with its place there."""
        match self.tool_choice:
            case NamedTool() | NamedCustomTool() as one:
                return [("", one)]
            case AllowedTools() as several:
                return [(f".allowed_tools.tools[{i}]", each) for i, each in enumerate(several.allowed_tools.tools)]
        return []

    @property
    def usable_tools(self) -> list[FunctionDefinition]:
        """The functions that this request may call; a custom tool is one."""
        if self.tool_choice == "none":
            return []
        functions = [tool.function for tool in self.tools or ()]
        names = {chosen.name for _, chosen in self._chosen}
        return [each for each in functions if each.name in names] if names else functions

    @property
    def custom_tools(self) -> tuple[str, ...]:
        """Names of the tools that take a text."""
        return tuple(tool.custom.name for tool in self.tools or () if isinstance(tool, CustomTool))

    @property
    def limits_tools(self) -> bool:
        """Whether the model is shown tools that it may not call."""
        return isinstance(self.tool_choice, AllowedTools)

    @property
    def may_call_in_parallel(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool | NamedCustomTool)

    @property
    def must_call(self) -> bool:
        choice = self.tool_choice
        if isinstance(choice, AllowedTools):
            return choice.allowed_tools.mode == "required"
        return choice == "required" or isinstance(choice, NamedTool | NamedCustomTool)


MAX_BEAMS = 16
"""Most beams of one prompt: each token of the answer takes a request for each of them."""

_KEEPS_LIKELIEST = "beam search keeps the likeliest outputs of the model itself"

_NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "stream": (),
    "stop": ((),),
    "stop_token_ids": (),
    "min_tokens": (0,),
    "prompt_logprobs": (),
    "logit_bias": ((),),
    "allowed_token_ids": (),
    "bad_words": (),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "benchmark_len": (),
    "tools": (),
    "echo": (),
}
"""Fields that beam search does not serve, and values that say nothing beside null, false and what is empty."""


class BeamFields(StrictModel):
    """Beam search, as vLLM spells it."""

    use_beam_search: bool | None = Field(
        None, description="Extension; the n likeliest outputs that a search with n beams finds, best first."
    )
    length_penalty: float | None = Field(
        None, ge=-10, le=10, description="Extension; power of the length that a beam's log probability is divided by."
    )

    def beams(self, n: int, *, ignore_eos: bool) -> BeamParams | None:
        """Returns the search that is asked for; None for none."""
        if not self.use_beam_search:
            return None
        return BeamParams(n, 1.0 if self.length_penalty is None else self.length_penalty, ignore_eos)

    def check_beams(self, n: int, constraint_field: str) -> None:
        """
        Args:
            constraint_field: Name of the field that says what the output must follow; empty if there is none.

        Raises:
            PydanticCustomError: A field that beam search does not serve, or that means nothing without it.
        """
        if not self.use_beam_search:
            if self.length_penalty not in (None, 1):
                raise refused(".length_penalty", self.length_penalty, "1 or null where use_beam_search is not true")
            return
        if n > MAX_BEAMS:
            raise refused(".n", n, f"at most {MAX_BEAMS} with use_beam_search")
        best_of = getattr(self, "best_of", None)
        if best_of not in (None, n):
            raise refused(".best_of", best_of, f"n = {n} where use_beam_search is true")
        if constraint_field:
            raise refused(
                f".{constraint_field}", "a constraint", f"null where use_beam_search is true: {_KEEPS_LIKELIEST}"
            )
        for name, neutral in _NOT_WITH_BEAMS.items():
            value = getattr(self, name, None)
            if not is_empty(value) and value not in neutral:
                raise refused(f".{name}", value, f"null where use_beam_search is true: {_KEEPS_LIKELIEST}")


MAX_TARGET_S = 86_400.0
"""Longest time that a client may name, in seconds: a day."""

PRIORITY_TIER = -1
"""Priority of the tier ``priority``, as far as the tenant may use it."""

Tier = Literal["default", "priority", "flex"]


class SloFields(StrictModel):
    """What a client wants of its stream; seconds."""

    ttft: float | None = Field(None, gt=0, le=MAX_TARGET_S, description="From the receipt to the first token.")
    tpot: float | None = Field(None, gt=0, le=MAX_TARGET_S, description="Between two tokens after that, in the mean.")


class TargetFields(StrictModel):
    """Deadlines, and OpenAI's tiers."""

    deadline_s: float | None = Field(
        None,
        gt=0,
        le=MAX_TARGET_S,
        description="Extension; seconds from the receipt within which the answer is to end.",
    )
    slo: SloFields | None = Field(None, description="Extension; times of tokens that are to be kept.")
    service_tier: Literal["auto", "default", "priority", "flex"] | None = Field(
        None, description="'priority' goes before 'default'; 'flex' takes what the others leave."
    )
    priority: int | None = Field(
        None, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="Extension; lower goes first; 0 if not given."
    )

    @model_validator(mode="after")
    def _check_tier(self) -> TargetFields:
        if self.service_tier == "priority" and self.priority is not None:
            raise refused(".priority", self.priority, "null where service_tier is 'priority', which is one itself")
        return self

    @property
    def tier(self) -> Tier | None:
        """The tier that is asked for; None where the client names none."""
        match self.service_tier:
            case "auto":
                return "default"
            case tier:
                return tier

    @property
    def request_priority(self) -> int:
        """``Request.priority``, before the tenant's range."""
        if self.service_tier == "priority":
            return PRIORITY_TIER
        return (self.priority or 0) + (FLEX if self.service_tier == "flex" else 0)

    @property
    def request_slo(self) -> Slo:
        """``Request.slo``."""
        if self.slo is None or not (self.slo.ttft or self.slo.tpot):
            return NO_SLO
        return Slo(self.slo.ttft or NO_SLO.ttft_s, self.slo.tpot or NO_SLO.tpot_s)

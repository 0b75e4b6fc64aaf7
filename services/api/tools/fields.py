"""OpenAI's ``tools`` and ``tool_choice``, and the calls in the messages of a conversation, within bounds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from services.api.fields import NO_EFFECT, NeutralOnly, refused
from services.api.strict import StrictModel
from tokenization.grammars.rewriting import nesting

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


class NamedFunction(StrictModel):
    name: Name


class NamedTool(StrictModel):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


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

    tools: list[ToolDefinition] | None = Field(
        None, max_length=MAX_TOOLS, description=f"Functions that the model may call; up to {MAX_TOOLS}."
    )
    tool_choice: ToolChoice | None = Field(
        None, description="'auto' if there are tools; 'required' and a named function make the output a call."
    )
    parallel_tool_calls: bool | None = Field(None, description="Whether an answer may hold several calls; true.")

    @model_validator(mode="before")
    @classmethod
    def _check_bounds(cls, data: Any) -> Any:
        """Number, depth and size, before any single tool is looked at."""
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
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise refused(".tool_choice.function.name", self.tool_choice.function.name, f"one of {names}")
        if self.tool_choice == "required" and not names:
            raise refused(".tool_choice", "required", "'none' or 'auto' where there are no tools")
        for index, tool in enumerate(self.tools or ()):
            kind = (tool.function.parameters or {}).get("type", "object")
            if kind != "object":
                raise refused(f".tools[{index}].function.parameters.type", kind, "'object'")
        return self

    @property
    def usable_tools(self) -> list[FunctionDefinition]:
        """The functions that this request may call."""
        if self.tool_choice == "none":
            return []
        functions = [tool.function for tool in self.tools or ()]
        if isinstance(self.tool_choice, NamedTool):
            return [each for each in functions if each.name == self.tool_choice.function.name]
        return functions

    @property
    def may_call_in_parallel(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

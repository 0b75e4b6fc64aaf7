"""The families of chat templates: how each writes its tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Style = Literal["object", "named", "harmony", "pythonic", "tags", "keys", "gemma", "python"]

THINK_BEGIN = "<think>"
THINK_END = "</think>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How the calls of an output are written. One call is ``before_name`` NAME ``after_name`` ARGUMENTS ``after_call``.

    Attributes:
        style: How a parser reads them: JSON objects that hold the name; a name, then JSON; the channels of harmony;
            calls as in Python. The last four are read whole between two markers (``regions.py``).
        begin, separator, end: Before, between and behind the calls of an output.
        openers: Texts that begin calls; empty where calls are recognised by their own form.
        dropped: Further texts that frame calls and are no part of an answer.
        name_pattern: Style ``named``: what stands between an opener and the arguments; its group is the name.
        closer: Behind calls that are read whole.
        parallel: Whether an output may hold several calls.
        think: What begins reasoning, and what ends it.
        signs: A template that holds one of these texts is of this family.
    """

    name: str
    style: Style
    before_name: str
    after_name: str
    after_call: str
    begin: str = ""
    separator: str = ""
    end: str = ""
    openers: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    name_pattern: str = ""
    closer: str = ""
    parallel: bool = True
    think: tuple[str, str] = (THINK_BEGIN, THINK_END)
    signs: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that a tokenizer may have as one control token each."""
        return self.openers + self.dropped


_HARMONY_MARKERS = ("<|channel|>", "<|message|>", "<|constrain|>", "<|start|>", "<|end|>")

_ALL = (
    ToolFormat(
        name="harmony",
        style="harmony",
        before_name="<|channel|>commentary to=functions.",
        after_name=" <|constrain|>json<|message|>",
        after_call="",
        openers=_HARMONY_MARKERS,
        parallel=False,
        think=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        signs=("<|channel|>",),
    ),
    ToolFormat(
        name="deepseek-v3.1",
        style="named",
        before_name="<\uff5ctool▁call▁begin\uff5c>",
        after_name="<\uff5ctool▁sep\uff5c>",
        after_call="<\uff5ctool▁call▁end\uff5c>",
        begin="<\uff5ctool▁calls▁begin\uff5c>",
        end="<\uff5ctool▁calls▁end\uff5c>",
        openers=("<\uff5ctool▁call▁begin\uff5c>",),
        dropped=(
            "<\uff5ctool▁calls▁begin\uff5c>",
            "<\uff5ctool▁calls▁end\uff5c>",
            "<\uff5ctool▁call▁end\uff5c>",
            "<\uff5ctool▁sep\uff5c>",
        ),
        name_pattern=r"\s*([^\s<`{]+)\s*(?:<\uff5ctool▁sep\uff5c>)?\s*",
        signs=(
            "<\uff5ctool▁call▁begin\uff5c>' + tool['function']['name']",
            "<\uff5ctool▁call▁begin\uff5c>'+ tool['function']['name']",
        ),
    ),
    ToolFormat(
        name="deepseek-v3",
        style="named",
        before_name="<\uff5ctool▁call▁begin\uff5c>function<\uff5ctool▁sep\uff5c>",
        after_name="\n```json\n",
        after_call="\n```<\uff5ctool▁call▁end\uff5c>",
        begin="<\uff5ctool▁calls▁begin\uff5c>",
        separator="\n",
        end="<\uff5ctool▁calls▁end\uff5c>",
        openers=("<\uff5ctool▁call▁begin\uff5c>",),
        dropped=(
            "<\uff5ctool▁calls▁begin\uff5c>",
            "<\uff5ctool▁calls▁end\uff5c>",
            "<\uff5ctool▁call▁end\uff5c>",
            "<\uff5ctool▁sep\uff5c>",
        ),
        name_pattern=r"\s*(?:function\s*<\uff5ctool▁sep\uff5c>)?\s*([^\s<`{]+)\s*(?:<\uff5ctool▁sep\uff5c>)?\s*(?:```(?:json)?\s*)?",
        signs=("<\uff5ctool▁call",),
    ),
    ToolFormat(
        name="mistral",
        style="object",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_call="}",
        begin="[TOOL_CALLS][",
        separator=", ",
        end="]",
        openers=("[TOOL_CALLS]",),
        name_pattern=r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*",
        signs=("[TOOL_CALLS][", "[TOOL_CALLS] ["),
    ),
    ToolFormat(
        name="mistral-args",
        style="named",
        before_name="[TOOL_CALLS]",
        after_name="[ARGS]",
        after_call="",
        openers=("[TOOL_CALLS]",),
        dropped=("[ARGS]",),
        think=("[THINK]", "[/THINK]"),
        name_pattern=r"\s*([^\s\[{]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*",
        signs=("[TOOL_CALLS]",),
    ),
    ToolFormat(
        name="granite",
        style="object",
        before_name='{"name": "',
        after_name='", "arguments": ',
        after_call="}",
        begin="<|tool_call|>[",
        separator=", ",
        end="]",
        openers=("<|tool_call|>",),
        signs=("<|tool_call|>",),
    ),
    ToolFormat(
        name="llama3",
        style="object",
        before_name='{"name": "',
        after_name='", "parameters": ',
        after_call="}",
        separator="; ",
        dropped=("<|python_tag|>",),
        signs=("<|python_tag|>", '"parameters": dictionary of argument name'),
    ),
    ToolFormat(
        name="qwen3-coder",
        style="tags",
        before_name="<tool_call>\n<function=",
        after_name=">\n",
        after_call="</function>\n</tool_call>",
        separator="\n",
        openers=("<tool_call>",),
        closer="</tool_call>",
        dropped=("</tool_call>",),
        signs=("<function=",),
    ),
    ToolFormat(
        name="glm4.5",
        style="keys",
        before_name="<tool_call>",
        after_name="\n",
        after_call="</tool_call>",
        separator="\n",
        openers=("<tool_call>",),
        closer="</tool_call>",
        dropped=("</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        signs=("<arg_key>",),
    ),
    ToolFormat(
        name="gemma4",
        style="gemma",
        before_name="<|tool_call>call:",
        after_name="{",
        after_call="}<tool_call|>",
        openers=("<|tool_call>",),
        closer="<tool_call|>",
        dropped=("<tool_call|>", '<|"|>', "<|channel>"),
        think=("<|channel>thought\n", "<channel|>"),
        signs=("<|tool_call>",),
    ),
    ToolFormat(
        name="lfm2",
        style="python",
        before_name="",
        after_name="(",
        after_call=")",
        begin="<|tool_call_start|>[",
        separator=", ",
        end="]<|tool_call_end|>",
        openers=("<|tool_call_start|>",),
        closer="<|tool_call_end|>",
        dropped=("<|tool_call_end|>",),
        signs=("<|tool_call_start|>", "<|tool_list_start|>"),
    ),
    ToolFormat(
        name="hermes",
        style="object",
        before_name='<tool_call>\n{"name": "',
        after_name='", "arguments": ',
        after_call="}\n</tool_call>",
        separator="\n",
        openers=("<tool_call>",),
        dropped=("</tool_call>",),
        signs=("<tool_call>",),
    ),
    ToolFormat(
        name="pythonic",
        style="pythonic",
        before_name="",
        after_name="(",
        after_call=")",
        begin="[",
        separator=", ",
        end="]",
        signs=("func_name1(", "tool_code", "[func("),
    ),
)
"""In the order in which a template is asked for their signs."""

FORMATS: dict[str, ToolFormat] = {each.name: each for each in _ALL}

DEFAULT_FORMAT = "hermes"
"""For a template that takes no tools: a forced call has this form, since it needs no control token."""


def format_of(template: str) -> ToolFormat:
    """The family of a chat template, by its text."""
    found = (each for each in _ALL if any(sign in template for sign in each.signs))
    return next(found, FORMATS[DEFAULT_FORMAT])


def reasons(template: str) -> bool:
    """Whether outputs under this template may begin with reasoning."""
    found = format_of(template)
    return found.style == "harmony" or found.think[1] in template

"""Outputs of every family taken apart, whole and character by character.

The cases marked with a name are outputs of the tests of vLLM 0.32.0 (``tests/tool_parsers``, Apache-2.0), taken as
data; the others are written from the formats that the models' authors publish.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from farsight.tokenization.tool_formats.formats import DEFAULT_FORMAT, format_of, reasons
from farsight.tokenization.tool_formats.parser import parser_of
from farsight.tokenization.tool_formats.parts import (
    CallArguments,
    CallEnd,
    CallStart,
    OutputForm,
    Part,
    ReasoningPart,
    SentCalls,
    TextPart,
)
from farsight.tokenization.tool_formats.pythonic import read_call

TOOLS = ("get_weather", "searchTool", "getOpenIncidentsTool", "add", "invalidTool", "f")
ROME = '{"city": "Rome"}'

Case = tuple[str, str, str, list[tuple[str, Any]]]
"""Format, output, text of the answer, calls."""


def deepseek(word: str) -> str:
    inner = word.replace("_", "\u2581")
    return f"<\uff5c{inner}\uff5c>"


CASES: dict[str, Case] = {
    "hermes": (
        "hermes",
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>',
        "",
        [("get_weather", {"city": "Rome"})],
    ),
    "hermes: two, and text": (
        "hermes",
        f'Let me see.\n<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}\n</tool_call>',
        "Let me see.",
        [("get_weather", {"city": "Rome"}), ("add", {"a": 1, "b": [2, {"c": "}"}]})],
    ),
    "hermes: arguments before the name": (
        "hermes",
        '<tool_call>{"arguments": {"a": "\\"}{\\\\"}, "name": "add"}</tool_call>',
        "",
        [("add", {"a": '"}{\\'})],
    ),
    "hermes: no arguments": ("hermes", '<tool_call>\n{"name": "add"}\n</tool_call>', "", [("add", {})]),
    "hermes: arguments in a string": (
        "hermes",
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
        "",
        [("add", {"a": 1})],
    ),
    "hermes: not JSON": ("hermes", "<tool_call>no</tool_call>", "<tool_call>no", []),
    "hermes: cut": ("hermes", 'Hm <tool_call>\n{"na', 'Hm <tool_call>{"na', []),
    "hermes: an angle": ("hermes", "1 < 2 <tool", "1 < 2 <tool", []),
    "vLLM test_llama3_json: with arguments": (
        "llama3",
        '{"name": "searchTool", "parameters": {"query": "test query", "limit": 10}}',
        "",
        [("searchTool", {"query": "test query", "limit": 10})],
    ),
    "vLLM test_llama3_json: simple": (
        "llama3",
        'Here is the result: {"name": "getOpenIncidentsTool", "parameters": {}} Would you like to know more?',
        "Here is the result: Would you like to know more?",
        [("getOpenIncidentsTool", {})],
    ),
    "vLLM test_llama3_json: arguments key": (
        "llama3",
        '{"name": "searchTool", "arguments": {"query": "test"}}',
        "",
        [("searchTool", {"query": "test"})],
    ),
    "vLLM test_llama3_json: multiple": (
        "llama3",
        '{"name": "searchTool", "parameters": {"query": "test1"}} ; '
        '{"name": "getOpenIncidentsTool", "parameters": {}}; {"name": "searchTool", "parameters": {"query": "test2"}}',
        "",
        [("searchTool", {"query": "test1"}), ("getOpenIncidentsTool", {}), ("searchTool", {"query": "test2"})],
    ),
    "vLLM test_llama3_json: no JSON": (
        "llama3",
        "This is just some text without any tool calls",
        "This is just some text without any tool calls",
        [],
    ),
    "vLLM test_llama3_json: invalid JSON": (
        "llama3",
        '{"name": "invalidTool", "parameters": {invalid json}',
        '{"name": "invalidTool", "parameters": {invalid json}',
        [],
    ),
    "llama3: python tag": (
        "llama3",
        f'<|python_tag|>{{"type": "function", "name": "get_weather", "parameters": {ROME}}}',
        "",
        [("get_weather", {"city": "Rome"})],
    ),
    "llama3: code": ("llama3", 'x = {"a": {"b": 1}}; {}', 'x = {"a": {"b": 1}}; {}', []),
    "llama3: a tool that is not there": (
        "llama3",
        '{"name": "rm", "parameters": {}}',
        '{"name": "rm", "parameters": {}}',
        [],
    ),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {ROME}}}, {{"name": "add", "arguments": {{"a": 1}}}}]',
        "",
        [("get_weather", {"city": "Rome"}), ("add", {"a": 1})],
    ),
    "mistral: newer": (
        "mistral-args",
        f'[TOOL_CALLS]get_weather[ARGS]{ROME}[TOOL_CALLS]add{{"a": 1}}',
        "",
        [("get_weather", {"city": "Rome"}), ("add", {"a": 1})],
    ),
    "qwen 3.5": (
        "qwen3-coder",
        "Hm.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n< 1\n</parameter>\n"
        "<parameter=days>\n[1, 2]\n"
        "</parameter>\n<parameter=f>\nTrue\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=add>\n<parameter=zip>\n00123\n</parameter>\n</function>\n</tool_call>",
        "Hm.",
        [("get_weather", {"city": "Rome\n< 1", "days": [1, 2], "f": True}), ("add", {"zip": "00123"})],
    ),
    "qwen 3.5: no function": ("qwen3-coder", "<tool_call>\n{}\n</tool_call>", "<tool_call> {}", []),
    "qwen 3.5: cut": ("qwen3-coder", "<tool_call>\n<function=add>\n<para", "<tool_call> <function=add> <para", []),
    "glm 4.5": (
        "glm4.5",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        '<arg_key>x</arg_key>\n<arg_value>{"a": 1}</arg_value>\n</tool_call>\n<tool_call>add</tool_call>',
        "",
        [("get_weather", {"city": "Rome", "x": {"a": 1}}), ("add", {})],
    ),
    "gemma 4": (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>Rome, {a}: "b"<|"|>,days:[1,2.5],ok:true,'
        'x:{<|"|>k<|"|>:null,y:{}}}<tool_call|>'
        "<|tool_call>call:add{}<tool_call|>",
        "",
        [
            ("get_weather", {"city": 'Rome, {a}: "b"', "days": [1, 2.5], "ok": True, "x": {"k": None, "y": {}}}),
            ("add", {}),
        ],
    ),
    "gemma 4: not closed": ("gemma4", "<|tool_call>call:f{a:[1}<tool_call|>", "<|tool_call>call:f{a:[1}", []),
    "gemma 4: deep": (
        "gemma4",
        f"<|tool_call>call:f{{a:{'[' * 99}<tool_call|>",
        f"<|tool_call>call:f{{a:{'[' * 99}",
        [],
    ),
    "lfm2": (
        "lfm2",
        'Yes. <|tool_call_start|>[get_weather(city="Rome"), add()]<|tool_call_end|>Checking.',
        "Yes. Checking.",
        [("get_weather", {"city": "Rome"}), ("add", {})],
    ),
    "lfm2: code": ("lfm2", "<|tool_call_start|>import os<|tool_call_end|>", "<|tool_call_start|>import os", []),
    "granite": (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ROME}}}]',
        "",
        [("get_weather", {"city": "Rome"})],
    ),
    "deepseek v3": (
        "deepseek-v3",
        deepseek("tool_calls_begin")
        + "\n".join(
            f"{deepseek('tool_call_begin')}function{deepseek('tool_sep')}{name}\n```json\n{ROME}\n```"
            f"{deepseek('tool_call_end')}"
            for name in ("get_weather", "f")
        )
        + deepseek("tool_calls_end"),
        "",
        [("get_weather", {"city": "Rome"}), ("f", {"city": "Rome"})],
    ),
    "deepseek v3.1": (
        "deepseek-v3.1",
        f"Yes.{deepseek('tool_calls_begin')}{deepseek('tool_call_begin')}get_weather{deepseek('tool_sep')}{ROME}"
        f"{deepseek('tool_call_end')}{deepseek('tool_calls_end')}",
        "Yes.",
        [("get_weather", {"city": "Rome"})],
    ),
    "harmony": (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{ROME}",
        "",
        [("get_weather", {"city": "Rome"})],
    ),
    "harmony: recipient in the role": (
        "harmony",
        f"<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{ROME}<|call|>",
        "",
        [("f", {"city": "Rome"})],
    ),
    "harmony: an answer": (
        "harmony",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>1 < 2<|return|>",
        "1 < 2",
        [],
    ),
    "pythonic": (
        "pythonic",
        "[get_weather(city='Rome', days=[1, 2.5], ok=True, x={'a': None}), add()]",
        "",
        [("get_weather", {"city": "Rome", "days": [1, 2.5], "ok": True, "x": {"a": None}}), ("add", {})],
    ),
    "pythonic: quotes": (
        "pythonic",
        """[f(a="it's ) \\" ok", b='[\\'')]""",
        "",
        [("f", {"a": "it's ) \" ok", "b": "['"})],
    ),
    "pythonic: a list": ("pythonic", "[1, 2] is a list", "[1, 2] is a list", []),
    "pythonic: an unknown function": ("pythonic", "[exec(a=1)] x", "[exec(a=1)] x", []),
    "pythonic: code": ("pythonic", "[f(a=open('/etc/passwd'))]", "[f(a=open('/etc/passwd'))]", []),
}


def parts_of(form: OutputForm, output: str, step: int) -> list[Part]:
    parser = parser_of(form)
    parts: list[Part] = []
    for at in range(0, len(output), step):
        parts += parser.feed(output[at : at + step])
    return parts + parser.end()


def texts(parts: list[Part], kind: type[TextPart] | type[ReasoningPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def calls(parts: Sequence[Part]) -> list[tuple[str, Any]]:
    found: list[list[str]] = []
    for part in parts:
        if isinstance(part, CallStart):
            found.append([part.name, ""])
        elif isinstance(part, CallArguments):
            found[part.index][1] += part.text
    return [(name, json.loads(text or "{}")) for name, text in found]


@pytest.mark.parametrize("step", [1, 3, 10_000])
@pytest.mark.parametrize("name", CASES)
def test_an_output_is_taken_apart(name: str, step: int) -> None:
    family, output, text, expected = CASES[name]
    texts_of_tools = frozenset({("get_weather", "city"), ("add", "zip")})
    parts = parts_of(OutputForm(family, TOOLS, texts=texts_of_tools), output, step)
    assert calls(parts) == expected
    assert {part.index for part in parts if isinstance(part, CallEnd)} == set(range(len(expected)))
    assert " ".join(texts(parts, TextPart).split()) == text
    if family != "harmony":
        assert texts(parts_of(OutputForm(family), output, step), TextPart) == output, "without tools all is text"


REASONED = [
    ("<think>\nLet me\n\nsee.\n</think>\n\nIt is 4.", False, "Let me\n\nsee.", "It is 4."),
    ("Let me see.\n</think>\n\nIt is 4.", True, "Let me see.", "It is 4."),
    ("It is 4, <think> is a word.", False, "", "It is 4, <think> is a word."),
    ("<think>without an end", False, "without an end", ""),
    ("<think></think>It.", False, "", "It."),
    ("a < b </thin", True, "a < b </thin", ""),
]


@pytest.mark.parametrize("step", [1, 4, 10_000])
@pytest.mark.parametrize(("output", "begun", "reasoning", "text"), REASONED)
def test_reasoning_is_apart(output: str, begun: bool, reasoning: str, text: str, step: int) -> None:
    for tools in ((), TOOLS):
        parts = parts_of(OutputForm("hermes", tools, reasons=True, in_reasoning=begun), output, step)
        assert texts(parts, ReasoningPart) == reasoning
        assert texts(parts, TextPart) == text
        hidden = OutputForm("hermes", tools, reasons=True, in_reasoning=begun, shows_reasoning=False)
        assert not texts(parts_of(hidden, output, step), ReasoningPart)
    output = f'<think>\nHm.\n</think>\n\n<tool_call>\n{{"name": "f", "arguments": {ROME}}}\n</tool_call>'
    parts = parts_of(OutputForm("hermes", TOOLS, reasons=True), output, step)
    assert (texts(parts, ReasoningPart), texts(parts, TextPart)) == ("Hm.", "")
    assert calls(parts) == [("f", {"city": "Rome"})], "a call behind reasoning"


@pytest.mark.parametrize("step", [1, 10_000])
def test_families_begin_reasoning_in_their_own_way(step: int) -> None:
    for family, output in (
        ("gemma4", "<|channel>thought\nHm.\n<channel|>It is 4."),
        ("mistral-args", "[THINK]Hm.[/THINK]It is 4."),
        ("qwen3-coder", "<think>\nHm.\n</think>\n\nIt is 4."),
    ):
        for tools in ((), TOOLS):
            parts = parts_of(OutputForm(family, tools, reasons=True), output, step)
            assert (texts(parts, ReasoningPart), texts(parts, TextPart)) == ("Hm.", "It is 4.")
    assert reasons("<|tool_call>{{ x }}<|channel>thought\n<channel|>") and reasons("[TOOL_CALLS]x[ARGS][/THINK]")
    assert not reasons("[TOOL_CALLS]x[ARGS]")


def test_a_long_output_costs_time_in_proportion_to_its_length() -> None:
    """Each character is looked at a bounded number of times, whatever the cuts."""
    output = '{"name": "f", "parameters": {"a": "' + "x{" * 100_000 + '"}}'
    assert len(parts_of(OutputForm("llama3", TOOLS), output, 7)) > 1000
    output = "<tool_call>\n<function=f>\n<parameter=a>\n" + "<p" * 100_000 + "\n</parameter>\n</function>\n</tool_call>"
    assert len(parts_of(OutputForm("qwen3-coder", TOOLS), output, 7)) == 3


@pytest.mark.parametrize(
    "text", ["f(" + "[" * 5000, "f(a=" + "[" * 5000 + "]" * 5000 + ")", "f(1)", "f(a=1", "f(a='x)", "1()"]
)
def test_what_is_no_call_in_python_is_refused(text: str) -> None:
    assert read_call(text) is None


TEMPLATES = {
    "{% if tools %}<tool_call></tool_call>{% endif %}": "hermes",
    "{{ '[TOOL_CALLS] [' }}": "mistral",
    "{{ '<tool_call>\\n<function=' + tool_call.name + '>' }}": "qwen3-coder",
    "<tool_call>{{ tc.name }}<arg_key>{{ k }}</arg_key>": "glm4.5",
    "{{ '<|tool_call>call:' + name }}<|channel>": "gemma4",
    '{{ "<|tool_call_start|>[" }}': "lfm2",
    "{{ '[TOOL_CALLS]' + name + '[ARGS]' }}": "mistral-args",
    "<|start_of_role|>assistant<|end_of_role|><|tool_call|>": "granite",
    "<|python_tag|>{{ message }}": "llama3",
    "<|channel|>analysis": "harmony",
    f"{deepseek('tool_call_begin')}function": "deepseek-v3",
    "{{ messages }}": DEFAULT_FORMAT,
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_says_its_family(template: str) -> None:
    assert format_of(template).name == TEMPLATES[template]
    assert reasons("{{ content.split('</think>')[-1] }}") and reasons("<|channel|>") and not reasons("{{ messages }}")


FIRST, SECOND = (f'<tool_call>{{"name": "f", "arguments": {{"a": {value}}}}}</tool_call>' for value in (1, 2))
SENT: list[tuple[str, list[Any], list[Any]]] = [
    (FIRST + SECOND, [{"a": 1}, {"a": 2}], [{"a": 1}]),
    (FIRST + FIRST, [{"a": 1}], [{"a": 1}]),
    (FIRST + '<tool_call>{"arguments": {"a":1 }, "name": "f"}</tool_call>' + SECOND, [{"a": 1}, {"a": 2}], [{"a": 1}]),
    (FIRST + SECOND[:-15], [{"a": 1}], [{"a": 1}]),
    (FIRST + SECOND[:-13], [{"a": 1}, {"a": 2}], [{"a": 1}]),  # the arguments are whole, the call's brace is not
]


@pytest.mark.parametrize("step", [1, 7, 10_000])
@pytest.mark.parametrize("as_written", [False, True])
@pytest.mark.parametrize(("output", "several", "one"), SENT)
def test_calls_are_sent_whole_and_once(
    output: str, several: list[Any], one: list[Any], as_written: bool, step: int
) -> None:
    parts = parts_of(OutputForm("hermes", TOOLS, forced=True), output, step)
    for parallel, expected in ((True, several), (False, one)):
        sent = SentCalls(parallel=parallel, as_written=as_written)
        assert calls(sent.read(parts)) == [("f", each) for each in expected]
        assert sent.num_calls == len(expected)
    begun = SentCalls(parallel=True, as_written=as_written).read(
        parts_of(OutputForm("hermes", TOOLS, forced=True), FIRST[:-15], step)
    )
    assert begun[:1] == ([CallStart(0, "f")] if as_written else []), "only what is being written is sent in part"

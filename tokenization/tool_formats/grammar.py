"""The grammar of the calls that an output may hold, in the syntax of ``llguidance`` (a dialect of Lark)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from farsight.tokenization.grammars.sources import inline_schema
from farsight.tokenization.tool_formats.formats import ToolFormat
from farsight.tokenization.tool_formats.parts import Tool
from farsight.tokenization.tool_formats.regions import is_text

MAX_PARALLEL = 16
"""Most calls of one output: a model that repeats itself ends."""

TokenId = Callable[[str], int | None]
"""The id of a text that is one special token, which no other token writes; None for any other text."""


def no_tokens(_text: str) -> None:
    """For a check without a model: markers are plain texts."""


class GrammarWriter:
    """Writes grammars for one format and its tools.

    Args:
        token_id: Looks into the model's tokenizer, or is ``no_tokens``.

    Raises:
        UnwritableTool: The format cannot express the schema of a tool.
    """

    def __init__(self, tool_format: ToolFormat, tools: Sequence[Tool], token_id: TokenId) -> None:
        self._format = tool_format
        self._tools = tools
        self._token_id = token_id
        self._rules: list[str] = []

    def forced(self, *, parallel: bool, reasons: bool, in_reasoning: bool) -> str:
        """One call or, where ``parallel``, one or more; reasoning may go before."""
        calls = self._calls(parallel)
        lead = self._lead(reasons, in_reasoning)
        return self._grammar(f"{lead} {calls}")

    def calls_or(self, answer: Any, *, parallel: bool, reasons: bool, in_reasoning: bool) -> str:
        """One call or several, or JSON that a schema describes; no other text.

        Args:
            answer: JSON Schema.
        """
        lead = self._lead(reasons, in_reasoning)
        head = self._text("<|channel|>final<|message|>") if self._format.style == "harmony" else ""
        self._rules.append(f"answer: {head} {inline_schema(answer if isinstance(answer, dict) else {})}")
        options = f"(answer | {self._calls(parallel)})" if self._tools else "answer"
        return self._grammar(f"{lead} {options}")

    def free(self, *, parallel: bool, reasons: bool, in_reasoning: bool) -> str:
        """Text in which every call is well formed."""
        lead = self._lead(reasons, in_reasoning)
        written = self._format
        if written.style == "harmony":
            answer = f"{self._text('<|channel|>final<|message|>')} TEXT"
            return self._grammar(f"{lead} ({self._calls(parallel)} | {answer})", text=True)
        if not written.openers:
            # Calls have no opener: an output that begins like one is one.
            calls = self._calls(parallel)
            first = re.escape((written.begin + written.before_name)[0])
            self._rules.append(f"OTHER: /[^{first}](?s:.*)/")
            return self._grammar(f"{lead} (OTHER | {calls})?")
        opening = written.begin + written.before_name
        opener = next(each for each in (*written.openers, *written.dropped) if opening.startswith(each))
        once = not parallel or bool(written.begin)
        rest = self._calls(parallel and bool(written.begin), opener)
        region = f"{self._until(opener)} {rest}"
        times = "?" if once else f"{{0,{MAX_PARALLEL}}}"
        return self._grammar(f"{lead} ({region}){times} TEXT", text=True)

    def _grammar(self, start: str, *, text: bool = False) -> str:
        rules = [f"start: {start}", *self._rules]
        if text:
            rules.append("TEXT: /(?s:.*)/")
        return "\n".join(rules)

    def _lead(self, reasons: bool, in_reasoning: bool) -> str:
        if not reasons:
            return ""
        if self._format.style == "harmony":
            opened, closed = map(self._text, self._format.think)
            self._rules += ["THOUGHT: /(?s:.*)/", f"lead: ({opened} THOUGHT {closed})?"]
            return "lead"
        begin, end = self._format.think
        inner = f"{self._until(end)} SPACE"
        self._rules += [
            "SPACE: /[ \\n]{0,4}/",
            f"lead: {inner}" if in_reasoning else f"lead: ({self._text(begin)} {inner})?",
        ]
        return "lead"

    def _until(self, marker: str) -> str:
        """Text up to the first of a marker, and the marker."""
        name = f"until_{len(self._rules)}"
        if self._token_id(marker) is not None:
            self._rules.append(f"{name}: BEFORE_{name.upper()} {self._text(marker)}")
            self._rules.append(f"BEFORE_{name.upper()}: /(?s:.*)/")
        else:
            self._rules.append(f"{name}[lazy]: /(?s:.*){_escaped(marker)}/")
        return name

    def _calls(self, parallel: bool, written: str = "") -> str:
        """Name of the rule of all calls of an output.

        Args:
            written: A text that the calls begin with and that is there already.
        """
        found = self._format
        begin, before_name = found.begin, found.before_name
        if begin:
            begin = begin.removeprefix(written)
        else:
            before_name = before_name.removeprefix(written)
        first = self._call_rule("call", before_name)
        items = first
        if parallel and found.parallel:
            following = first if before_name == found.before_name else self._call_rule("again", found.before_name)
            items = f"{first} ({self._text(found.separator)} {following}){{0,{MAX_PARALLEL - 1}}}"
        self._rules.append(f"calls: {self._text(begin)} {items} {self._text(found.end)}")
        return "calls"

    def _call_rule(self, name: str, before_name: str) -> str:
        self._rules.append(f"{name}: {' | '.join(f'{name}_{index}' for index in range(len(self._tools)))}")
        for index, tool in enumerate(self._tools):
            is_object = self._format.style == "object"
            shown = json.dumps(tool.name, ensure_ascii=False)[1:-1] if is_object else tool.name
            head = self._text(f"{before_name}{shown}{self._format.after_name}")
            self._rules.append(f"{name}_{index}: {head} arguments_{index} {self._text(self._format.after_call)}")
            if not any(rule.startswith(f"arguments_{index}:") for rule in self._rules):
                self._arguments(index, json.loads(tool.parameters))
        return name

    def _arguments(self, index: int, schema: dict[str, Any]) -> None:
        if self._format.style in ("pythonic", "python"):
            self._keywords(index, schema, "{}=", _python_value, _COMMA)
        elif self._format.style == "tags":
            self._keywords(index, schema, "<parameter={}>\n", self._tagged_value, "", "\n</parameter>\n")
        elif self._format.style == "keys":
            before = "<arg_key>{}</arg_key>\n<arg_value>"
            self._keywords(index, schema, before, self._tagged_value, "", "</arg_value>\n")
        elif self._format.style == "gemma":
            self._keywords(index, schema, "{}:", self._gemma_value, _GEMMA_COMMA)
        else:
            self._rules.append(f"arguments_{index}: {inline_schema(schema)}")

    def _keywords(
        self,
        index: int,
        schema: dict[str, Any],
        before: str,
        write: Callable[[Any, dict[str, Any]], str],
        comma: str,
        after: str = "",
    ) -> None:
        """``a=1, b="x"``: the required ones, then any of the others, each in the order of the schema.

        Args:
            before, after: What stands before a value, with the name's place, and behind it.
            write: Returns the rule of a value, by its schema and the definitions that it may refer to.
            comma: Between two of them.
        """
        shared: dict[str, Any] = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
        required = set(schema.get("required", ()))
        properties: dict[str, Any] = schema.get("properties", {})
        unknown = schema.keys() - _PYTHONIC_KEYS
        wrong = [name for name in properties.keys() | required if not re.fullmatch(_NAMES[self._format.style], name)]
        if unknown or wrong or required - properties.keys():
            found = ", ".join(sorted(map(str, [*unknown, *wrong, *(required - properties.keys())])))
            raise UnwritableTool(self._tools[index].name, f"calls of {self._format.name} cannot write: {found}")
        names = sorted(properties, key=lambda name: name not in required)
        keywords = []
        for number, name in enumerate(names):
            rule = f"keyword_{index}_{number}"
            head, value = self._text(before.format(name)), write(properties[name], shared)
            self._rules.append(f"{rule}: {head} {value} {self._text(after)}")
            keywords.append((rule, name in required))
        self._rules.append(f"arguments_{index}: {_listed(keywords, comma)}")

    def _tagged_value(self, schema: Any, shared: dict[str, Any]) -> str:
        """Writes text as it is, else JSON; no text of a forced call holds ``<``, which begins the closing tag."""
        return _plain(schema) if is_text(schema) else inline_schema({**shared, **(schema or {})})

    def _gemma_value(self, schema: Any, shared: dict[str, Any]) -> str:
        """Writes texts between ``<|"|>``, names without; the rule of a value within values is one of its own."""
        schema = _resolved(schema, shared)
        kind = schema.get("type")
        if isinstance(kind, list):
            return f"({' | '.join(self._gemma_value({**schema, 'type': each}, shared) for each in kind)})"
        if is_text(schema):
            quote = self._text('<|"|>')
            return f"{quote} {_plain(schema)} {quote}"
        if kind == "array" and isinstance(schema.get("items"), dict):
            item, most = self._gemma_value(schema["items"], shared), min(schema.get("maxItems", MAX_ITEMS), MAX_ITEMS)
            least = schema.get("minItems", 0)
            more = f'{item} ("," {item}){{{max(least - 1, 0)},{max(most - 1, 0)}}}'
            return f'"[" {more if least else f"({more})?" if most else ""} "]"'
        if kind == "object" and schema.get("properties"):
            required = set(schema.get("required", ()))
            names = sorted(schema["properties"], key=lambda name: name not in required)
            keywords = []
            for name in names:
                rule = f"inner_{len(self._rules)}"
                self._rules.append("")  # the place of its number
                place = len(self._rules) - 1
                value = self._gemma_value(schema["properties"][name], shared)
                self._rules[place] = f"{rule}: {self._text(f'{name}:')} {value}"
                keywords.append((rule, name in required))
            return f'"{{" {_listed(keywords, _GEMMA_COMMA)} "}}"'
        return inline_schema(schema)

    def _text(self, text: str) -> str:
        """A text as Lark writes it; markers that are special tokens go by their ids."""
        if not text:
            return ""
        parts = []
        thoughts = [each for each in self._format.think if self._token_id(each) is not None]
        markers = sorted((*self._format.markers, *thoughts), key=len, reverse=True)
        for part in re.split(f"({'|'.join(map(re.escape, markers))})", text):
            token_id = self._token_id(part) if part in markers else None
            if token_id is not None:
                parts.append(f"<[{token_id}]>")
            elif part:
                parts.append(json.dumps(part, ensure_ascii=False))
        return " ".join(parts)


class UnwritableTool(ValueError):
    """A tool whose arguments the model's format cannot express.

    Attributes:
        tool: Its name.
        reason: Why.
    """

    def __init__(self, tool: str, reason: str) -> None:
        super().__init__(f"{tool}: {reason}")
        self.tool = tool
        self.reason = reason


_PYTHONIC_KEYS = frozenset(
    (
        "type",
        "properties",
        "required",
        "additionalProperties",
        "$defs",
        "definitions",
        "title",
        "description",
        "$schema",
    )
)


_COMMA = '", "'
_GEMMA_COMMA = '","'
MAX_ITEMS = 64
"""Most values of a list that Gemma 4 is made to write."""

_IDENTIFIER = r"[^\W\d]\w*"
_NAMES = {"pythonic": _IDENTIFIER, "python": _IDENTIFIER, "tags": r"[^>\s<]+", "keys": r"[^\s<]+", "gemma": r"[\w.-]+"}
"""By style: which names arguments may have."""


def _plain(schema: dict[str, Any]) -> str:
    """Returns the rule of a text as it is."""
    known = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if known is not None:
        return f"({' | '.join(json.dumps(each, ensure_ascii=False) for each in known)})"
    if "pattern" in schema:
        return f"/{schema['pattern'].removeprefix('^').removesuffix('$')}/"
    return f"/[^<]{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}/"


def _resolved(schema: Any, shared: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema with what it refers to."""
    place = schema.get("$ref", "") if isinstance(schema, dict) else ""
    found: Any = shared if place.startswith("#/") else schema
    for part in place.removeprefix("#/").split("/") if place.startswith("#/") else ():
        found = found.get(part, {}) if isinstance(found, dict) else {}
    return found if isinstance(found, dict) else {}


def _python_value(schema: Any, shared: dict[str, Any]) -> str:
    if isinstance(schema, dict) and schema.get("type") == "boolean" and not schema.keys() & {"enum", "const"}:
        return '("True" | "False")'
    if isinstance(schema, dict) and schema.get("type") == "null":
        return '"None"'
    return inline_schema({**shared, **schema} if isinstance(schema, dict) else {})


def _listed(keywords: Sequence[tuple[str, bool]], comma: str) -> str:
    """The keywords with commas between those that are there."""
    required = [rule for rule, is_required in keywords if is_required]
    others = [rule for rule, is_required in keywords if not is_required]
    if required:
        return " ".join([*_joined(required, comma), *_optional(others, comma)])
    chains = [" ".join([rule, *_optional(others[number + 1 :], comma)]) for number, rule in enumerate(others)]
    return f"({' | '.join(chains)})?" if chains else '""'


def _joined(rules: Sequence[str], comma: str) -> list[str]:
    return [each for rule in rules for each in (comma, rule)][1:]


def _optional(rules: Sequence[str], comma: str) -> list[str]:
    return [f"({comma} {rule})?" for rule in rules]


def _escaped(text: str) -> str:
    """A text inside of a regular expression of Lark."""
    return re.escape(text).replace("/", "\\/")

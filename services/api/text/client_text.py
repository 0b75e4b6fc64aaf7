"""Chat templates that remember which characters of the rendered text a client wrote.

A string from a client is a ``ClientText``; one that a template or the model's own files hold is a ``str``. Templates
see its true characters, so they branch, search and cut as ever. Joining and cutting keep track of where the characters
are. Every other operation that a template has on strings goes through this module's environment: its result is
compared with that of the same operation on strings whose client characters are filled, and where the two do not
agree, all of the result is the client's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

Span = tuple[int, int]

_FILL = "\ue000"
_KEPT = frozenset('"\\')
"""Beside spaces not filled: JSON writes them in several characters."""
_CUTTING = frozenset(
    (
        *("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "split", "rsplit", "splitlines", "partition"),
        *("rpartition", "lower", "upper", "title", "capitalize", "swapcase", "casefold", "expandtabs"),
    )
)
"""Methods of a string whose results hold characters of that string alone."""
_CUTTING_FILTERS = frozenset(("trim", "lower", "upper", "title", "capitalize"))


class ClientText(str):
    """A text, and the places in it that a client wrote.

    Attributes:
        spans: Begin and end of each, in characters, in order and apart.
    """

    __slots__ = ("spans",)
    spans: tuple[Span, ...]

    def __str__(self) -> str:
        return self  # str() would lose the places

    def __add__(self, other: str) -> str:
        if type(other) is str:
            return placed(str.__add__(self, other), self.spans)
        return joined((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return joined((other, self)) if isinstance(other, str) else NotImplemented

    def __getitem__(self, key: Any) -> str:
        return _traced(str.__getitem__, (self, key), {})  # type: ignore[no-any-return]

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __mod__(self, other: Any) -> str:
        return _traced(str.__mod__, (self, other), {})  # type: ignore[no-any-return]

    def __mul__(self, count: Any) -> str:
        return joined([self] * count)

    __rmul__ = __mul__

    @property
    def is_whole(self) -> bool:
        """Whether all of it is the client's."""
        return self.spans == ((0, len(self)),)


def client_value(value: Any) -> Any:
    """A JSON value from a client: all its strings become ``ClientText``."""
    if isinstance(value, str):
        return placed(value, ((0, len(value)),))
    if isinstance(value, list | tuple):
        return [client_value(each) for each in value]
    if isinstance(value, dict):
        return {client_value(key): client_value(each) for key, each in value.items()}
    return value


def spans_of(text: str) -> tuple[Span, ...]:
    """The places in a rendered text that clients wrote."""
    return text.spans if isinstance(text, ClientText) else ()


def joined(parts: Iterable[str]) -> str:
    """As ``"".join``."""
    known = list(parts)
    spans: list[Span] = []
    at = 0
    for part in known:
        if type(part) is ClientText:
            spans += [(at + begin, at + end) for begin, end in part.spans]
        at += len(part)
    text = "".join(known)
    return placed(text, tuple(spans)) if spans else text


class ClientTextEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox whose every operation on strings keeps track of what is the client's."""

    concat = staticmethod(joined)

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.code_generator_class = _Generator
        self.intercepted_binops = frozenset(["%"])

    def trace_filters(self) -> None:
        """To be called when all filters are there."""
        self.filters = {name: _traced_filter(each, name in _CUTTING_FILTERS) for name, each in self.filters.items()}

    @staticmethod
    def join_values(values: Iterable[Any]) -> str:
        """The operator ``~``."""
        return joined([str(value) for value in values])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return _traced(self.binop_table[operator], (left, right), {})

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        result = super().call(context, function, *args, **kwargs)
        if not isinstance(result, str | list | tuple | bytes) or isinstance(result, ClientText):
            return result
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str):
            name = function.__name__
            if name in _CUTTING and isinstance(owner, ClientText) and owner.is_whole:
                return _all_client(result)

            def again(text: str, *args: Any, **kwargs: Any) -> Any:
                return super(ClientTextEnvironment, self).getattr(text, name)(*args, **kwargs)

            return _compared(result, again, (owner, *args), kwargs)
        if (
            type(result) is str
            and owner is None
            and not isinstance(function, Macro | LoopContext)
            and _holds(args, kwargs)
        ):
            return _all_client(result)  # a function of its own; macros and blocks are joined from what is known
        return result


class _Generator(CodeGenerator):
    """Compiles ``~`` to a call of the environment."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_values((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


def _traced_filter(function: Callable[..., Any], cuts: bool) -> Callable[..., Any]:
    @wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        if cuts and isinstance(args[0], ClientText) and args[0].is_whole:
            return _all_client(function(*args, **kwargs))
        return _traced(function, tuple(_listed(each) for each in args), kwargs)

    return traced


def _listed(value: Any) -> Any:
    """Something that can be gone through twice."""
    return list(value) if isinstance(value, Iterator | KeysView | ValuesView | ItemsView) else value


def _traced(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = function(*args, **kwargs)
    if not isinstance(result, str) or isinstance(result, ClientText):
        return result
    if function is str.__getitem__ and args[0].is_whole:
        return _all_client(result)
    return _compared(result, function, args, kwargs)


def _compared(result: Any, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result, with the places that differ when the client's characters are filled."""
    if not _holds(args, kwargs):
        return result
    if isinstance(result, bytes):
        raise TemplateError("the template turns text into bytes, which is not supported")
    try:
        filled = function(*_filled(args), **_filled(kwargs))
    except Exception:  # a function that looks at what the characters are
        return _all_client(result)
    if isinstance(result, str):
        return _aligned(result, filled)
    if type(filled) is not type(result) or len(filled) != len(result):
        return _all_client(result)
    return [_aligned(text, other) for text, other in zip(result, filled, strict=True)]  # of str.split and its like


def _aligned(text: str, filled: Any) -> str:
    if not isinstance(filled, str) or len(filled) != len(text):
        return placed(text, ((0, len(text)),))
    spans: list[Span] = []
    for index, (char, other) in enumerate(zip(text, filled, strict=True)):
        if other == _FILL:
            if spans and spans[-1][1] == index:
                spans[-1] = (spans[-1][0], index + 1)
            else:
                spans.append((index, index + 1))
        elif other != char:
            return placed(text, ((0, len(text)),))
    return placed(text, tuple(spans)) if spans else str.__str__(text)


def _all_client(result: Any) -> Any:
    if isinstance(result, bytes):
        raise TemplateError("the template turns text into bytes, which is not supported")
    return client_value(result)


def placed(text: str, spans: tuple[Span, ...]) -> ClientText:
    """A text of which a client wrote these places."""
    found = str.__new__(ClientText, text)
    found.spans = spans
    return found


def _filled(value: Any) -> Any:
    match value:
        case ClientText():
            return _fill(value)
        case list() | tuple():
            return type(value)(_filled(each) for each in value)
        case dict():
            return {_filled(key): _filled(each) for key, each in value.items()}
    return value


def _fill(text: ClientText) -> str:
    parts = []
    at = 0
    for begin, end in text.spans:
        parts.append(str.__getitem__(text, slice(at, begin)))
        chars = str.__getitem__(text, slice(begin, end))
        parts.append("".join(char if char.isspace() or char in _KEPT else _FILL for char in chars))
        at = end
    return "".join([*parts, str.__getitem__(text, slice(at, None))])


def _holds(*values: Any) -> bool:
    """Whether a text of a client is among the values, or inside one of them."""
    for value in values:
        match value:
            case ClientText():
                return True
            case list() | tuple():
                if _holds(*value):
                    return True
            case dict():
                if _holds(*value.keys(), *value.values()):
                    return True
    return False


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's words for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012 - declared so by the base class

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def compile_template(source: str) -> Template:
    """A template ready to render.

    Raises:
        TemplateError: Its syntax is wrong.
    """
    environment = ClientTextEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.trace_filters()
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it escapes nothing for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

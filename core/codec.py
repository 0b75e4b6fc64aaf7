"""msgpack on the wire: ``encode(message) -> bytes`` and ``decode(bytes, Type) -> message``.

A message is ``[schema version, type name, fields...]``; a nested dataclass is the array of its fields. Fields at the
end that hold their defaults are left out; derived ones (``init=False``) always are. Decoding checks every value against
the annotated type and names the field that is wrong. Encoders and decoders are built once a type, because token batches
cross at every step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import types
import typing
from collections.abc import Callable
from enum import IntEnum
from typing import Any, TypeVar

import msgpack

from core.errors import InvalidValueError, MessageError
from core.messages import SCHEMA_VERSION

T = TypeVar("T")
_Decoder = Callable[[Any, str], Any]
_Encoder = Callable[[Any], Any]


def encode(message: Any) -> bytes:
    """The wire form of a message dataclass."""
    kind: Any = type(message)
    body = _encoder(kind)(message)
    packed: bytes = msgpack.packb([SCHEMA_VERSION, type(message).__name__, *body])
    return packed


def decode(data: bytes, expected: type[T]) -> T:
    """The message in ``data``.

    Raises:
        MessageError: not msgpack, another version, another type, or a field of the wrong type; names the field.
    """
    name = expected.__name__
    try:
        raw = msgpack.unpackb(data, use_list=True)
    except (ValueError, msgpack.exceptions.UnpackException) as error:
        raise MessageError(name, data[:40], f"a msgpack message ({error})") from error
    if not isinstance(raw, list) or len(raw) < 2:
        raise MessageError(name, raw, "an array [version, type, fields...]")
    if raw[0] != SCHEMA_VERSION:
        raise MessageError(f"{name}.version", raw[0], f"schema version {SCHEMA_VERSION}")
    if raw[1] != name:
        raise MessageError(f"{name}.type", raw[1], f"a {name} message")
    kind: Any = expected
    message: T = _decoder(kind)(raw[2:], name)
    return message


@functools.cache
def _encoder(kind: Any) -> _Encoder:
    """Returns a function from a value of ``kind`` to what msgpack takes."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_encoder(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _tuple_encoder(args)
    if origin in (types.UnionType, typing.Union):
        inner = _encoder(_optional_inner(kind))
        return lambda value: None if value is None else inner(value)
    return int if isinstance(kind, type) and issubclass(kind, IntEnum) else _same


def _dataclass_encoder(kind: Any) -> _Encoder:
    hints = typing.get_type_hints(kind)
    fields = _wire_fields(kind)
    encoders = [_encoder(hints[field.name]) for field in fields]
    parts = [(i, enc) for i, enc in enumerate(encoders) if enc is not _same]
    if not fields:
        return lambda value: []
    take = operator.attrgetter(*[field.name for field in fields])  # all at once: one call, not one a field
    if len(fields) == 1:
        return lambda value: [encoders[0](take(value))]
    tail = [field.default for field in fields if field.default is not dataclasses.MISSING][::-1]

    def encode_fields(value: Any) -> list[Any]:
        found = list(take(value))
        for default in tail:
            if found[-1] != default:
                break
            found.pop()
        num_kept = len(found)
        for i, enc in parts:
            if i < num_kept:
                found[i] = enc(found[i])
        return found

    return encode_fields


def _wire_fields(kind: Any) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(kind) if field.init]


def _tuple_encoder(args: tuple[Any, ...]) -> _Encoder:
    if len(args) == 2 and args[1] is Ellipsis:
        inner = _encoder(args[0])
        if inner is _same:
            return list
        return lambda value: [inner(item) for item in value]
    parts = [_encoder(arg) for arg in args]
    return lambda value: [enc(item) for enc, item in zip(parts, value, strict=True)]


def _same(value: Any) -> Any:
    return value


@functools.cache
def _decoder(kind: Any) -> _Decoder:
    """Returns a checking function from (msgpack value, field name) to a value of ``kind``."""
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _tuple_decoder(args)
    if origin in (types.UnionType, typing.Union):
        inner = _decoder(_optional_inner(kind))
        return lambda raw, field: None if raw is None else inner(raw, field)
    if issubclass(kind, IntEnum):
        return lambda raw, field: _enum(kind, raw, field)
    if kind is float:
        return _float
    return lambda raw, field: _scalar(kind, raw, field)


def _dataclass_decoder(kind: Any) -> _Decoder:
    hints = typing.get_type_hints(kind)
    fields = _wire_fields(kind)
    parts = [(field.name, _decoder(hints[field.name])) for field in fields]
    num_required = sum(field.default is dataclasses.MISSING for field in fields)

    def decode_fields(raw: Any, field: str) -> Any:
        if not isinstance(raw, list) or not num_required <= len(raw) <= len(parts):
            raise MessageError(field, raw, f"the {len(parts)} fields of {kind.__name__}")
        values = [dec(item, f"{field}.{name}") for (name, dec), item in zip(parts, raw, strict=False)]
        try:
            return kind(*values)
        except InvalidValueError as error:
            raise MessageError(f"{field}.{error.field}", error.value, error.expected) from error

    return decode_fields


def _tuple_decoder(args: tuple[Any, ...]) -> _Decoder:
    repeated = len(args) == 2 and args[1] is Ellipsis
    if repeated and args[0] is int:
        return _int_tuple
    if repeated and args[0] is float:
        return _float_tuple
    parts = [_decoder(arg) for arg in args if arg is not Ellipsis]

    def decode_items(raw: Any, field: str) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise MessageError(field, raw, "an array")
        if repeated:
            return tuple(parts[0](item, f"{field}[{i}]") for i, item in enumerate(raw))
        if len(raw) != len(parts):
            raise MessageError(field, raw, f"an array of {len(parts)}")
        return tuple(dec(item, f"{field}[{i}]") for i, (dec, item) in enumerate(zip(parts, raw, strict=True)))

    return decode_items


def _int_tuple(raw: Any, field: str) -> tuple[int, ...]:
    """Token ids: thousands in a message, so one pass in C decides the common, correct case."""
    if not isinstance(raw, list):
        raise MessageError(field, raw, "an array of integers")
    if not set(map(type, raw)) <= {int}:
        i, bad = next((i, item) for i, item in enumerate(raw) if type(item) is not int)
        raise MessageError(f"{field}[{i}]", bad, "an integer")
    return tuple(raw)


def _float_tuple(raw: Any, field: str) -> tuple[float, ...]:
    """Log probabilities: up to 21 a token; the common case in one pass, as token ids."""
    if not isinstance(raw, list):
        raise MessageError(field, raw, "an array of numbers")
    if set(map(type, raw)) <= {float} and math.isfinite(sum(raw)):
        return tuple(raw)
    return tuple(_float(item, f"{field}[{i}]") for i, item in enumerate(raw))


def _optional_inner(kind: Any) -> Any:
    inner = [arg for arg in typing.get_args(kind) if arg is not types.NoneType]
    if len(inner) != 1:
        raise TypeError(f"messages hold X or X | None, not {kind}")
    return inner[0]


def _scalar(kind: type, raw: Any, field: str) -> Any:
    if type(raw) is not kind:
        raise MessageError(field, raw, f"a value of type {kind.__name__}")
    return raw


def _float(raw: Any, field: str) -> float:
    if type(raw) not in (float, int) or not math.isfinite(raw):
        raise MessageError(field, raw, "a finite number")
    return float(raw)


def _enum(kind: type[IntEnum], raw: Any, field: str) -> IntEnum:
    if type(raw) is not int or raw not in kind._value2member_map_:
        raise MessageError(field, raw, f"one of {[int(member) for member in kind]}")
    return kind(raw)

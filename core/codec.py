"""msgpack on the wire: ``encode(message) -> bytes`` and ``decode(bytes, Type) -> message``.

A message is ``[schema version, type name, fields...]``; a nested dataclass is the array of its fields. Fields at the
end that hold their defaults are left out; derived ones (``init=False``) always are. Many integers in a row, as the
tokens of a prompt, are one binary string: a letter for their size, then little-endian. Decoding checks every value
against the annotated type and names the field that is wrong. Encoders and decoders are built once a type, because token
batches cross at every step.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import sys
import types
import typing
from array import array
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, TypeVar, overload

import msgpack

from farsight.core.errors import InvalidValueError, MessageError
from farsight.core.messages import SCHEMA_VERSION

T = TypeVar("T")
_MANY = 16
"""The codec sends this many integers or more as one binary string."""

_INT_KINDS = ("I", "Q")
"""Array type codes of unsigned integers of 4 and 8 bytes."""

_TOKENS, _INT_BYTES = b"I", 4
"""Letters and sizes of the integer types that a binary string may hold."""

_Decoder = Callable[[Any, str], Any]
_Encoder = Callable[[Any], Any]


def encode(message: Any) -> bytes:
    """Returns the wire form of a message dataclass."""
    kind: Any = type(message)
    body = _encoder(kind)(message)
    packed: bytes = msgpack.packb([SCHEMA_VERSION, type(message).__name__, *body])
    return packed


def decode(data: bytes, expected: type[T], *, keep_packed: bool = False) -> T:
    """Returns the message in ``data``.

    Args:
        keep_packed: Leave tokens as ``PackedInts``, for a receiver that only counts them and passes them on.

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
    message: T = _decoder(kind, keep_packed)(raw[2:], name)
    return message


class PackedInts(Sequence[int]):
    """Integers in wire form, in the place of a tuple: counted and sent on at no cost, but slow to read."""

    __slots__ = ("_values", "packed")

    def __init__(self, packed: bytes) -> None:
        self.packed = packed
        self._values: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return (len(self.packed) - 1) // _INT_BYTES

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if self._values is None:
            self._values = _unpack_ints(self.packed, "packed")
        return self._values[index]


@functools.cache
def _encoder(kind: Any) -> _Encoder:
    """Returns a function from a value of ``kind`` to a value that msgpack takes."""
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
        if args[0] is int:
            return _pack_ints
        inner = _encoder(args[0])
        if inner is _same:
            return list
        return lambda value: [inner(item) for item in value]
    parts = [_encoder(arg) for arg in args]
    return lambda value: [enc(item) for enc, item in zip(parts, value, strict=True)]


def _pack_ints(values: Sequence[int]) -> Any:
    """Returns a binary string; a list where the integers are few, negative, or too large for 8 bytes."""
    if type(values) is PackedInts:
        return values.packed
    if len(values) >= _MANY:
        for kind in _INT_KINDS:
            try:
                packed = array(kind, values)
            except OverflowError:
                continue
            if sys.byteorder == "big":
                packed.byteswap()
            return kind.encode() + packed.tobytes()
    return list(values)


def _unpack_ints(raw: bytes, field: str) -> tuple[int, ...]:
    kind = raw[:1].decode("latin-1")
    values = array(kind if kind in _INT_KINDS else "B")
    if kind not in _INT_KINDS or (len(raw) - 1) % values.itemsize:
        raise MessageError(field, raw[:40], "integers as a binary string")
    values.frombytes(memoryview(raw)[1:])
    if sys.byteorder == "big":
        values.byteswap()
    return tuple(values)


def _same(value: Any) -> Any:
    return value


@functools.cache
def _decoder(kind: Any, keep_packed: bool) -> _Decoder:
    """Returns a checking function from (msgpack value, field name) to a value of ``kind``.

    Names are relative: each caller that catches an error puts its own name before it, so correct values need no names.
    """
    if dataclasses.is_dataclass(kind):
        return _dataclass_decoder(kind, keep_packed)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _tuple_decoder(args, keep_packed)
    if origin in (types.UnionType, typing.Union):
        inner = _decoder(_optional_inner(kind), keep_packed)
        return lambda raw, field: None if raw is None else inner(raw, field)
    if issubclass(kind, IntEnum):
        return lambda raw, field: _enum(kind, raw, field)
    if kind is float:
        return _float
    return _scalar_decoder(kind)


def _dataclass_decoder(kind: Any, keep_packed: bool) -> _Decoder:
    hints = typing.get_type_hints(kind)
    fields = _wire_fields(kind)
    parts = [(field.name, _decoder(hints[field.name], keep_packed)) for field in fields]
    num_required = sum(field.default is dataclasses.MISSING for field in fields)

    def decode_fields(raw: Any, field: str) -> Any:
        if not isinstance(raw, list) or not num_required <= len(raw) <= len(parts):
            raise MessageError(field, raw, f"the {len(parts)} fields of {kind.__name__}")
        try:
            return kind(*[dec(item, name) for (name, dec), item in zip(parts, raw, strict=False)])
        except InvalidValueError as error:
            raise MessageError(f"{field}.{error.field}", error.value, error.expected) from error

    return decode_fields


def _tuple_decoder(args: tuple[Any, ...], keep_packed: bool) -> _Decoder:
    repeated = len(args) == 2 and args[1] is Ellipsis
    if repeated and args[0] is int:
        return _packed_ints if keep_packed else _int_tuple
    if repeated and args[0] is float:
        return _float_tuple
    parts = [_decoder(arg, keep_packed) for arg in args if arg is not Ellipsis]

    def decode_items(raw: Any, field: str) -> tuple[Any, ...]:
        if not isinstance(raw, list):
            raise MessageError(field, raw, "an array")
        if not repeated and len(raw) != len(parts):
            raise MessageError(field, raw, f"an array of {len(parts)}")
        found = []
        try:
            for dec, item in zip(itertools.cycle(parts) if repeated else parts, raw, strict=False):
                found.append(dec(item, ""))  # the number of items found is the index of the wrong one
        except MessageError as error:
            raise MessageError(f"{field}[{len(found)}]{error.field}", error.value, error.expected) from error
        return tuple(found)

    return decode_items


def _packed_ints(raw: Any, field: str) -> Sequence[int]:
    """Leaves tokens in wire form; passes hashes, which are wider, unchanged."""
    if isinstance(raw, bytes) and raw[:1] == _TOKENS and len(raw) % _INT_BYTES == 1:
        return PackedInts(raw)
    return _int_tuple(raw, field)


def _int_tuple(raw: Any, field: str) -> tuple[int, ...]:
    """Checks token ids. A message holds thousands, so one pass in C decides the common, correct case."""
    if isinstance(raw, bytes):
        return _unpack_ints(raw, field)
    if not isinstance(raw, list):
        raise MessageError(field, raw, "an array of integers")
    if not set(map(type, raw)) <= {int}:
        i, bad = next((i, item) for i, item in enumerate(raw) if type(item) is not int)
        raise MessageError(f"{field}[{i}]", bad, "an integer")
    return tuple(raw)


def _float_tuple(raw: Any, field: str) -> tuple[float, ...]:
    """Checks log probabilities, up to 21 a token; one pass decides the common case, as for token ids."""
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


def _scalar_decoder(kind: type) -> _Decoder:
    def decode_scalar(raw: Any, field: str) -> Any:
        if type(raw) is not kind:
            raise MessageError(field, raw, f"a value of type {kind.__name__}")
        return raw

    return decode_scalar


def _float(raw: Any, field: str) -> float:
    if type(raw) not in (float, int) or not math.isfinite(raw):
        raise MessageError(field, raw, "a finite number")
    return float(raw)


def _enum(kind: type[IntEnum], raw: Any, field: str) -> IntEnum:
    if type(raw) is not int or raw not in kind._value2member_map_:
        raise MessageError(field, raw, f"one of {[int(member) for member in kind]}")
    return kind(raw)

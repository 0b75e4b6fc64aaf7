"""The header of a GGUF file: metadata, and where each tensor lies. No length, count or offset of it is trusted.

The layout is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import stat
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from farsight.core.errors import InvalidValueError

MAX_ENTRIES = 65_536
"""Most metadata entries, and most tensors; large models have some hundred of the one and some thousand of the other."""

MAX_STRING = 1 << 24
"""Longest string, in bytes; the longest real ones are chat templates of some thousand characters."""

MAX_ELEMENTS = 1 << 21
"""Most elements of all arrays together; the longest real ones are a vocabulary and its merges, a million at most."""

MAX_HEADER = 1 << 26
"""Most bytes of a header; those of vocabularies with 256k tokens have 16 MB."""

_MAX_DIMENSIONS = 4
_MAX_NAME = 65_535
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32

_NUMBERS: Mapping[int, str] = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "|b1", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
"""numpy's names of the metadata types that are numbers."""

_STRING, _ARRAY = 8, 9

BLOCKS: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56), 34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}  # fmt: skip
"""By the number of a tensor type: its name, the values in a block, the bytes of a block."""


T = TypeVar("T")


class GGUFError(InvalidValueError):
    """A GGUF file that cannot be read; names the file and the field of its header."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies.

    Attributes:
        shape: The rows' dimension first, as in torch.
        kind: A name in ``BLOCKS``; a row is a whole number of its blocks.
        begin: Its first byte in the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    begin: int
    num_bytes: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class GGUFFile:
    """A header.

    Attributes:
        metadata: By key: a number, a string, a list of strings, or a numpy array of numbers.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def value(self, key: str, kind: type, default: Any = None) -> Any:
        """The value of a key; the default where it is missing.

        Raises:
            GGUFError: A value of another kind.
        """
        found = self.metadata.get(key)
        if found is None:
            return default
        if kind is float and type(found) is int:
            found = float(found)
        if type(found) is not kind:
            raise self.error(key, found if np.ndim(found) == 0 else "an array", f"a value of type {kind.__name__}")
        return found

    def strings(self, key: str) -> list[str]:
        """An array of strings; empty where it is missing."""
        found = self.value(key, list, [])
        return list(found)

    def numbers(self, key: str, length: int, default: float) -> list[Any]:
        """An array of so many numbers; where it is missing, so many times the default."""
        found = self.metadata.get(key)
        if found is None:
            return [default] * length
        if not isinstance(found, np.ndarray) or len(found) != length:
            raise self.error(key, "another value", f"an array of {length} numbers")
        return list(found.tolist())

    def error(self, key: str, value: Any, expected: str) -> GGUFError:
        return GGUFError(f"{self.path.name}: {key}", value, expected)


def is_gguf(path: Path) -> bool:
    """Whether a model is such a file, by its name; a directory is one of safetensors."""
    return path.suffix.lower() == ".gguf" and not path.is_dir()


def read_gguf(path: Path) -> GGUFFile:
    """Returns the header of a file. Its cost is bounded by the file's size and by the limits above.

    A header that is still held is not read again unless the file has changed: a large vocabulary takes 0.2 s.

    Raises:
        GGUFError: Not such a file, or one that is damaged or lies about itself.
    """
    return _read(path, _Cursor.file)


def held_header(model: Path) -> GGUFFile | None:
    """Returns the header of a GGUF file, to be held while several readers of it follow; None of a directory.

    Raises:
        GGUFError: As ``read_gguf``.
    """
    return read_gguf(model) if is_gguf(model) else None


_HELD: WeakValueDictionary[tuple[Path, int, int, int, int], GGUFFile] = WeakValueDictionary()
"""By path, device, number, size and time of the last change."""


def gguf_architecture(path: Path) -> str | None:
    """Returns ``general.architecture``, which stands first: a header with a large vocabulary takes a second to read.

    Raises:
        GGUFError: As ``read_gguf``.
    """
    metadata = _read(path, lambda cursor: cursor.metadata(until="general.architecture"))
    found: str | None = GGUFFile(path, metadata, {}).value("general.architecture", str)
    return found


def _read(path: Path, read: Callable[[_Cursor], T]) -> T:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or not status.st_size:
            found = "an empty file" if stat.S_ISREG(status.st_mode) else "something else"
            raise GGUFError(path.name, found, "a GGUF file: a regular file")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            version = (path, status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            return read(_Cursor(version, data))
    except OSError as error:
        raise GGUFError("model", str(path), f"a readable GGUF file ({error.strerror})") from error


class _Cursor:
    """Reads a header from front to back."""

    def __init__(self, version: tuple[Path, int, int, int, int], data: mmap.mmap) -> None:
        self._version = version
        self._path = version[0]
        self._data = data
        self._size = len(data)
        self._at = 0
        self._elements = 0
        self._num_tensors = 0

    def file(self) -> GGUFFile:
        found = _HELD.get(self._version)
        if found is None:
            metadata = self.metadata()
            tensors = self._placed([self._tensor() for _ in range(self._num_tensors)], self._alignment(metadata))
            found = _HELD[self._version] = GGUFFile(self._path, metadata, tensors)
        return found

    def metadata(self, until: str = "") -> dict[str, Any]:
        """Returns the entries, up to that of a key."""
        if self._bytes("magic", 4) != b"GGUF":
            raise self._error("magic", bytes(self._data[:4]), "b'GGUF'")
        version = self._number("version", "<I")
        if version not in _VERSIONS:
            raise self._error("version", version, "2 or 3, little-endian: convert the model with a current llama.cpp")
        self._num_tensors = self._count("number of tensors", MAX_ENTRIES)
        num_entries = self._count("number of metadata entries", MAX_ENTRIES)
        metadata: dict[str, Any] = {}
        for _ in range(num_entries):
            key = self._string("a metadata key", _MAX_NAME)
            if key in metadata:
                raise self._error("metadata", key, "each key once")
            metadata[key] = self._value(key, self._number(key, "<I"))
            if key == until:
                break
        return metadata

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key, MAX_STRING)
        if kind == _ARRAY:
            return self._array(key)
        return self._numbers(key, kind, 1)[0].item()

    def _array(self, key: str) -> Any:
        kind = self._number(key, "<I")
        length = self._count(f"{key}: number of elements", MAX_ELEMENTS - self._elements)
        self._elements += length
        return self._strings(key, length) if kind == _STRING else self._numbers(key, kind, length)

    def _strings(self, key: str, length: int) -> list[str]:
        if 8 * length > self._size - self._at:
            raise self._error(key, f"{length} strings", f"at most what {self._size - self._at} bytes hold")
        found: list[str] = []
        # A vocabulary has hundreds of thousands of strings, and each process of a start reads it: this loop takes a
        # quarter of the time of ``_string``, and leaves to it what is not as it should be.
        length_at, data, at, end = struct.Struct("<Q").unpack_from, self._data, self._at, min(self._size, MAX_HEADER)
        with contextlib.suppress(UnicodeDecodeError):
            while len(found) < length and at + 8 <= end:
                begin = at + 8
                stop = begin + length_at(data, at)[0]
                if stop > end or stop - begin > MAX_STRING:
                    break
                found.append(str(data[begin:stop], "utf-8"))
                at = stop
        self._at = at
        while len(found) < length:
            found.append(self._string(key, MAX_STRING))
        return found

    def _numbers(self, key: str, kind: int, length: int) -> np.ndarray[Any, Any]:
        if kind not in _NUMBERS:
            raise self._error(f"{key}: type", kind, "a number, a string or an array of either")
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._bytes(key, length * dtype.itemsize), dtype)

    def _tensor(self) -> GGUFTensor:
        name = self._string("a tensor's name", _MAX_NAME)
        num_dimensions = self._number(f"{name}: dimensions", "<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._error(f"{name}: number of dimensions", num_dimensions, f"1 to {_MAX_DIMENSIONS}")
        sizes = [self._count(f"{name}: size", 8 * self._size) for _ in range(num_dimensions)]
        number = self._number(f"{name}: type", "<I")
        if number not in BLOCKS:
            expected = f"one of {', '.join(known for known, _, _ in BLOCKS.values())}: convert the model to one of them"
            raise self._error(f"{name}: type", number, expected)
        kind, block, block_bytes = BLOCKS[number]
        if 0 in sizes or sizes[0] % block:
            raise self._error(f"{name}: shape", sizes, f"sizes >= 1, rows of blocks of {block} values")
        num_bytes = math.prod(sizes) // block * block_bytes
        return GGUFTensor(name, tuple(reversed(sizes)), kind, self._number(f"{name}: offset", "<Q"), num_bytes)

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise self._error("general.alignment", alignment, "a power of two from 8 to 1048576")
        return alignment

    def _placed(self, tensors: list[GGUFTensor], alignment: int) -> dict[str, GGUFTensor]:
        """The tensors by name, with their places in the file in place of offsets from the end of the header."""
        start = -(-self._at // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        end, last = start, "the header"
        for tensor in sorted(tensors, key=lambda each: each.begin):
            name, begin = tensor.name, start + tensor.begin
            if name in placed:
                raise self._error("tensors", name, "each name once")
            if begin % alignment:
                raise self._error(f"{name}: offset", tensor.begin, f"a multiple of {alignment}")
            if begin < end:
                raise self._error(f"{name}: offset", tensor.begin, f"a place behind the end of {last}")
            end, last = begin + tensor.num_bytes, name
            if end > self._size:
                missing = f"a file of at least {end} bytes, not {self._size}: it is cut off; fetch it again"
                raise self._error(f"{name}: end", end, missing)
            placed[name] = GGUFTensor(name, tensor.shape, tensor.kind, begin, tensor.num_bytes)
        return placed

    def _count(self, what: str, limit: int) -> int:
        count = self._number(what, "<Q")
        if count > limit:
            raise self._error(what, count, f"at most {limit}")
        return count

    def _number(self, what: str, layout: str) -> int:
        return int(struct.unpack(layout, self._bytes(what, struct.calcsize(layout)))[0])

    def _string(self, what: str, limit: int) -> str:
        length = self._number(what, "<Q")
        if length > limit:
            raise self._error(f"{what}: length", length, f"at most {limit} bytes")
        data = self._bytes(what, length)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._error(what, data[:64], "text in UTF-8") from error

    def _bytes(self, what: str, length: int) -> bytes:
        if length > self._size - self._at:
            expected = f"{length} bytes at byte {self._at}: it is cut off, or damaged; fetch it again"
            raise self._error(what, f"a file of {self._size} bytes", expected)
        if self._at + length > MAX_HEADER:
            raise self._error(what, f"a header of more than {MAX_HEADER} bytes", f"at most {MAX_HEADER}")
        begin, self._at = self._at, self._at + length
        return self._data[begin : self._at]

    def _error(self, what: str, value: Any, expected: str) -> GGUFError:
        return GGUFError(f"{self._path.name}: {what}", value, expected)

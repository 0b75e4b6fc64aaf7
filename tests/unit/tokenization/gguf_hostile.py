"""Headers of GGUF files written byte by byte, so that they can lie."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

STRING, ARRAY, UINT32 = 8, 9, 4


def text(value: str | bytes) -> bytes:
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def array(kind: int, length: int, values: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, length) + values


def tensor(name: str, sizes: Sequence[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def write(
    path: Path,
    entries: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    *,
    magic: bytes = b"GGUF",
    version: int = 3,
    num_tensors: int | None = None,
    num_entries: int | None = None,
    data: bytes = b"",
) -> Path:
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    num_entries = len(entries) if num_entries is None else num_entries
    header = magic + struct.pack("<IQQ", version, num_tensors, num_entries) + b"".join([*entries, *tensors])
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path

"""Messages between rank 0 and the other ranks: of steps as compact as a step is, of the start by ``core.codec``."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from farsight.core.config.engine import EngineConfig
from farsight.core.request import Residency
from farsight.engine.parallel.mesh import Mesh
from farsight.kvcache import KVCopy, StepItem

_STEP, _COPY = 1, 2
_COPIED = struct.Struct("<Bq?")


class StepOrder(NamedTuple):
    """A step, ready to be laid out; only rank 0 knows its requests.

    Attributes:
        items: Items in row order, without request ids.
        rows: Token ids, positions and slot ids, int64 ``[3, T]`` (``engine.attention.layout.fill_rows``).
        more_rows: Further rows whose logits are wanted, beside those that sample.
    """

    items: list[StepItem]
    rows: np.ndarray
    more_rows: list[int]


@dataclass(frozen=True, slots=True)
class RankSetup:
    """What a rank needs to load its part.

    Attributes:
        dtype: As torch names it.
        context_len: Tokens a sequence may reach.
        num_threads: Compute threads.
        num_sharers: Ranks that share this machine's memory.
        store_port: Port of the store with the ranks' addresses, on the host of rank 0.
    """

    model_dir: str
    mesh: Mesh
    dtype: str
    engine: EngineConfig
    context_len: int
    num_threads: int
    num_sharers: int
    store_port: int


@dataclass(frozen=True, slots=True)
class RankLoaded:
    """A rank has loaded its part; ``error`` says why it has not."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class RankMeasured:
    """A rank is connected to the others, and has so many bytes left for its KV pool."""

    free_bytes: int


@dataclass(frozen=True, slots=True)
class RankPools:
    """Blocks of the pools of every rank; no host pool: 0."""

    num_blocks: int
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class Copied:
    """A rank has ended its part of a copy."""

    copy_id: int
    failed: bool


@dataclass(frozen=True, slots=True)
class Finished:
    """A rank has ended its part of a step, in step with the others.

    Attributes:
        failure: Why it failed; empty if it did not.
        out_of_memory: Whether the device had no memory for it: smaller parts may succeed.
    """

    failure: str = ""
    out_of_memory: bool = False


def pack_order(order: StepOrder | KVCopy) -> bytes:
    """Packs an order as int32 throughout: no token, slot or block has a larger number."""
    numbers = _copy_numbers(order) if isinstance(order, KVCopy) else _step_numbers(order)
    return numbers.astype(np.int32).tobytes()


def unpack_order(data: bytes) -> StepOrder | KVCopy:
    """Reverses ``pack_order``."""
    numbers = np.frombuffer(data, dtype=np.int32).astype(np.int64)
    return _read_copy(numbers) if numbers[0] == _COPY else _read_step(numbers)


def _step_numbers(order: StepOrder) -> np.ndarray:
    items = order.items
    heads = [(item.start, item.num_tokens, item.samples, len(item.blocks)) for item in items]
    return np.concatenate(
        [
            np.array([_STEP, len(items), order.rows.shape[1], len(order.more_rows)], dtype=np.int64),
            np.array(heads, dtype=np.int64).ravel(),
            np.array([block for item in items for block in item.blocks], dtype=np.int64),
            order.rows.ravel(),
            np.array(order.more_rows, dtype=np.int64),
        ]
    )


def _read_step(numbers: np.ndarray) -> StepOrder:
    _, num_items, num_rows, num_more = numbers[:4].tolist()
    heads = numbers[4 : 4 + 4 * num_items].reshape(-1, 4).tolist()
    at = 4 + 4 * num_items
    items = []
    for start, num_tokens, samples, num_blocks in heads:
        items.append(StepItem("", start, num_tokens, bool(samples), numbers[at : at + num_blocks].tolist()))
        at += num_blocks
    rows = numbers[at : at + 3 * num_rows].reshape(3, num_rows)
    return StepOrder(items, rows, numbers[at + 3 * num_rows : at + 3 * num_rows + num_more].tolist())


def _copy_numbers(copy: KVCopy) -> np.ndarray:
    return np.array([_COPY, copy.copy_id, copy.to, len(copy.source), *copy.source, *copy.target], dtype=np.int64)


def _read_copy(numbers: np.ndarray) -> KVCopy:
    _, copy_id, to, count = numbers[:4].tolist()
    blocks = numbers[4:].tolist()
    return KVCopy(copy_id, Residency(to), tuple(blocks[:count]), tuple(blocks[count:]))


def pack_report(report: Copied | Finished) -> bytes:
    """Packs a rank's message to rank 0."""
    if isinstance(report, Copied):
        return _COPIED.pack(_COPY, report.copy_id, report.failed)
    return bytes([_STEP, report.out_of_memory]) + report.failure.encode()


def unpack_report(data: bytes) -> Copied | Finished:
    """Reverses ``pack_report``."""
    if data[0] == _STEP:
        return Finished(data[2:].decode(), bool(data[1]))
    _, copy_id, failed = _COPIED.unpack(data)
    return Copied(copy_id, failed)

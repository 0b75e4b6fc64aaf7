"""The description of a step for attention, and the interface of its backends.

The tokens of a step lie flattened in rows: first the decode rows, one token a sequence, then the prefill chunks
one after the other. The two parts are separate because paged kernels take them in separate calls. Everything a
kernel needs beside the activations is made once a step (``begin_step``), not once a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from engine.kv.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class DecodePart:
    """Rows of one token each, longest sequence first.

    Attributes:
        block_tables: int64 ``[rows, max_blocks]``; unused entries repeat the row's own first block.
        kv_lens: Tokens each row attends over, its own included.
    """

    block_tables: Tensor
    kv_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PrefillPart:
    """Chunks of consecutive tokens of one sequence each; a chunk may start behind tokens computed earlier.

    Attributes:
        block_tables: int64 ``[chunks, max_blocks]``; unused entries repeat the chunk's own first block.
        chunk_lens: Tokens of each chunk.
        kv_lens: Tokens of the sequence up to the end of the chunk; the chunk is the last of them.
    """

    block_tables: Tensor
    chunk_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StaticDecode:
    """Rows of one token each at fixed addresses: a captured step reads them, each time with other values.

    Attributes:
        block_tables: int32 ``[rows, width]``; unused entries are any block.
        kv_lens: int32 ``[rows]``: tokens each row attends over, its own included; at least 1.
    """

    block_tables: Tensor
    kv_lens: Tensor


@dataclass(frozen=True, slots=True)
class GivenTensors:
    """Rows of a step whose embeddings are not those of their tokens: images.

    Attributes:
        rows: int64 ``[n]``, ascending.
        values: float32 ``[n, hidden]``.
        positions: int64 ``[3, n]``: time, row and column; None where positions have no axes.
    """

    rows: Tensor
    values: Tensor
    positions: Tensor | None


@dataclass(frozen=True, slots=True)
class StepLayout:
    """One step, flattened; ``T`` rows.

    Attributes:
        token_ids: int64 ``[T]``.
        positions: int64 ``[T]``, of the token in its sequence, for what turns queries and keys.
        slot_ids: int64 ``[T]``, where in the pool the row's key and value go.
        opened_blocks: int64 ``[n]``: blocks written for the first time in this step and not filled by it.
        sample_rows: int64 ``[R]``: rows whose logits are wanted.
        given: Rows with embeddings of their own; None without.
    """

    token_ids: Tensor
    positions: Tensor
    slot_ids: Tensor
    opened_blocks: Tensor
    sample_rows: Tensor
    decode: DecodePart | None
    prefill: PrefillPart | None
    given: GivenTensors | None = None

    @property
    def num_decode(self) -> int:
        return 0 if self.decode is None else len(self.decode.kv_lens)


class StepAttention(Protocol):
    """Attention of one step, ready to be applied layer after layer."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Causal attention of the step's rows over their sequences.

        Args:
            query: ``[T, heads, head_dim]``.
            key: ``[T, kv_heads, head_dim]``: the step's own keys, which are in the pool already.
            value: The same.
            sinks: ``[heads]``, scores that take part in the softmax and have no value; None without.

        Returns:
            ``[T, heads * head_dim]``.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute paged attention.

    Attributes:
        reads_whole_blocks: It multiplies slots of a block beyond its sequence's end with 0, so no NaN may be there.
    """

    reads_whole_blocks: bool

    def begin_step(self, layout: StepLayout, pool: KVPool) -> StepAttention:
        """Makes masks and tables for a step; called before the first layer."""
        ...

    def begin_static(self, decode: StaticDecode, pool: KVPool) -> StepAttention:
        """Attention for repeated steps that only decode; none of its operations depends on the values in ``decode``."""
        ...

"""The memory of keys and values, cut into blocks, and of states; ``kvcache`` decides which sequence holds a block."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from farsight.core.errors import IntegrityError
from farsight.engine.checkpoint.model_config import KV_SCALE_BYTES, DecoderConfig
from farsight.kvcache import SequenceState, StepItem

_LOST = -1
"""Tokens that a state has read whose step has failed: no step goes on behind so many."""

_BEHIND_BYTES = 64
"""The compiled step reads whole vectors: the last one of a head may reach beyond the pool."""


def pool_dtype(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """Returns the type of a pool by ``engine.kv_dtype``, for a model of type ``dtype``."""
    return torch.int8 if kv_dtype == "int8" else dtype


class KVPool:
    """Keys and values of all layers, by slot; slot ``block * block_size + offset`` holds one token.

    The memory is not touched here, so the operating system commits it as blocks come into use.

    In a pool of int8, each token and head has a scale of float32 besides. Where its bytes lie within the block is the
    compiled step's affair, as all of the layout there (``kv_int8.h``).

    Attributes:
        num_blocks: Blocks in memory, the spare one included; ``num_slots`` are without it.
        keys: One tensor a layer, ``[num_blocks * block_size, kv_heads, head_dim]``; in int8 the last dimension has 4
            bytes more. A layer that reads those of an earlier one has the same; one with a state has none.
        values: The same. With latent attention these are the keys: the pool holds one row of each token.
        spare_slot: A slot of no sequence, which may be written at any time; None without one.

        states: The states of a model that has some; None without.

    Args:
        spare: Whether there is another block behind ``num_blocks``, of no sequence.
        num_states: Sequences that may have a state at once; 0: as many as may have a block.
        num_checkpoints: States that may be kept beside these.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        spare: bool = False,
        num_states: int = 0,
        num_checkpoints: int = 0,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: got {num_blocks} of {block_size} tokens")
        self.num_slots = num_blocks * block_size
        self.spare_slot = self.num_slots if spare else None
        self.num_blocks = num_blocks = num_blocks + spare
        self.block_size = block_size
        self.dtype = dtype
        self.states = StatePool(config, num_states or num_blocks, num_checkpoints) if config.state_size else None
        scale = KV_SCALE_BYTES if dtype == torch.int8 else 0
        places: dict[tuple[int, int], list[int]] = {}  # layers by their KV heads and the width of one
        for layer in config.kv_layers:
            shape = config.shape(layer)
            places.setdefault((shape.kv_heads, shape.head_dim + scale), []).append(layer)
        nothing = torch.empty(0, 0, 0, dtype=dtype, device=device)
        keys, values = [nothing] * config.num_hidden_layers, [nothing] * config.num_hidden_layers
        self._by_block = []
        for (heads, width), layers in places.items():
            own = (config.kv_rows, len(layers), self.num_blocks * block_size, heads, width)
            size = math.prod(own)
            data = torch.empty(size + _BEHIND_BYTES // dtype.itemsize, dtype=dtype, device=device)[:size].view(own)
            self._by_block.append(data.view(config.kv_rows, len(layers), num_blocks, -1))
            for i, layer in enumerate(layers):
                keys[layer], values[layer] = data[0][i], data[-1][i]
        for layer in range(config.num_hidden_layers):
            source = config.shape(layer).kv_of
            if source is not None:
                keys[layer], values[layer] = keys[source], values[source]
        self.keys: tuple[Tensor, ...] = tuple(keys)
        self.values: tuple[Tensor, ...] = tuple(values)

    @property
    def device(self) -> torch.device:
        return self._by_block[0].device

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Zeroes blocks (int64 ``[n]``) in every layer.

        Attention reads whole blocks and masks what lies beyond a sequence's end, but 0 * NaN is NaN: rubbish
        that another sequence has left must not be there.
        """
        for group in self._by_block:
            group.index_fill_(2, block_ids, 0)

    def copy_blocks(self, target: Sequence[int], other: KVPool, source: Sequence[int]) -> None:
        """Copies blocks ``source`` of another pool, all layers of them, over as many blocks ``target`` of this one."""
        theirs = torch.tensor(source, dtype=torch.int64, device=other.device)
        ours = torch.tensor(target, dtype=torch.int64, device=self.device)
        for group, others in zip(self._by_block, other._by_block, strict=True):
            group.index_copy_(2, ours, others.index_select(2, theirs).to(self.device))

    @property
    def block_shape(self) -> tuple[int]:
        """Shape of a contiguous block: layers of one size one behind the other, keys before values."""
        return (sum(math.prod(group.shape) // self.num_blocks for group in self._by_block),)

    def _cut(self, blocks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields groups of layers, and their part of contiguous blocks in the same form."""
        first = 0
        for group in self._by_block:
            kinds, layers, _, elements = group.shape
            size = kinds * layers * elements
            part = blocks[:, first : first + size]
            yield group, part.view(len(blocks), kinds, layers, elements).permute(1, 2, 0, 3)
            first += size

    def read_blocks(self, block_ids: Sequence[int], out: Tensor) -> None:
        """Gathers blocks into ``out`` (``[blocks, *block_shape]``), each of them contiguous.

        In one call: block by block, a large pool, which 32 bits do not index, would be read layer by layer.
        """
        for group, part in self._cut(out):
            torch.index_select(group, 2, self.indices(block_ids), out=part)

    def write_blocks(self, block_ids: Sequence[int], blocks: Tensor) -> None:
        """Writes blocks that ``read_blocks`` has gathered."""
        for group, part in self._cut(blocks):
            group.index_copy_(2, self.indices(block_ids), part)

    def indices(self, block_ids: Sequence[int]) -> Tensor:
        """Returns ids of blocks on the device, int64 ``[n]``; the host does not wait for the copy."""
        pinned = self.device.type == "cuda"
        ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=pinned)
        return ids.to(self.device, non_blocking=True)


class StatePool:
    """The states that sequences have beside their blocks, in float32: one row each, with those of all layers.

    A row belongs to a sequence from its first token on until another needs it and the sequence has lost its keys and
    values, or is gone. Which tokens a state has read is checked at each step: a state of another position would give
    wrong tokens and no error.

    Attributes:
        rows: ``[num_rows + 1 + num_checkpoints, values of a sequence]``: of sequences, one for what no one reads, then
            the states that are kept (``StateCheckpoints``).

    Args:
        num_rows: Sequences that may have a state at once.
        num_checkpoints: Places of states that are kept.
    """

    def __init__(self, config: DecoderConfig, num_rows: int, num_checkpoints: int = 0) -> None:
        self.num_rows = num_rows
        # The operating system commits the memory of a row as it comes into use.
        self.rows = torch.empty(num_rows + 1 + num_checkpoints, config.state_size, dtype=torch.float32)
        self._first: dict[int, tuple[int, int]] = {}  # by layer: its first value in a row, and how many it has
        first = 0
        for layer, mixer in config.mixers:
            self._first[layer] = first, mixer.state_size
            first += mixer.state_size
        self._free = list(range(num_rows - 1, -1, -1))
        self._held: dict[str, tuple[int, int]] = {}  # by request: its row, and the tokens that it has read

    def of_layer(self, layer: int) -> Tensor:
        """Returns the states of a layer, of all rows, ``[rows, values]``."""
        first, size = self._first[layer]
        return self.rows[:, first : first + size]

    def first_value(self, layer: int) -> int:
        """Returns where a layer's state begins in a row."""
        return self._first[layer][0]

    @contextmanager
    def step(
        self, items: Sequence[StepItem], sequences: Mapping[str, SequenceState], *, may_be_cut_off: bool
    ) -> Iterator[list[int]]:
        """Yields the row of each item of a step, cleared or restored where a sequence begins, while the step computes.

        The step itself writes what its items keep, into the rows of ``keeps_of``.

        A step that is cut off leaves the states as they were; after another error those of its items are lost.

        Args:
            sequences: All that are held; the rows of others may be taken. Any, for a step that only goes on.

        Raises:
            IntegrityError: An item begins behind other tokens than its state has read, or there is no row left.
        """
        rows = self._begin(items, sequences)
        before = self.rows[rows] if may_be_cut_off else None
        try:
            yield rows
        except BaseException:
            if before is not None:
                self.rows[rows] = before
            for item, row in zip(items, rows, strict=True):
                if row < self.num_rows:
                    self._held[item.request_id] = row, _LOST if before is None else item.start
            raise

    def _begin(self, items: Sequence[StepItem], sequences: Mapping[str, SequenceState]) -> list[int]:
        found = []
        for item in items:
            if item.request_id.startswith("\0"):  # padding, which no one reads
                found.append(self.num_rows)
                continue
            row, read = self._held.get(item.request_id, (-1, 0))
            if item.start == 0 or item.restore >= 0:
                row = self._take({each.request_id for each in items}, sequences) if row < 0 else row
                if item.start:
                    self.rows[row] = self.rows[self.num_rows + 1 + item.restore]
                else:
                    self.rows[row].zero_()
            elif read != item.start:
                raise IntegrityError(
                    f"{item.request_id}: a state behind {read} tokens, a step from token {item.start} on"
                )
            self._held[item.request_id] = row, item.start + item.num_tokens
            found.append(row)
        return found

    def keeps_of(self, items: Sequence[StepItem]) -> list[tuple[int, int, int]]:
        """Returns the states that a step keeps: index of the item, its tokens that they have read, and their row."""
        first = self.num_rows + 1
        return [(i, count, first + place) for i, item in enumerate(items) for count, place in item.keeps]

    def _take(self, busy: Container[str], sequences: Mapping[str, SequenceState]) -> int:
        if not self._free and sequences:
            gone = [
                name
                for name in self._held
                if name not in busy and (name not in sequences or not sequences[name].computed_len)
            ]
            self._free = [self._held.pop(name)[0] for name in gone]
        if not self._free:
            raise IntegrityError(f"all {self.num_rows} states are in use")
        return self._free.pop()

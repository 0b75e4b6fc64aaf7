"""The memory of keys and values, cut into blocks; ``kvcache`` decides which sequence holds which block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from farsight.engine.checkpoint.model_config import KV_SCALE_BYTES, DecoderConfig

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
            bytes more.
        values: The same. With latent attention these are the keys: the pool holds one row of each token.
        spare_slot: A slot of no sequence, which may be written at any time; None without one.

    Args:
        spare: Whether there is another block behind ``num_blocks``, of no sequence.
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
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool needs blocks: got {num_blocks} of {block_size} tokens")
        self.num_slots = num_blocks * block_size
        self.spare_slot = self.num_slots if spare else None
        self.num_blocks = num_blocks = num_blocks + spare
        self.block_size = block_size
        self.dtype = dtype
        width = config.head_dim + (KV_SCALE_BYTES if dtype == torch.int8 else 0)
        shape = (config.kv_rows, config.num_hidden_layers, num_blocks * block_size, config.num_key_value_heads, width)
        size = math.prod(shape)
        data = torch.empty(size + _BEHIND_BYTES // dtype.itemsize, dtype=dtype, device=device)[:size].view(shape)
        self.keys: tuple[Tensor, ...] = data[0].unbind(0)
        self.values: tuple[Tensor, ...] = data[-1].unbind(0)
        self._by_block = data.view(config.kv_rows, config.num_hidden_layers, num_blocks, -1)

    @property
    def device(self) -> torch.device:
        return self._by_block.device

    def clear_blocks(self, block_ids: Tensor) -> None:
        """Zeroes blocks (int64 ``[n]``) in every layer.

        Attention reads whole blocks and masks what lies beyond a sequence's end, but 0 * NaN is NaN: rubbish
        that another sequence has left must not be there.
        """
        self._by_block.index_fill_(2, block_ids, 0)

    def copy_blocks(self, target: Sequence[int], other: KVPool, source: Sequence[int]) -> None:
        """Copies blocks ``source`` of another pool, all layers of them, over as many blocks ``target`` of this one."""
        theirs = torch.tensor(source, dtype=torch.int64, device=other._by_block.device)
        ours = torch.tensor(target, dtype=torch.int64, device=self._by_block.device)
        blocks = other._by_block.index_select(2, theirs)
        self._by_block.index_copy_(2, ours, blocks.to(self._by_block.device))

    @property
    def block_shape(self) -> tuple[int, int, int]:
        """Shape of a contiguous block: keys and values, or one row for both; layers; elements in a layer."""
        kinds, num_layers, _, num_elements = self._by_block.shape
        return kinds, num_layers, num_elements

    def read_blocks(self, block_ids: Sequence[int], out: Tensor) -> None:
        """Gathers blocks into ``out`` (``[blocks, *block_shape]``), each of them contiguous.

        In one call: block by block, a large pool, which 32 bits do not index, would be read layer by layer.
        """
        torch.index_select(self._by_block, 2, self.indices(block_ids), out=out.permute(1, 2, 0, 3))

    def write_blocks(self, block_ids: Sequence[int], blocks: Tensor) -> None:
        """Writes blocks that ``read_blocks`` has gathered."""
        self._by_block.index_copy_(2, self.indices(block_ids), blocks.permute(1, 2, 0, 3))

    def indices(self, block_ids: Sequence[int]) -> Tensor:
        """Returns ids of blocks on the device, int64 ``[n]``; the host does not wait for the copy."""
        pinned = self.device.type == "cuda"
        ids = torch.tensor(block_ids, dtype=torch.int64, pin_memory=pinned)
        return ids.to(self.device, non_blocking=True)

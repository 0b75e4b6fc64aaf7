"""Steps with chunks of prompts, beside rows or alone, recorded once for each number of tokens and then replayed.

As ``decode_graphs``, but for the number of rows: a recorded step has room for as many as steps may have, and what it
has no use for ends at once. It ends with the hidden states; logits are computed for the rows that want them. Padding
computes tokens that belong to no sequence, and writes their keys and values into the spare block of the pool.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from farsight.engine.attention.attention import AttentionBackend, StaticDecode, StepLayout
from farsight.engine.attention.layout import StepSizes, check_row_tokens, find_opened_blocks
from farsight.engine.cuda import Mirrored
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.model import DecoderModel
from farsight.engine.steps.recording import Capture, Recordings
from farsight.kvcache import StepItem

logger = logging.getLogger(__name__)

NARROW = 32
"""Blocks of a table, as wide as most sequences need it. Wider than this, tables have one width, the full one."""


@runtime_checkable
class RecordingAttention(AttentionBackend, Protocol):
    """Attention whose launches depend on the sizes of a step alone, also where it has chunks.

    Attributes:
        block_tokens: Tokens of a chunk that a program takes.
    """

    block_tokens: int

    def cut_chunks(
        self, chunk_lens: tuple[int, ...], kv_lens: tuple[int, ...], first_row: int, first_table: int
    ) -> np.ndarray:
        """Cuts chunks into blocks of tokens, int32 ``[blocks, 4]``, as ``StaticDecode.chunks`` has them."""
        ...


class MixedSize(NamedTuple):
    """Tokens of a step, and blocks of its longest sequence."""

    tokens: int
    width: int


class MixedInputs:
    """The inputs of a recorded step.

    Attributes:
        rows: int64 ``[3, tokens]``: token ids, positions, slots of the pool.
        wanted: int64 ``[tokens]``: rows whose logits are wanted, as many as there are.
        decode: Lengths of the rows of one token, 0 where there is none; blocks of chunks; block tables, of rows first.
    """

    def __init__(self, size: MixedSize, max_rows: int, block_tokens: int, pool: KVPool) -> None:
        assert pool.spare_slot is not None, "padding is written somewhere"
        self._size, self._spare_slot, self._block_size = size, pool.spare_slot, pool.block_size
        tokens, width = size
        num_rows = min(max_rows, tokens)
        num_blocks = tokens // block_tokens + min(max_rows, tokens // 2) + 1
        self._longs = Mirrored(4 * tokens, torch.int64, pool.device)
        longs = self._longs.there.view(4, tokens)
        self.rows, self.wanted = longs[:3], longs[3]
        self.rows[2].fill_(pool.spare_slot)
        self._chunks_at = -(-num_rows // 4) * 4  # at a multiple of 16 bytes, as are the tables
        self._tables_at = self._chunks_at + 4 * num_blocks
        self._ints = Mirrored(self._tables_at + num_rows * width, torch.int32, pool.device)
        ints = self._ints.there
        self.decode = StaticDecode(
            block_tables=ints[self._tables_at :].view(num_rows, width),
            kv_lens=ints[:num_rows],
            chunks=ints[self._chunks_at : self._tables_at].view(num_blocks, 4),
        )

    def fill(self, items: list[StepItem], rows: np.ndarray, wanted: list[int], attention: RecordingAttention) -> None:
        """Writes a step into the inputs; the steps but the last before it have ended.

        Args:
            items: Single tokens, then chunks.
            rows: From ``fill_rows``.
        """
        tokens, width = self._size
        num_tokens = rows.shape[1]
        longs = self._longs.take().reshape(4, tokens)
        longs[:3, :num_tokens] = rows
        longs[:2, num_tokens:] = 0
        longs[2, num_tokens:] = self._spare_slot
        longs[3, : len(wanted)] = wanted
        self._longs.send()
        ints = self._ints.take()
        ends = [item.start + item.num_tokens for item in items]
        num_decode = sum(item.num_tokens == 1 for item in items)
        ints[:num_decode] = ends[:num_decode]
        ints[num_decode : self._tables_at] = 0
        if num_decode < len(items):
            lens = tuple(item.num_tokens for item in items[num_decode:])
            chunks = attention.cut_chunks(lens, tuple(ends[num_decode:]), num_decode, num_decode)
            ints[self._chunks_at : self._chunks_at + chunks.size] = chunks.ravel()
        tables = ints[self._tables_at :].reshape(-1, width)
        for table, item, end in zip(tables, items, ends, strict=False):
            used = -(-end // self._block_size)  # no kernel reads the rest
            table[:used] = item.blocks[:used]
        self._ints.send(self._tables_at + len(items) * width)


class MixedGraphs:
    """The recorded steps of a model over a pool; none where attention or the pool is not made for that.

    Args:
        sizes: Sizes of the recorded steps.
        capture: Records work.
    """

    def __init__(
        self, model: DecoderModel, pool: KVPool, attention: AttentionBackend, sizes: StepSizes, capture: Capture
    ) -> None:
        self._model = model
        self._pool = pool
        self._sizes = sizes
        self._widths = sorted({min(NARROW, sizes.widths[-1]), sizes.widths[-1]})
        self._steps: Recordings[MixedSize, MixedInputs] = Recordings(capture)
        if not sizes.tokens or pool.spare_slot is None or not model.recordable:
            return
        if not isinstance(attention, RecordingAttention):
            logger.info(
                "steps with chunks of prompts are not recorded: the kernels of attention ask the host for sizes"
            )
            return
        self._attention = attention
        began_at = time.monotonic()
        hidden, dtype = model.config.hidden_size, pool.dtype
        self._hidden = torch.empty(sizes.tokens[-1], hidden, dtype=dtype, device=pool.device)
        wanted = [MixedSize(tokens, width) for width in reversed(self._widths) for tokens in reversed(sizes.tokens)]
        self._steps.record(wanted, self._prepare)
        logger.info("%d steps with prompts recorded in %.1f s", len(self._steps), time.monotonic() - began_at)

    def _prepare(self, size: MixedSize) -> tuple[MixedInputs, Callable[[], None]]:
        """Returns the inputs of a size, and the work to record."""
        inputs = MixedInputs(size, self._sizes.rows[-1], self._attention.block_tokens, self._pool)
        attention = self._attention.begin_static(inputs.decode, self._pool)
        token_ids, positions, slot_ids = inputs.rows.unbind(0)
        layout = StepLayout(
            token_ids=token_ids,
            positions=positions,
            slot_ids=slot_ids,
            opened_blocks=slot_ids[:0],
            sample_rows=torch.arange(size.tokens, device=self._pool.device),
            decode=None,
            prefill=None,
        )

        def run() -> None:
            self._hidden[: size.tokens].copy_(self._model.rows(layout, self._pool, attention))

        return inputs, run

    def find(self, items: list[StepItem]) -> MixedSize | None:
        """Finds the smallest recorded size that holds a step; None if none does."""
        if not len(self._steps) or len(items) > self._sizes.rows[-1]:
            return None
        num_tokens = sum(item.num_tokens for item in items)
        longest = -(-max(item.start + item.num_tokens for item in items) // self._pool.block_size)
        tokens = next((tokens for tokens in self._sizes.tokens if tokens >= num_tokens), None)
        width = next((width for width in self._widths if width >= longest), None)
        if tokens is None or width is None:
            return None
        size = MixedSize(tokens, width)
        return size if size in self._steps else None

    @torch.inference_mode()
    def launch(self, size: MixedSize, items: list[StepItem], rows: np.ndarray, wanted: list[int]) -> Tensor:
        """Replays a step of a size that ``find`` has given, without waiting for it.

        Args:
            items, rows: As of ``MixedInputs.fill``.
            wanted: Rows whose hidden states are wanted.

        Returns:
            These, behind the last layer, ``[wanted, hidden]``.

        Raises:
            IntegrityError: The vocabulary lacks a token.
        """
        check_row_tokens(rows, self._model.config.vocab_size)
        step = self._steps[size]
        if self._attention.reads_whole_blocks:
            self._pool.clear_blocks(self._pool.indices(find_opened_blocks(items, self._pool.block_size)))
        step.inputs.fill(items, rows, wanted, self._attention)
        step.replay()
        return self._hidden.index_select(0, step.inputs.wanted[: len(wanted)])

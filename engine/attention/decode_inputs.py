"""The inputs of a step that only decodes, made while the step before it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from core.errors import IntegrityError
from engine.sequence import Sequence
from kvcache import StepItem


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One row for each item, each of which samples. What the step before it yields is lacking until ``complete``.

    Attributes:
        items: One token each.
        rows: int64 ``[3, items]``: token ids, positions, slots of the pool.
        lengths: int32 ``[items, 2]``: 1, and tokens of the sequence with the new one.
        tables: int32 ``[items, width]``: blocks of the sequence; unused entries repeat the first.
        turning: Indices of the items that begin a block, which their tables may lack.
    """

    items: list[StepItem]
    rows: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray
    turning: list[int]
    _token_ids: list[list[int]]
    _block_size: int

    @classmethod
    def ahead(cls, items: list[StepItem], sequences: Mapping[str, Sequence], block_size: int) -> DecodeInputs:
        """The inputs, but for what the step that computes is still to bring: tokens, and blocks that begin.

        Raises:
            IntegrityError: An item lacks another of its blocks.
        """
        starts = np.array([item.start for item in items], dtype=np.int64)
        lengths = np.ones((len(items), 2), dtype=np.int32)
        lengths[:, 1] = starts + 1
        tables = np.empty((len(items), int(starts.max()) // block_size + 1), dtype=np.int32)
        for row, item in zip(tables, items, strict=True):
            _fill_table(row, item, block_size)
        rows = np.zeros((3, len(items)), dtype=np.int64)
        for i, item in enumerate(items):
            sequence = sequences[item.request_id]
            images = sequence.images
            rows[1, i] = sequence.first_row + item.start if images is None else images.position(item.start)
        rows[2] = tables[np.arange(len(items)), starts // block_size] * block_size + starts % block_size
        turning: list[int] = np.flatnonzero(starts % block_size == 0).tolist()
        token_ids = [sequences[item.request_id].token_ids for item in items]
        return cls(items, rows, lengths, tables, turning, token_ids, block_size)

    def complete(self, token_ids: list[int] | None = None) -> None:
        """Writes the tokens and blocks that have come with the step before.

        Args:
            token_ids: The token of each item, if its sequence does not have it yet.

        Raises:
            IntegrityError: An item asks for tokens or blocks that are not there.
        """
        self.rows[0] = self._last_tokens() if token_ids is None else token_ids
        for i in self.turning:
            item = self.items[i]
            block = item.start // self._block_size
            if block >= len(item.blocks):
                raise _too_few_blocks(item, self._block_size)
            _fill_table(self.tables[i], item, self._block_size)
            self.rows[2, i] = item.blocks[block] * self._block_size

    def _last_tokens(self) -> list[int]:
        try:
            return [tokens[item.start] for tokens, item in zip(self._token_ids, self.items, strict=True)]
        except IndexError:
            raise IntegrityError("a step that decodes asks for tokens that are not there") from None


def _fill_table(row: np.ndarray, item: StepItem, block_size: int) -> None:
    if len(item.blocks) * block_size < item.start or not item.blocks:
        raise _too_few_blocks(item, block_size)
    blocks = item.blocks[: item.start // block_size + 1]
    row[: len(blocks)] = blocks
    row[len(blocks) :] = blocks[0]


def _too_few_blocks(item: StepItem, block_size: int) -> IntegrityError:
    return IntegrityError(f"{item.request_id}: token {item.start} in {len(item.blocks)} blocks of {block_size}")

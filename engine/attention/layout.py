"""From the batch of a step to the tensors that describe it, and the sizes that steps are padded up to on a GPU.

A step that only decodes gets its inputs while the step before it computes (``DecodeInputs``). A recording or a compiled
kernel of one padded size serves all steps that fit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from farsight.core.errors import IntegrityError
from farsight.core.request import SamplingParams
from farsight.engine.attention.attention import DecodePart, GivenTensors, PrefillPart, StepLayout
from farsight.engine.sequence import Sequence
from farsight.engine.vision.spans import GivenRows, joined
from farsight.kvcache import StepBatch, StepItem

_NARROWEST = 8
_WIDER = 4


class StepSizes:
    """The sizes for steps of so many sequences, the longest of so many blocks.

    Attributes:
        rows: Numbers of sequences, ascending; the last is the largest.
        widths: Widths of block tables, in blocks, likewise.
        tokens: Numbers of tokens of steps with chunks, likewise; none for no such steps.
    """

    def __init__(self, max_rows: int, max_width: int, max_tokens: int = 0) -> None:
        self.rows = row_sizes(max_rows)
        self.widths = table_widths(max_width)
        self.tokens = token_sizes(max_tokens)

    @property
    def count(self) -> int:
        """How many steps are recorded, at most."""
        return len(self.rows) * len(self.widths) + 2 * len(self.tokens)

    def largest(self) -> StepSizes:
        """Returns the largest sizes alone."""
        found = StepSizes(1, 1)
        found.rows, found.widths, found.tokens = self.rows[-1:], self.widths[-1:], self.tokens[-1:]
        return found

    def num_rows(self, number: int) -> int | None:
        """The smallest of ``rows`` that holds so many; None if none does."""
        return _smallest(self.rows, number)

    def width(self, number: int) -> int | None:
        """The smallest of ``widths`` that holds so many; None if none does."""
        return _smallest(self.widths, number)


def row_sizes(limit: int) -> list[int]:
    """Powers of two and, from 16 on, the middle between one and the next, up to ``limit``, which is the last."""
    sizes = [1, 2, 4, 8]
    while sizes[-1] < limit:
        power = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(power * 2 if sizes[-1] > power or power < 16 else power + power // 2)
    return [*(size for size in sizes if size < limit), limit]


_TILE = 128
"""Rows that matrix products take at once: up to a multiple of that, padding costs nothing."""

MOST_TOKENS = 2048
"""A larger step keeps the device busy for longer than the host needs to launch it, operation by operation."""


def token_sizes(limit: int) -> list[int]:
    """Returns 16, 32, 64, then multiples of 128 up to ``MOST_TOKENS``: as far as ``limit`` needs them."""
    sizes = [16, 32, 64, *range(_TILE, MOST_TOKENS + 1, _TILE)]
    return sizes[: bisect_left(sizes, limit) + 1] if limit else []


def table_widths(limit: int) -> list[int]:
    """8 blocks, then four times as many each time, up to ``limit``, which is the last.

    Kernels cut the whole width of a table into parts that run side by side: a table far wider than its sequences are
    long leaves them a few parts with work and many without.
    """
    widths = [_NARROWEST]
    while widths[-1] < limit:
        widths.append(widths[-1] * _WIDER)
    return [*(width for width in widths if width < limit), limit]


def _smallest(sizes: list[int], number: int) -> int | None:
    place = bisect_left(sizes, number)
    return sizes[place] if place < len(sizes) else None


def order_items(batch: StepBatch) -> list[int]:
    """Indices of the batch's items in row order: single tokens, longest sequence first, then chunks."""
    items = batch.items
    decode = [i for i, item in enumerate(items) if item.num_tokens == 1]
    decode.sort(key=lambda i: -items[i].start)
    return decode + [i for i, item in enumerate(items) if item.num_tokens != 1]


def build_layout(
    batch: StepBatch,
    order: list[int],
    sequences: Mapping[str, Sequence],
    block_size: int,
    vocab_size: int,
    device: torch.device | str = "cpu",
    more_rows: list[int] | None = None,
) -> StepLayout:
    """The layout of a step, its items in ``order`` (from ``order_items``).

    Args:
        more_rows: Further rows whose logits are wanted, beside those that sample.

    Raises:
        IntegrityError: an item asks for tokens or blocks that are not there, there are no items, or the vocabulary
            lacks a token.
    """
    items = [batch.items[i] for i in order]
    rows = fill_rows(items, sequences, block_size)
    check_row_tokens(rows, vocab_size)
    return layout_of(items, rows, block_size, device, more_rows, find_given_rows(items, sequences))


def layout_of(
    items: list[StepItem],
    rows: np.ndarray,
    block_size: int,
    device: torch.device | str = "cpu",
    more_rows: list[int] | None = None,
    given: GivenRows | None = None,
) -> StepLayout:
    """The layout of ordered items and their ``rows`` (from ``fill_rows``), and what is ``given`` of them."""
    num_decode = sum(item.num_tokens == 1 for item in items)
    token_ids, positions, slot_ids = torch.from_numpy(rows).to(device).unbind(0)
    return StepLayout(
        token_ids=token_ids,
        positions=positions,
        slot_ids=slot_ids,
        opened_blocks=_tensor(find_opened_blocks(items, block_size), device),
        sample_rows=_tensor(find_sample_rows(items, more_rows), device),
        decode=_decode_part(items[:num_decode], block_size, device),
        prefill=_prefill_part(items[num_decode:], block_size, device),
        given=None if given is None else _given_tensors(given, device),
    )


def find_given_rows(items: list[StepItem], sequences: Mapping[str, Sequence]) -> GivenRows | None:
    """What images put into the rows of ordered items; None of none."""
    found, row = [], 0
    for item in items:
        images = sequences[item.request_id].images
        if images is not None and item.start < images.end:
            part = images.given(item.start, item.start + item.num_tokens, row)
            if part is not None:
                found.append(part)
        row += item.num_tokens
    return joined(found)


def _given_tensors(given: GivenRows, device: torch.device | str) -> GivenTensors:
    positions = None if given.positions is None else torch.from_numpy(given.positions).to(device)
    values = torch.from_numpy(np.array(given.values))  # a copy: what came with a request cannot be written to
    return GivenTensors(torch.from_numpy(given.rows).to(device), values.to(device), positions)


def fill_rows(items: list[StepItem], sequences: Mapping[str, Sequence], block_size: int) -> np.ndarray:
    """Token ids, positions and slot ids of ordered items, int64 ``[3, T]``.

    A position is the token's index in its sequence, or less behind images whose positions have axes; it counts from
    the sequence's ``first_row``.

    Raises:
        IntegrityError: an item asks for tokens or blocks that are not there, or there are no items.
    """
    if not items:
        raise IntegrityError("a step without items")
    for item in items:
        _check(item, len(sequences[item.request_id].token_ids), block_size)
    num_decode = sum(item.num_tokens == 1 for item in items)
    rows = np.empty((3, sum(item.num_tokens for item in items)), dtype=np.int64)
    _fill_decode(rows[:, :num_decode], items[:num_decode], sequences, block_size)
    first = num_decode
    for item in items[num_decode:]:
        _fill_chunk(rows[:, first : first + item.num_tokens], item, sequences[item.request_id], block_size)
        first += item.num_tokens
    return rows


def check_row_tokens(rows: np.ndarray, vocab_size: int) -> None:
    """Checks rows (from ``fill_rows``) before a device gets them: an unknown token id makes a GPU unusable.

    Raises:
        IntegrityError: There is such a token.
    """
    least, most = rows[0].min(), rows[0].max()
    if least < 0 or most >= vocab_size:
        raise IntegrityError(f"token ids {least}..{most} of {vocab_size}")


def _fill_decode(rows: np.ndarray, items: list[StepItem], sequences: Mapping[str, Sequence], block_size: int) -> None:
    """Writes token ids, positions and slot ids (``[3, items]``) of single tokens."""
    columns = []
    for item in items:
        start = item.start
        slot = item.blocks[start // block_size] * block_size + start % block_size
        sequence = sequences[item.request_id]
        position = sequence.first_row + start if sequence.images is None else sequence.images.position(start)
        columns.append((sequence.token_ids[start], position, slot))
    if columns:
        rows[:] = np.array(columns, dtype=np.int64).T


def _fill_chunk(rows: np.ndarray, item: StepItem, sequence: Sequence, block_size: int) -> None:
    """Writes token ids, positions and slot ids (``[3, num_tokens]``) of a chunk."""
    end = item.start + item.num_tokens
    token_ids = sequence.token_ids[item.start : item.start + item.num_known]
    rows[0] = token_ids + list(item.drafts)
    if item.drafts:  # few tokens: lists are faster than arrays
        at = range(item.start, end)
        first = sequence.first_row
        turned = range(first + item.start, first + end)
        rows[1] = turned if sequence.images is None else sequence.images.positions(item.start, end)
        rows[2] = [item.blocks[position // block_size] * block_size + position % block_size for position in at]
        return
    positions = np.arange(item.start, end)
    images = sequence.images
    rows[1] = positions + sequence.first_row if images is None else images.positions(item.start, end)
    rows[2] = np.array(item.blocks)[positions // block_size] * block_size + positions % block_size


def _check(item: StepItem, num_known: int, block_size: int) -> None:
    end = item.start + item.num_tokens
    known = end - len(item.drafts)
    if known <= item.start or known > num_known or end > len(item.blocks) * block_size:
        tokens = f"tokens {item.start}..{end} of {num_known}"
        raise IntegrityError(f"{item.request_id}: step over {tokens} in {len(item.blocks)} blocks of {block_size}")


def find_opened_blocks(items: list[StepItem], block_size: int) -> list[int]:
    """Blocks whose first slot is written in this step but not their last; only an item's last block can be one."""
    opened = []
    for item in items:
        end = item.start + item.num_tokens
        last = end // block_size  # the block that the token after the item belongs to
        if end % block_size and last * block_size >= item.start:
            opened.append(item.blocks[last])
    return opened


def find_sample_rows(items: list[StepItem], more_rows: list[int] | None = None) -> list[int]:
    """The rows of each item that samples, from that of its last known token on, and ``more_rows``; ascending."""
    sampled: list[int] = []
    end = 0
    for item in items:
        end += item.num_tokens
        if item.samples:
            sampled.extend(range(end - 1 - len(item.drafts), end))
    return sorted([*sampled, *more_rows]) if more_rows else sampled


def _decode_part(items: list[StepItem], block_size: int, device: torch.device | str) -> DecodePart | None:
    if not items:
        return None
    kv_lens = tuple(item.start + 1 for item in items)
    return DecodePart(_tables(items, kv_lens, block_size, device), kv_lens)


def _prefill_part(items: list[StepItem], block_size: int, device: torch.device | str) -> PrefillPart | None:
    if not items:
        return None
    kv_lens = tuple(item.start + item.num_tokens for item in items)
    tables = _tables(items, kv_lens, block_size, device)
    return PrefillPart(tables, tuple(item.num_tokens for item in items), kv_lens)


def _tables(items: list[StepItem], kv_lens: tuple[int, ...], block_size: int, device: torch.device | str) -> Tensor:
    """Block tables of equal width; padding repeats an own block, so that no other sequence's memory is read."""
    width = -(-max(kv_lens) // block_size)
    tables = []
    for item, kv_len in zip(items, kv_lens, strict=True):
        used = -(-kv_len // block_size)
        tables.append(item.blocks[:used] + item.blocks[:1] * (width - used))
    return torch.from_numpy(np.array(tables, dtype=np.int64)).to(device)


def _tensor(values: list[int], device: torch.device | str) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """One row for each item, each of which samples. What the step before it yields is lacking until ``complete``.

    Attributes:
        items: One token each.
        rows: int64 ``[3, items]``: token ids, positions, slots of the pool.
        lengths: int32 ``[items, 2]``: 1, and tokens of the sequence with the new one.
        tables: int32 ``[items, width]``: blocks of the sequence; unused entries repeat the first.
        turning: Indices of the items that begin a block, which their tables may lack.
        params: How the token of each item is chosen.
    """

    items: list[StepItem]
    rows: np.ndarray
    lengths: np.ndarray
    tables: np.ndarray
    turning: list[int]
    params: list[SamplingParams]
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
        tables = _decode_tables(items, starts, block_size)
        taking_part = [sequences[item.request_id] for item in items]
        rows = np.zeros((3, len(items)), dtype=np.int64)
        rows[1] = starts + [each.first_row for each in taking_part]
        for i, each in enumerate(taking_part):
            if each.images is not None:
                rows[1, i] = each.images.position(items[i].start)
        rows[2] = tables[np.arange(len(items)), starts // block_size] * block_size + starts % block_size
        turning: list[int] = np.flatnonzero(starts % block_size == 0).tolist()
        params = [each.sampling for each in taking_part]
        token_ids = [each.token_ids for each in taking_part]
        return cls(items, rows, lengths, tables, turning, params, token_ids, block_size)

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


def _decode_tables(items: list[StepItem], starts: np.ndarray, block_size: int) -> np.ndarray:
    """Returns the blocks that single tokens attend to, int32 ``[items, width]``; all at once, for there are many."""
    parts = [item.blocks[:used] for item, used in zip(items, (starts // block_size + 1).tolist(), strict=True)]
    counts = np.array([len(part) for part in parts])
    lacking = (counts == 0) | (counts * block_size < starts)
    if lacking.any():
        raise _too_few_blocks(items[int(lacking.argmax())], block_size)
    there = np.arange(int(starts.max()) // block_size + 1) < counts[:, None]
    tables = np.empty(there.shape, dtype=np.int32)
    tables[there] = np.fromiter(chain.from_iterable(parts), np.int32, int(counts.sum()))
    return np.where(there, tables, tables[:, :1])


def _fill_table(row: np.ndarray, item: StepItem, block_size: int) -> None:
    if len(item.blocks) * block_size < item.start or not item.blocks:
        raise _too_few_blocks(item, block_size)
    blocks = item.blocks[: item.start // block_size + 1]
    row[: len(blocks)] = blocks
    row[len(blocks) :] = blocks[0]


def _too_few_blocks(item: StepItem, block_size: int) -> IntegrityError:
    return IntegrityError(f"{item.request_id}: token {item.start} in {len(item.blocks)} blocks of {block_size}")

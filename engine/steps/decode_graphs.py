"""Steps that only decode, recorded once for each size and then replayed without operator calls from Python.

A recorded step reads and writes memory at fixed addresses. Before each replay the host writes token ids, positions,
slots, lengths and block tables into it, with two copies. A step is padded up to the next size that was recorded.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.engine.attention.attention import AttentionBackend, StaticDecode, StepLayout
from farsight.engine.attention.layout import DecodeInputs, StepSizes, check_row_tokens, find_opened_blocks
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.model import DecoderModel
from farsight.engine.sampling.sampler import likeliest
from farsight.kvcache import StepItem

logger = logging.getLogger(__name__)

Capture = Callable[[Callable[[], object]], Callable[[], None]]
"""Runs work and records it; returns a function that runs it again. Without a GPU: ``lambda run: run``. A recording
holds kernels and addresses only, so its owner keeps the work, and with it the memory that it reads."""


class DecodeSize(NamedTuple):
    """Sequences of a step, and blocks of the longest."""

    rows: int
    width: int


class RecordedStep(NamedTuple):
    """A step to be replayed.

    Attributes:
        work: The recorded work. Kept because it alone holds the constants that the kernels read.
    """

    inputs: StaticInputs
    work: Callable[[], object]
    replay: Callable[[], None]


class StaticInputs:
    """The inputs of a recorded step.

    Attributes:
        rows: int64 ``[3, rows]``: token ids, positions, slots of the pool.
        decode: Lengths and block tables.
    """

    def __init__(self, size: DecodeSize, device: torch.device) -> None:
        self._size = size
        pinned = device.type == "cuda"  # so that the host need not wait for the copies
        self._host_rows = torch.zeros(3, size.rows, dtype=torch.int64, pin_memory=pinned)
        # Tables begin at a multiple of 16 bytes, as separate tensors do: Triton compiles for the alignment that it
        # finds.
        self._tables_at = -(-size.rows // 4) * 4
        num_lens = self._tables_at + size.rows * size.width
        self._host_lens = torch.zeros(num_lens, dtype=torch.int32, pin_memory=pinned)
        self._host_lens[: size.rows] = 1
        self.rows = self._host_rows.to(device)
        self._lens = self._host_lens.to(device)
        tables = self._lens[self._tables_at :].view(size)
        self.decode = StaticDecode(block_tables=tables, kv_lens=self._lens[: size.rows])

    def fill(self, inputs: DecodeInputs, vocab_size: int) -> None:
        """Writes a step of single tokens into the inputs; the steps before it have ended.

        Raises:
            IntegrityError: The vocabulary lacks a token.
        """
        num_items, size = len(inputs.items), self._size
        check_row_tokens(inputs.rows, vocab_size)
        rows = self._host_rows.numpy()
        rows[:, :num_items] = inputs.rows
        # A padding row computes what the last row does, and writes the same values into the same place.
        rows[:, num_items:] = rows[:, num_items - 1 : num_items]
        lens = self._host_lens.numpy()
        lens[:num_items] = inputs.lengths[:, 1]
        lens[num_items : size.rows] = lens[num_items - 1]
        tables = lens[self._tables_at :].reshape(size)
        width = inputs.tables.shape[1]
        tables[:num_items, :width] = inputs.tables
        tables[:num_items, width:] = inputs.tables[:, :1]
        tables[num_items:] = tables[num_items - 1]
        self.rows.copy_(self._host_rows, non_blocking=True)
        self._lens.copy_(self._host_lens, non_blocking=True)


class DecodeGraphs:
    """The recorded steps of a model over a pool.

    Args:
        sizes: Sizes of the recorded steps.
        capture: Records work.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        attention: AttentionBackend,
        sizes: StepSizes,
        capture: Capture,
    ) -> None:
        self._model = model
        self._pool = pool
        self._attention = attention
        self._sizes = sizes
        vocab_size = model.config.vocab_size
        max_rows = sizes.rows[-1]
        self._logits = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=pool.device)
        self._best = torch.empty(max_rows, dtype=torch.int64, device=pool.device)
        self._steps: dict[DecodeSize, RecordedStep] = {}
        began_at = time.monotonic()
        if model.config.experts is None:
            self._record(capture)
        else:  # which experts compute depends on the tokens, and the host asks which
            logger.info("a model with experts: steps are not recorded")
        logger.info("%d steps recorded in %.1f s", len(self._steps), time.monotonic() - began_at)

    @torch.inference_mode()
    def _record(self, capture: Capture) -> None:
        """Records the sizes, the largest first, so that the others find room in its memory."""
        widths, rows = self._sizes.widths, self._sizes.rows
        sizes = [DecodeSize(num_rows, width) for width in reversed(widths) for num_rows in reversed(rows)]
        for size in sizes:
            inputs = StaticInputs(size, self._pool.device)
            with contextlib.suppress(torch.OutOfMemoryError):
                work = self._step(inputs, size.rows)
                self._steps[size] = RecordedStep(inputs, work, capture(work))
        lacking = len(sizes) - len(self._steps)
        if lacking:
            logger.warning("no memory to record %d of %d sizes of steps: they are slower", lacking, len(sizes))

    def _step(self, inputs: StaticInputs, num_rows: int) -> Callable[[], None]:
        attention = self._attention.begin_static(inputs.decode, self._pool)
        token_ids, positions, slot_ids = inputs.rows.unbind(0)
        layout = StepLayout(
            token_ids=token_ids,
            positions=positions,
            slot_ids=slot_ids,
            opened_blocks=slot_ids[:0],
            sample_rows=torch.arange(num_rows, device=self._pool.device),
            decode=None,  # lengths and tables are where ``attention`` finds them
            prefill=None,
        )

        def run() -> None:
            logits = self._model.forward(layout, self._pool, attention)
            self._logits[:num_rows].copy_(logits)
            self._best[:num_rows].copy_(likeliest(logits))

        return run

    def find(self, items: list[StepItem]) -> DecodeSize | None:
        """Finds the smallest recorded size that holds a step; None if it does not only decode, or none holds it."""
        if not all(item.num_tokens == 1 and item.samples for item in items):
            return None
        rows = self._sizes.num_rows(len(items))
        width = self._sizes.width(max(item.start for item in items) // self._pool.block_size + 1)
        if rows is None or width is None:
            return None
        size = DecodeSize(rows, width)
        return size if size in self._steps else None

    @torch.inference_mode()
    def run(self, size: DecodeSize, inputs: DecodeInputs) -> tuple[Tensor, list[int]]:
        """Replays a step of a size that ``find`` has given.

        Returns:
            Logits, float32 ``[items, vocab]``, overwritten by the next step, and ``likeliest`` of them.

        Raises:
            IntegrityError: The vocabulary lacks a token.
        """
        step, items = self._steps[size], inputs.items
        if self._attention.reads_whole_blocks:
            opened = find_opened_blocks(items, self._pool.block_size)
            self._pool.clear_blocks(torch.tensor(opened, dtype=torch.int64, device=self._pool.device))
        step.inputs.fill(inputs, self._model.config.vocab_size)
        step.replay()
        best: list[int] = self._best[: len(items)].tolist()
        return self._logits[: len(items)], best

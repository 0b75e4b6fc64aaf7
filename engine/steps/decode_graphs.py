"""Steps that only decode, recorded once for each size and then replayed without operator calls from Python.

A recorded step reads and writes memory at fixed addresses. Before each replay the host writes token ids, positions,
slots, lengths and block tables into it, with two copies. A step is padded up to the next size that was recorded. A step
may be launched before the tokens of the one before it are known: it takes them from where that one leaves them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.engine import cuda
from farsight.engine.attention.attention import AttentionBackend, StaticDecode, StepLayout
from farsight.engine.attention.layout import DecodeInputs, StepSizes, check_row_tokens, find_opened_blocks
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.model import DecoderModel
from farsight.engine.sampling.device_draws import Draws
from farsight.engine.sampling.sampler import likeliest
from farsight.engine.steps.recording import Capture, Recordings
from farsight.kvcache import StepItem

logger = logging.getLogger(__name__)

Wait = Callable[[], list[int]]
"""Returns the token of each row of a launched step when the step is done."""


class DecodeSize(NamedTuple):
    """Sequences of a step, and blocks of the longest."""

    rows: int
    width: int


class StaticInputs:
    """The inputs of a recorded step.

    Attributes:
        rows: int64 ``[3, rows]``: token ids, positions, slots of the pool.
        decode: Lengths and block tables.
    """

    def __init__(self, size: DecodeSize, device: torch.device) -> None:
        self._size = size
        self._rows = cuda.Mirrored(3 * size.rows, torch.int64, device)
        # Tables begin at a multiple of 16 bytes, as separate tensors do: Triton compiles for the alignment that it
        # finds.
        self._tables_at = -(-size.rows // 4) * 4
        self._lens = cuda.Mirrored(self._tables_at + size.rows * size.width, torch.int32, device)
        self.rows = self._rows.there.view(3, size.rows)
        tables = self._lens.there[self._tables_at :].view(size)
        self.decode = StaticDecode(block_tables=tables, kv_lens=self._lens.there[: size.rows])
        self.decode.kv_lens.fill_(1)

    def fill(self, inputs: DecodeInputs, vocab_size: int) -> None:
        """Writes a step of single tokens into the inputs; the steps but the last before it have ended.

        Raises:
            IntegrityError: The vocabulary lacks a token.
        """
        num_items, size = len(inputs.items), self._size
        check_row_tokens(inputs.rows, vocab_size)
        rows = self._rows.take().reshape(3, size.rows)
        rows[:, :num_items] = inputs.rows
        # A padding row computes what the last row does, and writes the same values into the same place.
        rows[:, num_items:] = rows[:, num_items - 1 : num_items]
        lens = self._lens.take()
        lens[:num_items] = inputs.lengths[:, 1]
        lens[num_items : size.rows] = lens[num_items - 1]
        tables = lens[self._tables_at :].reshape(size)
        width = inputs.tables.shape[1]
        tables[:num_items, :width] = inputs.tables
        tables[:num_items, width:] = inputs.tables[:, :1]
        tables[num_items:] = tables[num_items - 1]
        self._rows.send()
        self._lens.send()


class LaunchedTokens:
    """The tokens that steps yield, on the device; the next step is fed from there, and the host reads them later.

    Attributes:
        tokens: int64 ``[rows]``, of the step launched last; ``NO_TOKEN`` for a row without one.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.tokens = torch.empty(max_rows, dtype=torch.int64, device=device)
        self._sources = cuda.Mirrored(max_rows, torch.int64, device)
        self._read = [torch.empty(max_rows, dtype=torch.int64, pin_memory=pinned) for _ in range(2)]
        self._mark = cuda.marker(device)

    def feed(self, sources: list[int], token_ids: Tensor) -> None:
        """Writes tokens into the inputs of the next step, int64 ``[rows]``: of these rows; the rest as the last one."""
        places, num_rows = self._sources.take(), len(token_ids)
        places[: len(sources)] = sources
        places[len(sources) : num_rows] = sources[-1]
        self._sources.send(num_rows)
        torch.index_select(self.tokens, 0, self._sources.there[:num_rows], out=token_ids)
        token_ids.clamp_(min=0)  # a row without a token goes on with any: an unknown one would cost the device

    def begin_reading(self, num_rows: int) -> Wait:
        """Begins to copy the tokens of a launched step to the host; at most two steps are on their way."""
        self._read.reverse()
        host = self._read[0]
        host[:num_rows].copy_(self.tokens[:num_rows], non_blocking=True)
        done = self._mark()

        def wait() -> list[int]:
            done()
            tokens: list[int] = host[:num_rows].tolist()
            return tokens

        return wait


class DecodeGraphs:
    """The recorded steps of a model over a pool.

    Args:
        sizes: Sizes of the recorded steps.
        capture: Records work.
        launched: Takes the token of each row.
        draws: Draws them, within the recorded step; None for the likeliest ones.
    """

    def __init__(
        self,
        model: DecoderModel,
        pool: KVPool,
        attention: AttentionBackend,
        sizes: StepSizes,
        capture: Capture,
        launched: LaunchedTokens,
        draws: Draws | None = None,
    ) -> None:
        self._draws = draws
        self._model = model
        self._pool = pool
        self._attention = attention
        self._sizes = sizes
        self._launched = launched
        max_rows, vocab_size = sizes.rows[-1], model.config.vocab_size
        self._logits = torch.empty(max_rows, vocab_size, dtype=torch.float32, device=pool.device)
        self._steps: Recordings[DecodeSize, StaticInputs] = Recordings(capture)
        if model.recordable:
            began_at = time.monotonic()
            widths, rows = sizes.widths, sizes.rows
            wanted = [DecodeSize(num_rows, width) for width in reversed(widths) for num_rows in reversed(rows)]
            self._steps.record(wanted, self._prepare)
            logger.info("%d steps that decode recorded in %.1f s", len(self._steps), time.monotonic() - began_at)
        else:  # which experts compute depends on the tokens, and the host asks which
            logger.info("a model with quantised experts: steps are not recorded")

    def _prepare(self, size: DecodeSize) -> tuple[StaticInputs, Callable[[], None]]:
        """Returns the inputs of a size, and the work to record."""
        inputs, num_rows = StaticInputs(size, self._pool.device), size.rows
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
            tokens = self._launched.tokens[:num_rows]
            if self._draws is None:
                tokens.copy_(likeliest(logits))
            else:
                self._draws.draw(logits, tokens)

        return inputs, run

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
    def launch(self, size: DecodeSize, inputs: DecodeInputs, sources: list[int] | None = None) -> Wait:
        """Replays a step of a size that ``find`` has given.

        Args:
            sources: For each item: the row of the step launched last that yields its token. None if tokens are known.

        Raises:
            IntegrityError: The vocabulary lacks a token.
        """
        step = self._steps[size]
        if self._attention.reads_whole_blocks:
            self._pool.clear_blocks(self._pool.indices(find_opened_blocks(inputs.items, self._pool.block_size)))
        step.inputs.fill(inputs, self._model.config.vocab_size)
        if sources is not None:
            self._launched.feed(sources, step.inputs.rows[0])
        if self._draws is not None:
            self._draws.fill(inputs.params, inputs.lengths[:, 1].tolist())
        step.replay()
        return self._launched.begin_reading(len(inputs.items))

    def run(self, size: DecodeSize, inputs: DecodeInputs) -> tuple[Tensor, list[int]]:
        """Replays a step whose tokens are known, and waits for it; raises as ``launch``.

        Returns:
            Logits, float32 ``[items, vocab]``, overwritten by the next step, and the tokens chosen.
        """
        best = self.launch(size, inputs)()
        return self._logits[: len(inputs.items)], best

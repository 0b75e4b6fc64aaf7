"""Paged attention by this package's own kernels: a launch for the rows of a step, one for its chunks.

All keys and values are read from the pool, those of the step too. The kernels are compiled when the backend is made:
a step of any size finds them ready.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from farsight.engine.attention.attention import (
    PLAIN_SCORES,
    DecodePart,
    PrefillPart,
    ScoreShape,
    StaticDecode,
    StepLayout,
)
from farsight.engine.attention.layout import StepSizes
from farsight.engine.attention.paged_kernels import (
    BASE_2,
    LEAST_PART,
    WIDE_GROUP,
    WIDE_HEAD,
    PagedKernels,
    PagedLaunch,
)
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_STEP, _WIDEST_ROW, _LARGEST_GROUP = 16, 1024, 128


def triton_problem(config: DecoderConfig, pool: KVPool) -> str | None:
    """Tells why these kernels cannot run this model over this pool; None if they can."""
    if pool.dtype not in _DTYPES:
        return f"dtype {pool.dtype}: float16 and bfloat16 are supported"
    widest = WIDE_HEAD if config.latent is None else _WIDEST_ROW
    if config.head_dim % _HEAD_STEP or config.head_dim > widest:
        return f"head_dim {config.head_dim}: multiples of {_HEAD_STEP} up to {widest} are supported"
    group = config.num_attention_heads // config.num_key_value_heads
    if group > _LARGEST_GROUP:
        return f"{group} heads share a KV head: up to {_LARGEST_GROUP} are supported"
    if config.head_dim > WIDE_HEAD and group > WIDE_GROUP and group % WIDE_GROUP:
        return f"{group} heads share a row of {config.head_dim} values: multiples of {WIDE_GROUP} are supported"
    if pool.device.type != "cuda":
        return f"the pool is on {pool.device.type}: cuda is supported"
    return None


class TritonAttention:
    """The backend. Keeps the memory for what the parts of rows yield, so it runs one step at a time.

    Args:
        heads: Heads of queries.
        windows: By layer, as of ``TorchAttention``.
        max_rows: Rows of one token that a step has; a step with more takes more memory.
        sinks: Whether layers have sinks, in the dtype of the pool.
        least_part: As of ``PagedKernels``.
    """

    reads_whole_blocks = False

    def __init__(
        self,
        heads: int,
        windows: Sequence[int | None],
        pool: KVPool,
        max_rows: int,
        scores: ScoreShape = PLAIN_SCORES,
        *,
        sinks: bool = False,
        least_part: int = LEAST_PART,
    ) -> None:
        kv_heads, head_dim = pool.keys[0].shape[1:]
        slopes = torch.tensor(scores.slopes, device=pool.device).mul_(BASE_2) if scores.slopes else None
        self._windows = tuple(windows)
        self._kernels = PagedKernels(
            heads,
            kv_heads,
            head_dim,
            pool.block_size,
            scale=head_dim**-0.5 if scores.scale is None else scores.scale,
            cap=scores.cap,
            slopes=slopes,
            least_part=least_part,
        )
        self._scratch = self._kernels.scratch(max_rows, pool.device)
        self._compile(pool, sinks=sinks)

    @classmethod
    def of_model(cls, config: DecoderConfig, pool: KVPool, sizes: StepSizes) -> TritonAttention:
        """Makes attention as the layers of a model have it, for steps of such sizes."""
        return cls(
            config.num_attention_heads,
            config.sliding_windows,
            pool,
            sizes.rows[-1],
            ScoreShape.of_model(config),
            sinks=config.blocks.sinks,
        )

    def _compile(self, pool: KVPool, *, sinks: bool) -> None:
        """Launches each kernel once, with nothing to do."""
        kernels = self._kernels
        like = pool.keys[0]
        none = torch.zeros(1, 1, dtype=torch.int32, device=pool.device)
        launches = [PagedLaunch(none, none[0], 1), PagedLaunch(none, none.new_zeros(1, 4), 0)]
        query = like.new_zeros(1, kernels.heads, kernels.head_dim)
        for window in set(self._windows):
            attention = TritonStepAttention(pool, launches, [window], kernels, self._scratch)
            attention.attend(0, query, query, query, like.new_zeros(kernels.heads) if sinks else None)

    def begin_step(self, layout: StepLayout, pool: KVPool) -> TritonStepAttention:
        """Begins a step; see ``AttentionBackend.begin_step``."""
        launches = []
        if layout.decode is not None:
            launches.append(self._rows(layout.decode))
        if layout.prefill is not None:
            launches.append(self._chunks(layout.prefill, layout.num_decode))
        return TritonStepAttention(pool, launches, self._windows, self._kernels, self._reserve(layout.num_decode))

    def begin_static(self, decode: StaticDecode, pool: KVPool) -> TritonStepAttention:
        """Begins repeated steps; see ``AttentionBackend.begin_static``."""
        rows, width = decode.block_tables.shape
        launches = [PagedLaunch(decode.block_tables, decode.kv_lens, self._kernels.num_parts(width * pool.block_size))]
        if decode.chunks is not None:  # behind the rows: those that are not there leave rubbish in rows of chunks
            launches.append(PagedLaunch(decode.block_tables, decode.chunks, 0))
        return TritonStepAttention(pool, launches, self._windows, self._kernels, self._reserve(rows))

    def _rows(self, part: DecodePart) -> PagedLaunch:
        device = part.block_tables.device
        lens = torch.tensor(part.kv_lens, dtype=torch.int32, device=device)
        return PagedLaunch(part.block_tables.int(), lens, self._kernels.num_parts(max(part.kv_lens)))

    @property
    def block_tokens(self) -> int:
        """Tokens of a chunk that a program takes."""
        return self._kernels.block_tokens

    def _chunks(self, part: PrefillPart, first_row: int) -> PagedLaunch:
        items = torch.from_numpy(self.cut_chunks(part.chunk_lens, part.kv_lens, first_row, 0))
        return PagedLaunch(part.block_tables.int(), items.to(part.block_tables.device), 0)

    def cut_chunks(
        self, chunk_lens: tuple[int, ...], kv_lens: tuple[int, ...], first_row: int, first_table: int
    ) -> np.ndarray:
        """Cuts chunks into blocks of tokens, those with the most keys first: they take longest.

        Args:
            first_row: Row of the first token of all; ``first_table`` is that of the first table.

        Returns:
            int32 ``[blocks, 4]``, as of ``PagedLaunch``.
        """
        size = self.block_tokens
        blocks = []
        for chunk, (chunk_len, kv_len) in enumerate(zip(chunk_lens, kv_lens, strict=True), first_table):
            done = np.arange(0, chunk_len, size, dtype=np.int32)
            found = np.empty((len(done), 4), dtype=np.int32)
            found[:, 0] = chunk
            found[:, 1] = first_row + done
            found[:, 2] = np.minimum(size, chunk_len - done)
            found[:, 3] = kv_len - chunk_len + done
            blocks.append(found)
            first_row += chunk_len
        items = np.concatenate(blocks)
        return np.ascontiguousarray(items[np.argsort(-items[:, 2:].sum(1), kind="stable")])

    def _reserve(self, rows: int) -> tuple[Tensor, Tensor]:
        if rows > len(self._scratch[0]):
            self._scratch = self._kernels.scratch(rows, self._scratch[0].device)
        return self._scratch


class TritonStepAttention:
    """One step: its rows, its chunks, or both."""

    def __init__(
        self,
        pool: KVPool,
        launches: list[PagedLaunch],
        windows: Sequence[int | None],
        kernels: PagedKernels,
        scratch: tuple[Tensor, Tensor],
    ) -> None:
        self._pool = pool
        self._launches = launches
        self._windows = windows
        self._kernels = kernels
        self._scratch = scratch

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Attends; see ``StepAttention.attend``."""
        _, heads, head_dim = query.shape
        if query.stride()[1:] != (head_dim, 1):
            query = query.contiguous()
        out = query.new_empty(len(query), heads * head_dim)
        pages = self._pool.keys[layer], self._pool.values[layer]
        for launch in self._launches:
            self._kernels.run(launch, query, pages, out, self._scratch, self._windows[layer], sinks)
        return out

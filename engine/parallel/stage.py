"""One rank's part of a step, and the memory that the rank has for its KV pool."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import RankLost
from farsight.engine import cuda
from farsight.engine.attention.attention import AttentionBackend
from farsight.engine.attention.choice import gpu_attention
from farsight.engine.attention.layout import StepSizes, build_layout, find_sample_rows, layout_of, order_items
from farsight.engine.attention.torch_attention import TorchAttention
from farsight.engine.checkpoint.layers import Linear
from farsight.engine.devices.copiers import make_copier
from farsight.engine.devices.model_device import AUTO_SHARE
from farsight.engine.kv_pool import KVPool
from farsight.engine.models.layers import DecoderLayers
from farsight.engine.models.model import embed, output_logits
from farsight.engine.parallel.exchange import Arrival, Exchange
from farsight.engine.parallel.mesh import Part
from farsight.engine.parallel.shards import StageWeights
from farsight.engine.parallel.wire import Finished, RankPools, StepOrder
from farsight.engine.runner import Copier, available_bytes, largest_step
from farsight.engine.sampling.sampler import Sampler
from farsight.engine.sequence import Sequence

logger = logging.getLogger(__name__)


class StepOutcome(NamedTuple):
    """The result of a rank's part of a step.

    Attributes:
        logits: Logits of the whole step, float32 ``[R, vocab]``; on rank 0 alone.
        report: How the part ended.
    """

    logits: Tensor | None
    report: Finished


class _Begun(NamedTuple):
    """A step that waits to be computed; its activations are in flight, unless this is the first stage."""

    order: StepOrder
    arrival: Arrival | None
    failed: Finished | None


def _failure(error: Exception) -> Finished:
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    if not out_of_memory:
        logger.error("this rank's part of a step failed", exc_info=error)
    return Finished(f"{type(error).__name__}: {error}", out_of_memory)


class Stage:
    """Computes steps in the order in which they begin. Belongs to one thread.

    Args:
        max_len: Longest sequence to be run, in tokens.
    """

    def __init__(
        self,
        part: Part,
        weights: StageWeights,
        pool: KVPool,
        exchange: Exchange,
        attention: AttentionBackend,
        max_len: int,
        *,
        compiled: bool = False,
    ) -> None:
        self._part = part
        self._weights = weights
        self._pool = pool
        self._exchange = exchange
        add_up = exchange.add_up
        if compiled:  # the sum counts its calls, which must not be compiled
            add_up = torch.compiler.disable(add_up)  # type: ignore[no-untyped-call]
        self._layers = DecoderLayers(
            part.config, weights.layers, max_len, pool.keys[0], compiled=compiled, add_up=add_up
        )
        self._attention = attention
        self._begun: deque[_Begun] = deque()

    def begin(self, order: StepOrder) -> None:
        """Starts to receive the step's activations, so that they arrive while earlier steps are computed."""
        arrival, failed = None, None
        if not self._part.is_first:
            num_rows = order.rows.shape[1]
            try:
                arrival = self._exchange.receive(num_rows, blank=False)
            except RankLost:
                raise
            except Exception as error:
                failed = _failure(error)
                arrival = self._exchange.receive(num_rows, blank=True)
        self._begun.append(_Begun(order, arrival, failed))

    @torch.inference_mode()
    def finish(self) -> StepOutcome:
        """Computes the step that began first. If it cannot, it still takes part in the exchanges that others wait for.

        Raises:
            RankLost: an exchange with other ranks failed.
        """
        step = self._begun.popleft()
        result, logits = None, None
        report = step.failed or Finished()
        self._exchange.begin(step.order.rows.shape[1])
        if not report.failure:
            try:
                result, logits = self._compute(step)
            except RankLost:
                raise
            except Exception as error:
                report = _failure(error)
        # Not in the handler: there the error still holds the step's tensors, and with them memory.
        if report.failure:
            if step.arrival is not None:
                step.arrival.wait()
            self._exchange.sit_out()
        if not self._part.is_last:
            self._exchange.send(result)
        elif self._part.mesh.tensor > 1:
            num_rows = len(find_sample_rows(step.order.items, step.order.more_rows))
            self._exchange.gather(result, num_rows, logits)
        else:
            logits = result
        return StepOutcome(None if report.failure else logits, report)

    def _compute(self, step: _Begun) -> tuple[Tensor, Tensor | None]:
        """Returns activations behind this stage or, from the last, its columns of the logits and room for all of them.

        Only rank 0, which gathers them all, has such room.
        """
        order, pool = step.order, self._pool
        layout = layout_of(order.items, order.rows, pool.block_size, pool.device, order.more_rows)
        if self._attention.reads_whole_blocks and len(layout.opened_blocks):
            pool.clear_blocks(layout.opened_blocks)
        attention = self._attention.begin_step(layout, pool)
        if step.arrival is not None:
            hidden = step.arrival.wait()
        else:
            weights = self._weights
            assert weights.embedding is not None, "the first stage embeds"
            hidden = embed(layout, weights.embedding, weights.positions, self._part.config, weights.embedding_norm)
        hidden = self._layers.run(hidden, layout, pool, attention)
        if not self._part.is_last:
            return hidden, None
        rows = hidden.index_select(0, layout.sample_rows)
        weights = self._weights
        assert weights.lm_head is not None, "the last stage has the vocabulary head"
        logits = output_logits(rows, self._part.config, weights.norm, weights.lm_head, weights.head_bias)
        if self._part.rank != 0 or self._part.mesh.tensor == 1:
            return logits, None
        return logits, logits.new_empty(len(rows), self._part.whole.vocab_size)


def make_stage(
    part: Part, weights: StageWeights, pool: KVPool, exchange: Exchange, engine: EngineConfig, context_len: int
) -> Stage:
    """Makes a stage with the attention of its device, for sequences of ``context_len`` tokens if the pool holds them.

    Raises:
        ConfigError: The backend that was asked for is not available.
    """
    max_len = min(context_len, pool.num_slots)
    attention = stage_attention(part, pool, engine, max_len)
    return Stage(part, weights, pool, exchange, attention, max_len, compiled=engine.compile)


def stage_attention(part: Part, pool: KVPool, engine: EngineConfig, max_len: int) -> AttentionBackend:
    """Returns attention over a rank's own heads, by the backend that is configured for its device.

    Raises:
        ConfigError: The backend that was asked for is not available.
    """
    if engine.device != "cuda":
        return TorchAttention.of_model(part.config)
    sizes = StepSizes(engine.max_num_seqs, -(-max_len // pool.block_size))
    return gpu_attention(engine.backend, part.config, pool, sizes)


def make_pools(part: Part, pools: RankPools, engine: EngineConfig, dtype: torch.dtype) -> tuple[KVPool, Copier | None]:
    """Makes one rank's KV pool, and the copier between it and its host pool, if there is one."""
    size, device = engine.kv_block_size, engine.device
    pool = KVPool(part.config, num_blocks=pools.num_blocks, block_size=size, dtype=dtype, device=device)
    return pool, make_copier(part.config, pool, pools.num_host_blocks, on_gpu=device == "cuda")


def free_bytes(part: Part, weights: StageWeights, engine: EngineConfig, num_sharers: int) -> int:
    """Returns the bytes that ``auto`` may take for this rank's KV pool.

    On a GPU: what the weights and the rank's part of the largest step leave. Else: its share of the machine's free
        memory.

    Args:
        num_sharers: Ranks that this machine's memory is shared among.
    """
    if engine.device != "cuda":
        return int(AUTO_SHARE / num_sharers * available_bytes())
    return cuda.free_bytes(engine.gpu_memory_utilization, lambda: run_largest_step(part, weights, engine))


@torch.inference_mode()
def run_largest_step(part: Part, weights: StageWeights, engine: EngineConfig) -> None:
    """Runs this rank's part of it, from activations that are zero, beside those of as many steps as may be under way.

    It runs without the other ranks: memory for exchanges with them is allocated already.
    """
    batch, sequences, num_blocks = largest_step(engine)
    out = weights.layers[0].out
    assert isinstance(out, Linear), "matrices that ranks read become floats"
    like = out.weight
    size = engine.kv_block_size
    pool = KVPool(part.config, num_blocks=num_blocks, block_size=size, dtype=like.dtype, device=like.device)
    order = order_items(batch)
    layout = build_layout(batch, order, sequences, size, part.whole.vocab_size, like.device)
    attention = stage_attention(part, pool, engine, pool.num_slots).begin_step(layout, pool)
    layers = DecoderLayers(part.config, weights.layers, pool.num_slots, like)
    under_way = like.new_zeros(part.mesh.pipeline, batch.num_tokens, part.config.hidden_size)
    hidden = layers.run(under_way[0], layout, pool, attention)
    if weights.lm_head is None:
        return
    logits = output_logits(
        hidden.index_select(0, layout.sample_rows), part.config, weights.norm, weights.lm_head, weights.head_bias
    )
    if part.rank == 0:
        _draw(
            logits.new_zeros(len(logits), part.whole.vocab_size), [sequences[batch.items[i].request_id] for i in order]
        )


def _draw(logits: Tensor, sequences: list[Sequence]) -> None:
    params = [sequence.sampling for sequence in sequences]
    positions = [len(sequence.token_ids) for sequence in sequences]
    Sampler().sample(logits, params, positions, sequences)

"""Memory that a rank has for its KV pool."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from core.config.engine import EngineConfig
from core.errors import ConfigError
from engine.attention.layout import build_layout, order_items
from engine.checkpoint.layers import Linear
from engine.devices.host_memory import available_bytes
from engine.devices.model_device import AUTO_SHARE
from engine.kv.kv_pool import KVPool
from engine.models.layers import DecoderLayers
from engine.models.model import output_logits
from engine.parallel.mesh import Part
from engine.parallel.shards import StageWeights
from engine.parallel.stage import stage_attention
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from engine.steps.largest_step import largest_step


def check_gpu(engine: EngineConfig) -> None:
    """Raises ConfigError if this rank should compute on a GPU and has none."""
    if engine.device != "cuda":
        return
    from engine import cuda

    problem = cuda.device_problem()
    if problem is not None:
        raise ConfigError("engine.device", engine.device, f"cpu ({problem})")


def recover_on(device: str) -> Callable[[], None]:
    """A function that frees memory of a device that has run out of it, as far as possible."""
    if device != "cuda":
        return lambda: None
    from engine import cuda

    return cuda.recover


def free_bytes(part: Part, weights: StageWeights, engine: EngineConfig, num_sharers: int) -> int:
    """Bytes that ``auto`` may take for this rank's KV pool.

    On a GPU: what the weights and the rank's part of the largest step leave. Else: its share of the machine's free
        memory.

    Args:
        num_sharers: Ranks that this machine's memory is shared among.
    """
    if engine.device != "cuda":
        return int(AUTO_SHARE / num_sharers * available_bytes())
    from engine import cuda

    return cuda.free_bytes(engine.gpu_memory_utilization, lambda: run_largest_step(part, weights, engine))


@torch.inference_mode()
def run_largest_step(part: Part, weights: StageWeights, engine: EngineConfig) -> None:
    """This rank's part of it, from activations that are zero, beside those of as many steps as may be under way.

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

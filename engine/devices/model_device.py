"""From a model directory and a configuration to a model that computes, on processors or a GPU, with its pools."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import torch

from farsight.core.config.engine import EngineConfig
from farsight.core.errors import ConfigError
from farsight.core.processors import compute_threads
from farsight.core.request import Request, SamplingParams
from farsight.engine import cuda
from farsight.engine.attention.choice import gpu_attention
from farsight.engine.attention.layout import StepSizes
from farsight.engine.checkpoint.dtypes import parse_dtype
from farsight.engine.checkpoint.model_config import DecoderConfig, resolve_max_model_len
from farsight.engine.checkpoint.weights import ModelWeights, Progress, load_weights
from farsight.engine.devices.copiers import make_copier
from farsight.engine.kv_pool import KVPool, pool_dtype
from farsight.engine.models.quantize import quantize_weights
from farsight.engine.native.model import NativeBackend
from farsight.engine.runner import Device, available_bytes, largest_step, num_host_pool_blocks, num_pool_blocks
from farsight.engine.sequence import Sequence
from farsight.engine.steps.backends import GraphBackend, TorchBackend, make_draws
from farsight.engine.steps.careful_steps import CarefulSteps
from farsight.engine.steps.compiles import compile_side_by_side, keep_compiled
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import StepBatch, StepItem

logger = logging.getLogger(__name__)

RECORDING_BYTES = 4 << 20
"""Bytes that a recorded step takes at most beside what all of them share: its inputs, and what the driver keeps."""

AUTO_SHARE = 0.2
"""Share of the machine's available memory that ``auto`` takes at most: for the KV pool, and again for the host pool."""


def load_device(
    model_dir: Path,
    config: DecoderConfig,
    dtype_name: str,
    engine: EngineConfig,
    num_replicas: int,
    *,
    swaps: bool,
    bits: int,
    keep_quantized: bool = True,
    progress: Progress | None = None,
) -> Device:
    """Loads the model and sizes its pools.

    Args:
        num_replicas: Workers that share this machine's cores and memory where a setting is automatic.
        swaps: Whether there is use for a host pool.
        bits: Round the matrices to 8 or 4 bits; 0 leaves them as the checkpoint has them.
        keep_quantized, progress: As in ``load_weights``.

    Raises:
        InvalidValueError: the model or a setting cannot be used; names the field.
    """
    num_threads = compute_threads(engine.num_threads, num_replicas)
    torch.set_num_threads(num_threads)
    dtype = parse_dtype(dtype_name, config)
    kv_dtype = pool_dtype(engine.kv_dtype, dtype)
    token_bytes = config.kv_bytes_per_token(kv_dtype)
    context_len = resolve_max_model_len(config, engine.max_model_len)
    auto_bytes = int(AUTO_SHARE / num_replicas * available_bytes())
    num_states = _num_states(config, engine, auto_bytes)
    num_blocks = num_pool_blocks(engine, token_bytes, context_len, auto_bytes - num_states * config.state_bytes)
    num_checkpoints = _num_checkpoints(config, engine, auto_bytes, num_blocks)
    num_swapped = num_blocks if swaps and not num_states else 0
    num_host_blocks = num_host_pool_blocks(engine, token_bytes, num_swapped, auto_bytes)
    runner = ModelRunner.from_dir(
        model_dir,
        config=config,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=engine.kv_block_size,
        context_len=context_len,
        backend=engine.backend,
        bits=bits,
        keep_quantized=keep_quantized,
        num_threads=num_threads,
        kv_dtype=engine.kv_dtype,
        progress=progress,
        num_states=num_states,
        num_checkpoints=num_checkpoints,
    )
    copier = make_copier(config, runner.pool, num_host_blocks, on_gpu=False)
    exact = isinstance(runner.backend, NativeBackend)
    return Device(
        runner, context_len, token_bytes, num_blocks, num_host_blocks, copier, exact, num_states, num_checkpoints
    )


PAUSED_STATES = 2
"""Sequences that may have a state, for each that may be in a step: the others are paused."""


def _num_states(config: DecoderConfig, engine: EngineConfig, auto_bytes: int) -> int:
    """Returns how many sequences may have a state; 0 for a model without.

    Raises:
        ConfigError: What is asked for cannot be done with states, or half of ``auto_bytes`` holds not even one.
    """
    if not config.state_size:
        return 0
    if engine.host_kv_bytes():
        expected = (
            f"auto or 0: states of {config.architecture} stay on the device, and paused sequences are computed again"
        )
        raise ConfigError("engine.host_kv_memory", engine.host_kv_memory, expected)
    each = config.state_bytes
    found = min(PAUSED_STATES * engine.max_num_seqs, auto_bytes // 2 // each)
    if found < 1:
        raise ConfigError("model", config.architecture, f"a machine with room for a state of {each} bytes a sequence")
    logger.info("room for the states of %d sequences, of %.1f MiB each", found, each / (1 << 20))
    return found


def _num_checkpoints(config: DecoderConfig, engine: EngineConfig, auto_bytes: int, num_blocks: int) -> int:
    """Returns how many states of cached prefixes are kept: by ``auto``, at most one for each block.

    Raises:
        ConfigError: Memory is asked for that holds not even one.
    """
    if not config.state_size or not engine.prefix_cache:
        return 0
    each, asked = config.state_bytes, engine.state_bytes()
    if asked is None:
        return min(num_blocks, auto_bytes // each)
    if asked and asked < each:
        raise ConfigError("engine.state_memory", engine.state_memory, f"auto, 0, or room for a state of {each} bytes")
    return asked // each


def load_gpu_device(
    model_dir: Path,
    config: DecoderConfig,
    dtype_name: str,
    engine: EngineConfig,
    num_replicas: int,
    *,
    swaps: bool,
    bits: int,
    keep_quantized: bool = True,
    progress: Progress | None = None,
) -> Device:
    """Loads the model and shares out the GPU's memory: weights, then the largest and recorded steps, then the KV pool.

    Args:
        num_replicas: As in ``load_device``, as are the others; each replica has a GPU of its own.
    """
    cuda.check_device(engine.device)
    if config.shapes is not None:
        raise ConfigError("engine.device", engine.device, f"cpu: layers of {config.architecture} differ in shape")
    keep_compiled()
    dtype = parse_dtype(dtype_name, config, engine.device)
    token_bytes = config.kv_bytes_per_token(dtype)
    context_len = resolve_max_model_len(config, engine.max_model_len)
    weights = load_weights(model_dir, config, dtype, engine.device, keep_quantized=keep_quantized, progress=progress)
    if bits:
        weights = quantize_weights(weights, bits)
    _compile(config, weights, engine)
    num_blocks = num_pool_blocks(engine, token_bytes, context_len, _free_bytes(config, weights, engine, context_len))
    num_bytes = int(AUTO_SHARE / num_replicas * available_bytes())
    num_host_blocks = num_host_pool_blocks(engine, token_bytes, num_blocks if swaps else 0, num_bytes)
    pool = _pool(config, num_blocks, dtype, engine)
    max_model_len = min(context_len, pool.num_slots)
    backend = _graph_backend(config, weights, pool, engine, max_model_len, _sizes(engine, max_model_len))
    backend.compiles.begin()
    runner = ModelRunner(config, pool, backend, max_model_len, careful=CarefulSteps(cuda.recover), is_lost=cuda.is_lost)
    copier = make_copier(config, pool, num_host_blocks, on_gpu=True)
    logger.info("KV pool of %d blocks of %d tokens on the GPU", num_blocks, engine.kv_block_size)
    return Device(runner, context_len, token_bytes, num_blocks, num_host_blocks, copier)


def _pool(config: DecoderConfig, num_blocks: int, dtype: torch.dtype, engine: EngineConfig) -> KVPool:
    size = engine.kv_block_size
    return KVPool(config, num_blocks=num_blocks, block_size=size, dtype=dtype, device=engine.device, spare=True)


def _sizes(engine: EngineConfig, max_len: int) -> StepSizes:
    """Returns the sizes of steps whose sequences reach ``max_len`` tokens."""
    return StepSizes(engine.max_num_seqs, -(-max_len // engine.kv_block_size), engine.step_tokens)


def _graph_backend(
    config: DecoderConfig, weights: ModelWeights, pool: KVPool, engine: EngineConfig, max_len: int, sizes: StepSizes
) -> GraphBackend:
    """Makes the backend, and records its steps."""
    attention = gpu_attention(engine.backend, config, pool, sizes)
    graphs, wait, compiled = cuda.Graphs(), cuda.synchronize, engine.compile
    return GraphBackend(config, weights, pool, max_len, attention, sizes, graphs, wait, compiled=compiled)


def _compile(config: DecoderConfig, weights: ModelWeights, engine: EngineConfig) -> None:
    """Compiles this package's kernels several at once, as a step of a row and a chunk would launch them."""
    if engine.compile or engine.backend not in ("auto", "triton"):
        return
    size, sizes, pool = engine.kv_block_size, StepSizes(2, 2), _pool(config, 3, weights.embedding.dtype, engine)
    items = (StepItem("row", 1, 1, True, [0]), StepItem("chunk", 0, size, True, [1]))
    sequences = {
        item.request_id: Sequence.of(Request(item.request_id, 0, "", (0,) * size, SamplingParams(1))) for item in items
    }

    def step() -> None:
        backend = TorchBackend(config, weights, pool, size, gpu_attention(engine.backend, config, pool, sizes))
        backend.run(StepBatch(items), [0, 1], sequences)
        make_draws(sizes, config, pool.device)

    began_at = time.monotonic()
    num_kernels = compile_side_by_side(step, compute_threads(engine.num_threads, 1))
    logger.info("%d kernels compiled, or found in the cache, in %.1f s", num_kernels, time.monotonic() - began_at)


def _free_bytes(config: DecoderConfig, weights: ModelWeights, engine: EngineConfig, max_len: int) -> int:
    """Returns the bytes of the GPU beside weights, the largest step, and recorded steps with all that they need.

    The few KV blocks of the largest step, a spare one among them, count as taken.
    """
    batch, sequences, num_blocks = largest_step(engine)
    sizes = _sizes(engine, max_len)
    pool = _pool(config, num_blocks, weights.embedding.dtype, engine)

    def step() -> object:
        """Returns what must live while its memory is counted."""
        backend = _graph_backend(config, weights, pool, engine, max(max_len, pool.num_slots), sizes.largest())
        ModelRunner(config, pool, backend, pool.num_slots).execute(batch, sequences)
        return backend

    return cuda.free_bytes(engine.gpu_memory_utilization, step, sizes.count * RECORDING_BYTES)

"""From a model directory and a configuration to a model that computes, with its pools."""

from __future__ import annotations

from pathlib import Path

import torch

from core.config.engine import EngineConfig
from core.processors import compute_threads
from engine.checkpoint.model_config import DecoderConfig, resolve_max_model_len
from engine.checkpoint.weights import Progress, parse_dtype
from engine.devices.copiers import KVCopier
from engine.kv_pool import KVPool, pool_dtype
from engine.native.model import NativeBackend
from engine.runner import Device, available_bytes, num_host_pool_blocks, num_pool_blocks
from engine.steps.model_runner import ModelRunner

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
    num_blocks = num_pool_blocks(engine, token_bytes, context_len, auto_bytes)
    num_host_blocks = num_host_pool_blocks(engine, token_bytes, num_blocks if swaps else 0, auto_bytes)
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
    )
    copier = None
    if num_host_blocks:
        pool = KVPool(config, num_blocks=num_host_blocks, block_size=engine.kv_block_size, dtype=kv_dtype)
        copier = KVCopier(runner.pool, pool)
    exact = isinstance(runner.backend, NativeBackend)
    return Device(runner, context_len, token_bytes, num_blocks, num_host_blocks, copier, exact)

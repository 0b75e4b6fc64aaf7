"""From a model directory and a configuration to a worker."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from core.config import EngineConfig, SchedulerConfig
from core.errors import ConfigError
from core.messages import WorkerReady
from engine.detokenizer import Detokenizer, load_tokenizer
from engine.kv_copier import KVCopier
from engine.kv_pool import KVPool, num_blocks_for_budget
from engine.model_config import ModelConfig, load_model_config, resolve_max_model_len
from engine.model_runner import ModelRunner
from engine.weights import parse_dtype
from engine.worker import Worker
from kvcache import BatchLimits, BlockManager, LeaseExecutor, PlanExecutor, StaticExecutor
from policies.builders import swaps_kv

AUTO_SHARE = 0.2
"""Share of the machine's available memory that ``auto`` takes at most: for the KV pool, and again for the host pool."""


def build_worker(
    model_dir: Path,
    dtype_name: str,
    engine: EngineConfig,
    incarnation: str,
    num_replicas: int = 1,
    scheduler: SchedulerConfig | None = None,
) -> Worker:
    """Loads the model and sizes its pool.

    Args:
        num_replicas: Workers that share this machine's cores and memory where a setting is automatic.
        scheduler: Who decides: how batches are executed, and whether KV is moved to the host. Static execution has no
            use for a host pool or a prefix cache.

    Raises:
        InvalidValueError: the directory, the model or a setting cannot be used; names the field.
    """
    torch.set_num_threads(engine.num_threads or max(1, ((os.cpu_count() or 1) - 1) // num_replicas))
    config = load_model_config(model_dir)
    dtype = parse_dtype(dtype_name, config)
    context_len = resolve_max_model_len(config, engine.max_model_len)
    num_blocks = _num_blocks(config, context_len, dtype, engine, AUTO_SHARE / num_replicas)
    runner = ModelRunner.from_dir(
        model_dir,
        dtype=dtype,
        num_blocks=num_blocks,
        block_size=engine.block_size,
        context_len=context_len,
        backend=engine.backend,
    )
    limits = BatchLimits(engine.max_num_seqs, engine.max_batch_tokens)
    scheduler = scheduler or SchedulerConfig()
    static = scheduler.execution == "static"
    most_host_blocks = 0 if static or not swaps_kv(scheduler) else num_blocks
    num_host_blocks = _num_host_blocks(config, dtype, engine, AUTO_SHARE / num_replicas, most_host_blocks)
    block_bytes = config.kv_bytes_per_token(dtype) * engine.block_size
    blocks = BlockManager(num_blocks, engine.block_size, block_bytes)
    executor: PlanExecutor
    if static:
        executor = StaticExecutor(blocks, limits, incarnation, runner.max_model_len)
    else:
        host = BlockManager(num_host_blocks, engine.block_size) if num_host_blocks else None
        executor = LeaseExecutor(blocks, limits, incarnation, host)
    ready = WorkerReady(
        worker_incarnation=incarnation,
        num_blocks=num_blocks,
        block_size=engine.block_size,
        max_model_len=runner.max_model_len,
        pool_limited=runner.max_model_len < context_len,
        vocab_size=config.vocab_size,
        num_host_blocks=num_host_blocks,
    )
    copier = None
    if num_host_blocks:
        pool = KVPool(config, num_blocks=num_host_blocks, block_size=engine.block_size, dtype=dtype)
        copier = KVCopier(runner.pool, pool)
    detokenizer = Detokenizer(load_tokenizer(model_dir))
    prefix_cache = engine.prefix_cache and not static
    return Worker(runner, executor, detokenizer, config.eos_token_ids, ready, prefix_cache=prefix_cache, copier=copier)


def _num_blocks(
    config: ModelConfig, context_len: int, dtype: torch.dtype, engine: EngineConfig, auto_share: float
) -> int:
    asked = engine.kv_bytes()
    budget = int(auto_share * _available_bytes()) if asked is None else asked
    blocks = num_blocks_for_budget(budget, config, dtype, engine.block_size)
    if blocks < 1:
        need = config.kv_bytes_per_token(dtype) * engine.block_size
        raise ConfigError("engine.kv_memory", engine.kv_memory, f"room for at least one block of {need} bytes")
    if asked is None:
        full = -(-context_len // engine.block_size) * engine.max_num_seqs
        blocks = min(blocks, full)
    return blocks


def _num_host_blocks(
    config: ModelConfig, dtype: torch.dtype, engine: EngineConfig, auto_share: float, auto_blocks: int
) -> int:
    """What was asked for; else ``auto_blocks``, within the share of free memory."""
    asked = engine.host_kv_bytes()
    if asked is None:
        budget = int(auto_share * _available_bytes())
        return min(auto_blocks, num_blocks_for_budget(budget, config, dtype, engine.block_size))
    blocks = num_blocks_for_budget(asked, config, dtype, engine.block_size)
    if asked and not blocks:
        need = config.kv_bytes_per_token(dtype) * engine.block_size
        raise ConfigError(
            "engine.host_kv_memory", engine.host_kv_memory, f"auto, 0, or room for a block of {need} bytes"
        )
    return blocks


def _available_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

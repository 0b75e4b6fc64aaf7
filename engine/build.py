"""From a model directory and a configuration to a worker. Loads torch only where a model is to compute."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from core.config import EngineConfig, SchedulerConfig
from core.messages import WorkerReady
from engine.detokenizer import Detokenizer, load_tokenizer
from engine.emulated_device import emulate_device
from engine.model_config import load_model_config, resolve_max_model_len
from engine.worker import Worker
from kvcache import BatchLimits, BlockManager, LeaseExecutor, PlanExecutor, StaticExecutor
from policies.builders import swaps_kv


def check_worker(model_dir: Path, engine: EngineConfig) -> None:
    """Refuses before anything is loaded what could not be built.

    Raises:
        InvalidValueError: the directory, the model or a setting cannot be used; names the field.
    """
    config = load_model_config(model_dir)
    if engine.profile:
        emulate_device(config, load_tokenizer(model_dir), engine)  # costs nothing, and holds nothing
    else:
        resolve_max_model_len(config, engine.max_model_len)


def build_worker(
    model_dir: Path,
    dtype_name: str,
    engine: EngineConfig,
    incarnation: str,
    num_replicas: int = 1,
    scheduler: SchedulerConfig | None = None,
) -> Worker:
    """Loads the model, or emulates a device in its place, and sizes the pools.

    Args:
        num_replicas: Workers that share this machine's cores and memory where a setting is automatic.
        scheduler: Who decides: how batches are executed, and whether KV is moved to the host. Static execution has no
            use for a host pool or a prefix cache.

    Raises:
        InvalidValueError: the directory, the model or a setting cannot be used; names the field.
    """
    scheduler = scheduler or SchedulerConfig()
    static = scheduler.execution == "static"
    swaps = swaps_kv(scheduler)
    if static:  # nothing is paused, so nothing moves; and the paper's batches share nothing
        engine = dataclasses.replace(engine, host_kv_memory="0", prefix_cache=False)
    config = load_model_config(model_dir)
    tokenizer = load_tokenizer(model_dir)
    if engine.profile:
        device = emulate_device(config, tokenizer, engine, swaps=swaps)
    else:
        from engine.model_device import load_device

        device = load_device(model_dir, config, dtype_name, engine, num_replicas, swaps=swaps)
    limits = BatchLimits(engine.max_num_seqs, engine.max_batch_tokens)
    blocks = BlockManager(device.num_blocks, engine.block_size, device.token_bytes * engine.block_size)
    num_slots = device.num_blocks * engine.block_size
    max_model_len = min(device.context_len, num_slots)
    executor: PlanExecutor
    if static:
        executor = StaticExecutor(blocks, limits, incarnation, max_model_len)
    else:
        host = BlockManager(device.num_host_blocks, engine.block_size) if device.num_host_blocks else None
        executor = LeaseExecutor(blocks, limits, incarnation, host)
    ready = WorkerReady(
        worker_incarnation=incarnation,
        num_blocks=device.num_blocks,
        block_size=engine.block_size,
        max_model_len=max_model_len,
        pool_limited=num_slots < device.context_len,
        vocab_size=config.vocab_size,
        num_host_blocks=device.num_host_blocks,
    )
    return Worker(
        device.runner,
        executor,
        Detokenizer(tokenizer),
        config.eos_token_ids,
        ready,
        prefix_cache=engine.prefix_cache,
        copier=device.copier,
    )

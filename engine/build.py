"""From a model directory and a configuration to a worker. Loads torch only where a model is to compute."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from farsight.core.config.engine import EngineConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError, require
from farsight.core.messages.plans import WorkerReady
from farsight.engine.checkpoint.check import check_checkpoint
from farsight.engine.checkpoint.encoder_config import (
    EncoderConfig,
    check_encoder,
    load_encoder_config,
    resolve_encoder_len,
)
from farsight.engine.checkpoint.model_config import DecoderConfig, load_model_config, resolve_max_model_len
from farsight.engine.checkpoint.rotary_config import LongScaling
from farsight.engine.devices.emulated import emulate_device
from farsight.engine.drafted_steps import DraftedSteps
from farsight.engine.parallel.mesh import ALONE, Mesh, check_parallel
from farsight.engine.runner import Device
from farsight.engine.sequence import Detokenizer, LongSequences
from farsight.engine.vision.geometry import load_geometry
from farsight.engine.vision.spans import FindRows, ImageInputs, carried_rows
from farsight.engine.worker import Worker
from farsight.kvcache import BatchLimits, BlockManager, LeaseExecutor, PipelinedExecutor, PlanExecutor, StaticExecutor
from farsight.kvcache.checkpoints import state_spacing
from farsight.policies.compose import follows_prefixes, swaps_kv
from farsight.policies.presets import find_preset
from farsight.policies.speculation.base import SPECULATIONS, SpeculationContext
from farsight.tokenization.gguf_file import held_header
from farsight.tokenization.loading import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from farsight.engine.parallel.links import Ranks


BITS = {"full": 0, "float": 0, "int8": 8, "int4": 4}
"""What ``engine.weights`` rounds the matrices to; 0 leaves them."""

BY_ARRIVAL = SchedulerConfig(preset="fcfs")
"""Policies where a caller names none: a server's default looks ahead by forecasts, which an engine alone has not."""

DEFAULT_SPECULATION = "ngram"
"""The part that ``engine.speculation = "auto"`` stands for where steps are exact."""


def check_worker(model_dir: Path, engine: EngineConfig, mesh: Mesh = ALONE) -> None:
    """Refuses, before anything is loaded, a configuration that could not be built, or a damaged checkpoint.

    Args:
        mesh: The ranks that the model is spread over.

    Raises:
        InvalidValueError: the directory, the model or a setting cannot be used; names the field.
    """
    _check_tiers(engine, mesh_size=mesh.size, static=False)
    encoder = load_encoder_config(model_dir)
    if encoder is not None:
        _check_encoder(model_dir, encoder, engine, mesh)
        return
    config = load_model_config(model_dir)
    if mesh.size > 1:
        check_parallel(mesh, config, engine)
    if engine.profile:
        emulate_device(config, load_tokenizer(model_dir), engine)  # costs nothing, and holds nothing
    else:
        resolve_max_model_len(config, engine.max_model_len)
        check_checkpoint(model_dir, config)
        load_geometry(model_dir)


def _check_encoder(model_dir: Path, config: EncoderConfig, engine: EngineConfig, mesh: Mesh) -> None:
    require(mesh.size == 1, "model.tensor_parallel", mesh.size, "1: an encoder is not spread over ranks")
    require(not engine.profile, "engine.device", engine.profile, "cpu: an encoder is not emulated")
    require(engine.device == "cpu", "engine.device", engine.device, "cpu: the processor computes an encoder")
    require(engine.weights in ("auto", "full"), "engine.weights", engine.weights, "auto or full for an encoder")
    resolve_encoder_len(config, engine.max_model_len)
    check_encoder(model_dir, config)


def build_worker(
    model_dir: Path,
    dtype_name: str,
    engine: EngineConfig,
    incarnation: str,
    num_replicas: int = 1,
    scheduler: SchedulerConfig | None = None,
    ranks: Ranks | None = None,
    find_rows: FindRows = carried_rows,
    progress: Callable[[float], object] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    tokenizer: Tokenizer | None = None,
) -> Worker:
    """Loads the model, or emulates a device in its place, and sizes the pools.

    Args:
        num_replicas: Workers that share this machine's cores and memory where a setting is automatic.
        scheduler: Policies, which determine how batches are executed and whether KV moves to the host. Static execution
            has no use for a host pool or a prefix cache.
        ranks: The other ranks, where the model is spread over several processes.
        find_rows: Finds the rows of images; by default with the requests.
        progress: Is told the share of the parameters that has been read, where a decoder runs in one process.
        clock: Seconds, monotonic; measures what speculation costs.
        tokenizer: The model's; None to load it, which takes seconds where the vocabulary is large.

    Raises:
        InvalidValueError: the directory, the model or a setting cannot be used; names the field.
    """
    scheduler = scheduler or BY_ARRIVAL
    static = scheduler.execution == "static"
    swaps = swaps_kv(scheduler)
    _check_tiers(engine, mesh_size=1 if ranks is None else ranks.mesh.size, static=static)
    if static:  # no sequence is paused, so no KV moves; and the paper's batches share nothing
        engine = dataclasses.replace(engine, host_kv_memory="0", prefix_cache=False)
    _header = held_header(model_dir)
    encoder = load_encoder_config(model_dir)
    host_tier = 0 if swaps or not engine.disk_kv else engine.host_kv_bytes() or 0
    if host_tier:  # no sequence is stopped there, so all of it is the tier's
        engine = dataclasses.replace(engine, host_kv_memory="0")
    if encoder is not None:
        require(not engine.disk_kv, "engine.disk_kv", engine.disk_kv, "empty: an encoder keeps no KV")
        engine = dataclasses.replace(engine, host_kv_memory="0", prefix_cache=False, speculation="off")
    config = encoder or load_model_config(model_dir)
    if isinstance(config, DecoderConfig) and engine.long_factors == "request":
        if ranks is not None:
            raise ConfigError("engine.long_factors", engine.long_factors, "served where a replica has several ranks")
        config = config.with_factors_by_request()
    has_states = isinstance(config, DecoderConfig) and config.state_size > 0
    if has_states:  # a block of keys and values says nothing of the state behind it
        require(not engine.disk_kv, "engine.disk_kv", engine.disk_kv, "empty: this model has states beside its blocks")
    tokenizer = load_tokenizer(model_dir) if tokenizer is None else tokenizer
    weights = find_preset(scheduler.preset).weights if engine.weights == "auto" else engine.weights
    if isinstance(config, EncoderConfig):
        from farsight.engine.devices.encoder_device import load_encoder_device

        device = load_encoder_device(model_dir, config, dtype_name, engine, num_replicas)
    elif ranks is not None:
        from farsight.engine.parallel.device import load_parallel_device

        if BITS[weights]:
            raise ConfigError("engine.weights", weights, "full or float where a replica has several ranks")
        device = load_parallel_device(
            model_dir,
            config,
            dtype_name,
            engine,
            num_replicas,
            ranks,
            swaps=swaps,
            counts=lambda batch, request_id: executor.counts(batch, request_id),  # which is made for the device
        )
    elif engine.profile:
        device = emulate_device(config, tokenizer, engine, swaps=swaps)
    else:
        if engine.device == "cuda":
            from farsight.engine.devices.model_device import load_gpu_device as load_device
        else:
            from farsight.engine.devices.model_device import load_device
        device = load_device(
            model_dir,
            config,
            dtype_name,
            engine,
            num_replicas,
            swaps=swaps,
            bits=BITS[weights],
            keep_quantized=weights != "float",
            progress=progress,
        )
    if has_states and not device.num_checkpoints:
        engine = dataclasses.replace(engine, prefix_cache=False)
    limits = BatchLimits(engine.max_num_seqs, engine.step_tokens)
    block_bytes = device.token_bytes * engine.kv_block_size
    blocks = BlockManager(device.num_blocks, engine.kv_block_size, block_bytes, device.num_states)
    num_slots = device.num_blocks * engine.kv_block_size
    max_model_len = min(device.context_len, num_slots)
    executor: PlanExecutor
    if static:
        executor = StaticExecutor(blocks, limits, incarnation, max_model_len)
    else:
        host = BlockManager(device.num_host_blocks, engine.kv_block_size) if device.num_host_blocks else None
        num_stages = 1 if ranks is None else ranks.mesh.pipeline
        if num_stages == 1:
            executor = LeaseExecutor(blocks, limits, incarnation, host)
        else:
            executor = PipelinedExecutor(blocks, limits, incarnation, host, max_in_flight=num_stages)
    eos_token_ids = () if isinstance(config, EncoderConfig) else config.eos_token_ids
    ready = WorkerReady(
        worker_incarnation=incarnation,
        num_blocks=device.num_blocks,
        block_size=engine.kv_block_size,
        max_model_len=max_model_len,
        pool_limited=num_slots < device.context_len,
        vocab_size=config.vocab_size,
        num_host_blocks=device.num_host_blocks,
        end_ids=eos_token_ids,
    )
    if engine.prefix_cache and follows_prefixes(scheduler):
        executor.tell_cache()
    copier = device.copier
    if engine.disk_kv and isinstance(config, DecoderConfig) and isinstance(executor, LeaseExecutor):
        from farsight.engine.devices.tier_store import open_tiers

        tiers, copier = open_tiers(model_dir, config, engine, device, weights, host_tier, blocks)
        executor.keep_tiers(tiers)
    grammars = None
    if encoder is None and not engine.profile:
        from farsight.tokenization.grammars.compiler import GrammarCompiler  # needs llguidance

        grammars = GrammarCompiler(tokenizer, config.vocab_size, eos_token_ids)
    worker = Worker(
        device.runner,
        executor,
        Detokenizer(tokenizer),
        eos_token_ids,
        ready,
        prefix_cache=engine.prefix_cache,
        copier=copier,
        grammars=grammars,
        image_inputs=_image_inputs(config, engine, find_rows),
        speculation=_speculation(
            engine,
            static=static,
            has_states=has_states,
            num_ranks=1 if ranks is None else ranks.mesh.size,
            device=device,
            clock=clock,
        ),
        long_sequences=_long_sequences(config, max_model_len),
    )
    if device.num_checkpoints and isinstance(config, DecoderConfig) and isinstance(executor, LeaseExecutor):
        spacing = state_spacing(config.state_bytes, device.token_bytes, engine.kv_block_size)
        executor.keep_states(device.num_checkpoints, spacing)
    return worker


def _check_tiers(engine: EngineConfig, *, mesh_size: int, static: bool) -> None:
    where = "batches run in lockstep" if static else "a replica has several ranks" if mesh_size > 1 else ""
    require(not (engine.disk_kv and where), "engine.disk_kv", engine.disk_kv, f"empty where {where}")


def _long_sequences(config: EncoderConfig | DecoderConfig, max_model_len: int) -> LongSequences | None:
    rotary = None if isinstance(config, EncoderConfig) else config.rotary
    if rotary is None or not isinstance(rotary.scaling, LongScaling):
        return None
    first_row = rotary.long_row(max_model_len)
    return LongSequences(rotary.scaling.original_len, first_row) if first_row else None


def _image_inputs(
    config: EncoderConfig | DecoderConfig, engine: EngineConfig, find_rows: FindRows
) -> ImageInputs | None:
    if engine.profile:
        return None
    if isinstance(config, EncoderConfig):
        return ImageInputs(find_rows, config.hidden_size, sees=False, axes=False)
    axes = config.rotary is not None and config.rotary.axes is not None
    return ImageInputs(find_rows, config.hidden_size, sees=bool(config.sees), axes=axes)


def _speculation(
    engine: EngineConfig, *, static: bool, has_states: bool, num_ranks: int, device: Device, clock: Callable[[], float]
) -> DraftedSteps | None:
    """Returns what guesses tokens for this worker's steps; None for nothing.

    Raises:
        ConfigError: The part is unknown, or cannot be used here.
    """
    name = engine.speculation
    if name == "off":
        return None
    for applies, where in (
        (static, "where batches run in lockstep"),
        (has_states, "for a model with states, which cannot take back a token"),
        (num_ranks > 1, "where a replica has several ranks"),
        (bool(engine.profile), "on an emulated device"),
    ):
        if applies:
            require(name == "auto", "engine.speculation", name, f"auto or off {where}")
            return None
    if name == "auto" and not device.exact:
        return None
    part = SPECULATIONS.find(DEFAULT_SPECULATION if name == "auto" else name)
    return DraftedSteps(part.build(SpeculationContext()), clock)

"""From a model directory and ranks that wait to a device of several ranks, as rank 0 sees it."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from farsight.core.codec import decode, encode
from farsight.core.config.engine import EngineConfig
from farsight.core.errors import RankLost
from farsight.core.processors import compute_threads
from farsight.engine import cuda
from farsight.engine.checkpoint.dtypes import parse_dtype
from farsight.engine.checkpoint.model_config import DecoderConfig, resolve_max_model_len
from farsight.engine.checkpoint.weights import CheckpointError
from farsight.engine.devices.model_device import AUTO_SHARE
from farsight.engine.parallel.driver import Lead, ParallelBackend, ParallelCopier, ParallelRunner, StepReports
from farsight.engine.parallel.exchange import Exchange, RankGroup
from farsight.engine.parallel.links import Link, Ranks
from farsight.engine.parallel.mesh import Part, check_parallel
from farsight.engine.parallel.shards import load_shard
from farsight.engine.parallel.stage import free_bytes, make_pools, make_stage
from farsight.engine.parallel.wire import (
    Finished,
    RankLoaded,
    RankMeasured,
    RankPools,
    RankSetup,
    unpack_report,
)
from farsight.engine.runner import Device, available_bytes, num_host_pool_blocks, num_pool_blocks
from farsight.engine.steps.careful_steps import CarefulSteps, Counts

GATHER_TIMEOUT_S = 120.0
"""Seconds for all processes of a replica to come up."""


def load_parallel_device(
    model_dir: Path,
    config: DecoderConfig,
    dtype_name: str,
    engine: EngineConfig,
    num_replicas: int,
    ranks: Ranks,
    *,
    swaps: bool,
    counts: Counts,
) -> Device:
    """Loads every rank's part and sizes their pools alike; ``kv_memory`` and ``host_kv_memory`` are those of one rank.

    Args:
        num_replicas: Replicas that share this machine's cores and memory where a setting is automatic.
        swaps: Whether there is use for a host pool.
        counts: ``PlanExecutor.counts`` of the executor whose steps the device runs.

    Raises:
        InvalidValueError: the model or a setting cannot be used; names the field.
        RankLost: a rank does not come up.
    """
    mesh = ranks.mesh
    check_parallel(mesh, config, engine)
    cuda.check_device(engine.device)
    context_len = resolve_max_model_len(config, engine.max_model_len)
    dtype = parse_dtype(dtype_name, config, engine.device)
    num_sharers = num_replicas * mesh.size
    with contextlib.ExitStack() as on_failure:
        links = ranks.gathering.wait(GATHER_TIMEOUT_S)
        for link in links:
            on_failure.callback(link.close)
        host = ranks.gathering.ticket.host
        store = on_failure.enter_context(socket.create_server((host, 0)))
        setup = RankSetup(
            model_dir=str(model_dir),
            mesh=mesh,
            dtype=str(dtype).removeprefix("torch."),
            engine=engine,
            context_len=context_len,
            num_threads=compute_threads(engine.num_threads, num_sharers),
            num_sharers=num_sharers,
            store_port=store.getsockname()[1],
        )
        torch.set_num_threads(setup.num_threads)
        _tell(links, setup)
        part = Part(config, mesh, 0)
        weights = load_shard(model_dir, part, dtype, engine.device)
        _check_loaded(links)
        group = RankGroup(mesh, 0, host, setup.store_port, torch.device(engine.device), store)
        exchange = Exchange(group, part, engine, dtype)
        free = min(free_bytes(part, weights, engine, num_sharers), *_measured(links))
        pools = _size_pools(config, setup, free, swaps=swaps)
        _tell(links, pools)
        pool, own_copier = make_pools(part, pools, engine, dtype)
        stage = make_stage(part, weights, pool, exchange, engine, context_len)
        for link in links:
            link.receive()  # its rank waits for orders from now on
        on_failure.pop_all()
    reports = StepReports(len(links))
    lead = Lead(links, stage, own_copier, reports)
    copier = None if own_copier is None else ParallelCopier(lead, own_copier)
    threading.Thread(target=_listen, args=(links, reports, copier, ranks.on_lost), name="ranks", daemon=True).start()
    backend = ParallelBackend(lead, engine.kv_block_size, config.vocab_size)
    careful = CarefulSteps(cuda.recover_on(engine.device))
    runner = ParallelRunner(
        config, pool, backend, min(context_len, pool.num_slots), careful, counts, cuda.lost_on(engine.device)
    )
    token_bytes = config.kv_bytes_per_token(dtype)
    return Device(runner, context_len, token_bytes, pools.num_blocks, pools.num_host_blocks, copier)


def _size_pools(config: DecoderConfig, setup: RankSetup, free: int, *, swaps: bool) -> RankPools:
    """Returns the number of blocks that fit every rank, in ``free`` bytes by default."""
    engine, dtype = setup.engine, getattr(torch, setup.dtype)
    parts = [Part(config, setup.mesh, rank).config for rank in range(setup.mesh.size)]
    token_bytes = max(part.kv_bytes_per_token(dtype) for part in parts)
    num_blocks = num_pool_blocks(engine, token_bytes, setup.context_len, free)
    host_bytes = int(AUTO_SHARE / setup.num_sharers * available_bytes())
    return RankPools(num_blocks, num_host_pool_blocks(engine, token_bytes, num_blocks if swaps else 0, host_bytes))


def _tell(links: list[Link], message: RankSetup | RankPools) -> None:
    for link in links:
        link.send(encode(message))


def _check_loaded(links: list[Link]) -> None:
    """Lets the ranks connect to each other once each has loaded its part.

    Raises:
        CheckpointError: A rank could not load its part.
    """
    for rank, link in enumerate(links, 1):
        error = decode(link.receive(), RankLoaded).error
        if error:
            raise CheckpointError("model", f"rank {rank}", f"a model that every rank can load ({error})")
    for link in links:
        link.send(b"")


def _measured(links: list[Link]) -> list[int]:
    """Returns free memory of each rank."""
    return [decode(link.receive(), RankMeasured).free_bytes for link in links]


def _listen(
    links: list[Link], reports: StepReports, copier: ParallelCopier | None, on_lost: Callable[[RankLost], object]
) -> None:
    """Receives the ends of steps and copies, and of ranks; the end of one rank ends all."""
    with selectors.DefaultSelector() as selector:
        for rank, link in enumerate(links, 1):
            selector.register(link.fileno(), selectors.EVENT_READ, (rank, link))
        while True:
            for key, _ in selector.select():
                rank, link = key.data
                try:
                    report = unpack_report(link.receive())
                except RankLost as error:
                    reports.rank_lost()
                    if copier is not None:
                        copier.rank_lost()
                    for each in links:
                        each.close()
                    on_lost(RankLost(f"rank {rank}: {error}"))
                    return
                if isinstance(report, Finished):
                    reports.hear(rank, report)
                else:
                    assert copier is not None, "copies need a host pool"
                    copier.rank_done(report)

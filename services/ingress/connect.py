"""From a running service to a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import time

from actors.runtime.hosts import keep_supervisor
from actors.runtime.peer import LOOK_AGAIN_S, PeerLost
from actors.runtime.site import Site
from core.messages.fleet import ServedModel
from estimator.device_profile import profile_label
from services.api.backend import ModelInfo
from services.ingress.engine_client import EngineClient


async def open_client(site: Site) -> EngineClient:
    """A started client; waits until a replica is up."""
    keeper = asyncio.create_task(keep_supervisor(site))  # the Router may be waiting for one
    try:
        served = await _wait_for_model(site)
    finally:
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
    ready = served.ready
    model = ModelInfo(
        name=site.config.model.name,
        created=int(time.time()),
        max_model_len=ready.max_model_len,
        pool_limited=ready.pool_limited,
        vocab_size=ready.vocab_size,
        benchmark_mode=site.config.engine.benchmark_mode,
        emulated=profile_label(site.config.engine.profile),
    )
    client = EngineClient(site, model, lambda: keep_supervisor(site), prefix_block_size=served.prefix_block_size)
    await client.start()
    return client


async def _wait_for_model(site: Site) -> ServedModel:
    with contextlib.closing(site.peers()) as peers:
        router = peers.router()
        while True:
            try:
                served = await router.model()
            except PeerLost:
                served = None
            if served is not None:
                return served
            await asyncio.sleep(LOOK_AGAIN_S)

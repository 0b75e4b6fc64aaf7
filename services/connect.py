"""From a configuration to a client of the running pieces."""

from __future__ import annotations

import asyncio
import time

from actors.hosts import keep_supervisor
from actors.names import ROUTER
from actors.peer import LOOK_AGAIN_S, PeerBook, PeerLost
from core.codec import decode
from core.config import FarsightConfig
from core.messages import WorkerReady
from services.api.backend import ModelInfo
from services.client import EngineClient


async def open_client(placement: str, config: FarsightConfig, model_dir: str) -> EngineClient:
    """A started client; waits until a replica is up."""
    peers = PeerBook(placement)
    ready = await _wait_for_model(peers)
    model = ModelInfo(
        name=config.model.name,
        created=int(time.time()),
        max_model_len=ready.max_model_len,
        pool_limited=ready.pool_limited,
        vocab_size=ready.vocab_size,
    )
    client = EngineClient(peers, model, config, lambda: keep_supervisor(placement, config, model_dir))
    await client.start()
    return client


async def _wait_for_model(peers: PeerBook) -> WorkerReady:
    router = peers.peer(ROUTER)
    while True:
        try:
            data = await router.call("model")
        except PeerLost:
            data = b""
        if data:
            return decode(data, WorkerReady)
        await asyncio.sleep(LOOK_AGAIN_S)

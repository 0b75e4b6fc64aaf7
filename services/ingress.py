"""The Ray Serve deployment that speaks HTTP. Imports no torch: this process only parses, tokenises and streams."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import ray

from actors.names import CONTROL, NAMESPACE, worker_name
from core.codec import decode
from core.config import FarsightConfig
from core.messages import WorkerReady
from services.api.app import build_app
from services.api.backend import ModelInfo
from services.api.prompts import PromptEncoder
from services.client import EngineClient


class Ingress:
    """One ingress replica: an ASGI app over an ``EngineClient``."""

    def __init__(self, model_dir: str, model_name: str, config: FarsightConfig) -> None:
        self._config = config
        self._encoder = PromptEncoder(Path(model_dir))
        self._model_name = model_name
        self._client: EngineClient | None = None

    async def __serve_build_asgi_app__(self) -> Any:
        control = ray.get_actor(CONTROL, namespace=NAMESPACE)
        names = [worker_name(index) for index in range(self._config.model.replicas)]
        workers = [ray.get_actor(name, namespace=NAMESPACE) for name in names]
        ready = decode(await control.worker_ready.remote(), WorkerReady)
        info = ModelInfo(
            name=self._model_name,
            created=int(time.time()),
            max_model_len=ready.max_model_len,
            pool_limited=ready.pool_limited,
            vocab_size=ready.vocab_size,
        )
        server = self._config.server
        self._client = EngineClient(control, workers, info, server.max_queued_requests, server.max_queued_tokens)
        self._client.start()
        return build_app(self._client, self._encoder, max_body_bytes=server.max_body_bytes)

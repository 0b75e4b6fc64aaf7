"""The Ray Serve deployment that speaks HTTP. Imports no torch: this process only parses, tokenises and streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from core.config import FarsightConfig
from services.api.app import build_app
from services.api.prompts import PromptEncoder
from services.connect import open_client


class Ingress:
    """One ingress replica: an ASGI app over an ``EngineClient``.

    Args:
        config: ``model.name`` is what clients ask for.
    """

    def __init__(self, model_dir: str, placement: str, config: FarsightConfig) -> None:
        self._model_dir = model_dir
        self._placement = placement
        self._config = config
        self._encoder = PromptEncoder(Path(model_dir))

    async def __serve_build_asgi_app__(self) -> Any:
        client = await open_client(self._placement, self._config, self._model_dir)
        return build_app(client, self._encoder, max_body_bytes=self._config.server.max_body_bytes)

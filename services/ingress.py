"""The Ray Serve deployment that speaks HTTP. Imports no torch: this process only parses, tokenises and streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actors.site import Site
from services.api.app import build_app
from services.api.prompts import PromptEncoder
from services.connect import open_client


class Ingress:
    """One ingress replica: an ASGI app over an ``EngineClient``."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._encoder = PromptEncoder(Path(site.model_dir))

    async def __serve_build_asgi_app__(self) -> Any:
        client = await open_client(self._site)
        return build_app(client, self._encoder, max_body_bytes=self._site.config.server.max_body_bytes)

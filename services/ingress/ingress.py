"""The Ray Serve deployment that speaks HTTP. Imports no torch: this process only parses, tokenises and streams."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from actors.runtime.site import Site
from services.api.admin import Administration
from services.api.app import build_app
from services.api.text.prompts import PromptEncoder
from services.ingress.connect import open_client
from services.run_file import ADMIN_TOKEN_VARIABLE


class Ingress:
    """One ingress replica: an ASGI app over an ``EngineClient``.

    Args:
        site: What is served.
        scales_ingress: Whether somebody follows the wanted number of ingress replicas.
    """

    def __init__(self, site: Site, scales_ingress: bool) -> None:
        self._site = site
        self._encoder = PromptEncoder(Path(site.model_dir))
        self._administration = Administration(os.environ.get(ADMIN_TOKEN_VARIABLE, ""), scales_ingress)

    async def __serve_build_asgi_app__(self) -> Any:
        client = await open_client(self._site)
        server = self._site.config.server
        shares = server.prefix_sharing == "all"
        return build_app(client, self._encoder, server.max_body_bytes, self._administration, shares_across_keys=shares)

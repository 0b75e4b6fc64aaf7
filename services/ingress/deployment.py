"""What Ray Serve is told to run. The process that tells it needs none of what an ingress replica imports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from farsight.actors.runtime.peer import Site


class IngressDeployment:
    """An ``Ingress``, imported where it runs; the same arguments."""

    def __init__(self, site: Site, scales_ingress: bool) -> None:
        from farsight.services.ingress.ingress import Ingress

        self._ingress = Ingress(site, scales_ingress)

    async def __serve_build_asgi_app__(self) -> Any:
        """Returns the application, for Ray Serve."""
        return await self._ingress.build()

"""What a process of Farsight says about itself over HTTP: ``/healthz`` for probes, ``/metrics`` for Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from farsight.core.exposition import OPEN_METRICS_TYPE, PLAIN_TYPE, accepts_open_metrics, exposition
from farsight.core.messages.status import ComponentStatus

if TYPE_CHECKING:
    from aiohttp import web

HEALTHY_STATES = frozenset({"ready", "draining"})
"""A draining component still does its work; a probe must not have it killed."""

SHUTDOWN_S = 1.0
"""Seconds for which ``stop`` waits for answers that are being sent."""

_FIELDS = ("name", "kind", "state", "queue", "last_step_age_s", "restarts", "pid", "degraded")


class HealthServer:
    """Serves the components of one process on a port that the system chooses.

    Args:
        registry: The metrics that ``/metrics`` shows.
        rows: Returns the status of the components of this process; called in the event loop, so it must not block.
        host: The address to listen on.
    """

    def __init__(
        self, registry: CollectorRegistry, rows: Callable[[], list[ComponentStatus]], host: str = "127.0.0.1"
    ) -> None:
        self._registry = registry
        self._rows = rows
        self._host = host
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Begins to listen; returns the port. Called once.

        Raises:
            OSError: The address cannot be listened on.
        """
        from aiohttp import web  # only here: what runs in one process listens nowhere

        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, self._host, 0).start()
        except OSError:
            await self.stop()
            raise
        port: int = self._runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Closes the port and every connection; does nothing if the server was not started."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _healthz(self, request: web.Request) -> web.Response:
        from aiohttp import web

        rows = self._rows()
        healthy = all(row.state in HEALTHY_STATES for row in rows)
        fields = [_fields(row) for row in rows]
        # `pieces` is the old name, kept until version 0.3.
        return web.json_response({"components": fields, "pieces": fields}, status=200 if healthy else 503)

    async def _metrics(self, request: web.Request) -> web.Response:
        from aiohttp import web

        open_metrics = accepts_open_metrics(request.headers.get("Accept", ""))
        headers = {"Content-Type": OPEN_METRICS_TYPE if open_metrics else PLAIN_TYPE}
        return web.Response(text=exposition(self._registry, open_metrics=open_metrics), headers=headers)


def _fields(row: ComponentStatus) -> dict[str, Any]:
    return {name: getattr(row, name) for name in _FIELDS}

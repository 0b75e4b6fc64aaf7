"""The demo's page and what it asks for, on the loopback address alone.

A page of another origin can read nothing here and can kill nothing: ``Host`` must name this address, which a rebound
name does not; ``POST /kill`` asks for the page's own origin and for a token that only the page holds.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from aiohttp import web

from farsight.core.errors import FarsightError
from farsight.services.api.pages.dashboard import html_page, operator_page
from farsight.services.demo.live_service import LiveService
from farsight.services.demo.race import Race

TOKEN_HEADER = "X-Farsight-Demo"
KILL_EVERY_S = 3.0
"""A service loses its worker at most this often."""

MAX_BODY_BYTES = 1024
ASK_S = 5.0


class DemoPages:
    """The handlers.

    Args:
        session: Asks the services.
        port: Port of these pages.
    """

    def __init__(self, race: Race, services: list[LiveService], session: aiohttp.ClientSession, port: int) -> None:
        self.token = secrets.token_urlsafe(32)
        self._race = race
        self._services = services
        self._session = session
        self._hosts = {f"127.0.0.1:{port}", f"localhost:{port}"}
        self._killed_at: dict[int, float] = {}

    def app(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        app.router.add_get("/", self._page)
        app.router.add_get("/race", self._view)
        app.router.add_get(r"/explain/{side:[01]}/{lane:\d{1,4}}", self._explain)
        app.router.add_post(r"/kill/{side:[01]}", self._kill)
        return app

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.headers.get("Host", "") not in self._hosts:
            return _error(403, f"the Host header must be one of {', '.join(sorted(self._hosts))}")
        if request.method == "POST" and (refusal := self._why_refused(request)):
            return _error(403, refusal)
        return await handler(request)

    def _why_refused(self, request: web.Request) -> str:
        if request.headers.get("Origin", "") != f"http://{request.headers['Host']}":
            return "only the demo's own page may ask for this: the Origin header must be its own"
        if not hmac.compare_digest(request.headers.get(TOKEN_HEADER, "").encode(), self.token.encode()):
            return f"the header {TOKEN_HEADER} must hold the page's token"
        return ""

    async def _page(self, _: web.Request) -> web.Response:
        page = html_page(operator_page("race/race").replace("{{ token }}", self.token))
        return web.Response(body=bytes(page.body), headers=dict(page.headers))

    async def _view(self, _: web.Request) -> web.Response:
        return _json(self._race.view(time.perf_counter()))

    async def _explain(self, request: web.Request) -> web.Response:
        side, lane = int(request.match_info["side"]), int(request.match_info["lane"])
        lanes = self._race.sides[side].lanes
        response_id = lanes[lane].response_id if lane < len(lanes) else ""
        if not response_id:
            return _error(404, "the service has not begun to answer this request")
        url = f"{self._services[side].url}/v1/requests/{response_id}"
        try:
            async with self._session.get(url, timeout=aiohttp.ClientTimeout(ASK_S)) as reply:
                return _json(await reply.json(), reply.status)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError):
            return _error(503, "the service does not answer now")

    async def _kill(self, request: web.Request) -> web.Response:
        side = int(request.match_info["side"])
        now = time.perf_counter()
        if now - self._killed_at.get(side, -KILL_EVERY_S) < KILL_EVERY_S:
            return _error(429, f"a worker dies at most once in {KILL_EVERY_S:g} s")
        self._killed_at[side] = now
        try:
            pid = await self._services[side].kill_worker(self._session)
        except FarsightError as error:
            return _error(409, str(error))
        if self._race.began_at is not None:
            self._race.sides[side].kills.append(now - self._race.began_at)
        return _json({"pid": pid})


def _json(body: Any, status: int = 200) -> web.Response:
    return web.json_response(body, status=status, headers={"Cache-Control": "no-store"})


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message}}, status)

"""Replicas that are other servers, behind the real Router: where requests go when one of them misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from farsight.core.config.actors import ReplicaConfig
from farsight.core.config.engine import ModelConfig
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import SamplingParams
from farsight.services.api.requests import unnamed_request
from farsight.services.ingress.engine_client import EngineClient
from tests.actors.conftest import CONTINUOUS, open_system
from tests.actors.local_system import LONG_S, System, eventually, kill, patient_rows, rows
from tests.unit.actors.openai_double import OpenAIDouble

WHOLE = "one two three"
DEADLINE_S = 5.0


class Server(OpenAIDouble):
    """One that rests in the middle of its answers until it is to go on."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    async def _send(self, reply: web.StreamResponse, chunk: dict[str, Any]) -> None:
        await super()._send(reply, chunk)
        await self.goes_on.wait()


@asynccontextmanager
async def two_servers(model_dir: Path, log_dir: Path) -> AsyncIterator[tuple[System, Server, Server]]:
    """They answer in this process, everything else is real; requests go to them by turns."""
    async with AsyncExitStack() as stack:
        doubles = [Server(), Server()]
        for each in doubles:
            await stack.enter_async_context(each.running())
        limits: dict[str, Any] = {"first_token_timeout_s": 0.5, "token_timeout_s": LONG_S}
        replica = tuple(ReplicaConfig("openai", each.url, **limits) for each in doubles)
        tables = {"model": ModelConfig(name="m", replicas=0), "replica": replica}
        system = stack.enter_context(open_system("fused", model_dir, log_dir, CONTINUOUS, **tables))
        yield system, doubles[0], doubles[1]


async def ask(client: EngineClient, heard: list[TokenDelta] | None = None) -> list[TokenDelta]:
    """The whole answer.

    Args:
        heard: What has come so far is found there meanwhile.
    """
    heard = [] if heard is None else heard
    async with (
        asyncio.timeout(LONG_S),
        aclosing(client.stream(unnamed_request((5, 6, 7), SamplingParams(9)))) as deltas,
    ):
        async for delta in deltas:
            heard.append(delta)
    return heard


async def all_are_answered(client: EngineClient, count: int = 6) -> None:
    for deltas in await asyncio.gather(*(ask(client) for _ in range(count))):
        assert "".join(each.text for each in deltas) == WHOLE
        assert deltas[-1].finish_reason == "stop"
        assert sum(each.num_tokens for each in deltas) == 3


async def breaker(client: EngineClient, name: str) -> str:
    return (await rows(client))[name].breaker


async def why_none_answers(client: EngineClient, first: Server, second: Server) -> None:
    """Both refuse."""
    first.status = second.status = 500

    async def told() -> bool:
        last = (await ask(client))[-1]
        assert last.finish_reason == "error" and last.error is not None
        assert last.error.startswith(f"no token within {DEADLINE_S:g} s; ")
        return last.error.endswith("HTTP 500: as told")  # the last that was heard; on a busy machine a late answer

    await eventually(told, "the client is told why")
    first.status = second.status = 200


async def closed(client: EngineClient) -> None:
    async def both() -> bool:
        shown = await rows(client)
        return all(shown[name].breaker == "closed" for name in ("backend-0", "backend-1"))

    await eventually(both, "both servers are well")


async def opens_for(client: EngineClient, reason: str, by_probe: bool) -> None:
    """Waits until the breaker is open for that reason; a server that answers requests is not probed."""

    async def opened() -> bool:
        if not by_probe:
            await all_are_answered(client)  # while it opens, and when it is open
        return reason in await breaker(client, "backend-0")

    await eventually(opened, f"the breaker is open: {reason}")
    await all_are_answered(client)


async def both_take_part(client: EngineClient, first: Server, second: Server) -> None:
    """As soon as the Router has heard that both are well."""

    async def asked() -> bool:
        await all_are_answered(client)
        return bool(first.bodies and second.bodies)

    await eventually(asked, "both take part")


async def a_dead_router_costs_no_stream(client: EngineClient, first: Server, second: Server) -> None:
    """And none is sent twice: a new Router learns of them from those who have them."""
    for each in (first, second):
        each.goes_on.clear()
    heard: list[list[TokenDelta]] = [[] for _ in range(4)]
    asking = [asyncio.create_task(ask(client, deltas)) for deltas in heard]

    async def under_way() -> bool:
        return all(heard)

    await eventually(under_way, "all of them have begun")
    num_sent = len(first.bodies) + len(second.bodies)
    died = (await patient_rows(client))["router"].pid
    kill({died})

    async def replaced() -> bool:
        router = (await rows(client))["router"]
        return router.state == "ready" and router.pid != died

    await eventually(replaced, "another Router")
    for each in (first, second):
        each.goes_on.set()
    for deltas in await asyncio.gather(*asking):
        assert "".join(each.text for each in deltas) == WHOLE
    assert len(first.bodies) + len(second.bodies) == num_sent
    await all_are_answered(client)


@pytest.mark.usefixtures("ray_cluster")
async def test_requests_go_where_they_are_answered(actor_model_dir: Path, tmp_path: Path) -> None:
    async with two_servers(actor_model_dir, tmp_path) as (system, first, second):
        async with system.client(first_token_deadline_s=LONG_S) as client:
            await closed(client)
            await both_take_part(client, first, second)
            wrong: list[tuple[dict[str, Any], str]] = [
                ({"status": 500}, "HTTP 500: as told"),
                ({"models": [{"id": "other"}]}, "the server serves 'other', expected 'm'"),
            ]
            for change, reason in wrong:
                healthy = vars(OpenAIDouble())
                vars(first).update(change)
                await opens_for(client, reason, by_probe="models" in change)
                vars(first).update({name: healthy[name] for name in change})
                await closed(client)
            assert await system.metric("backend-0", "farsight:backend_failures_total") >= len(wrong)
            await a_dead_router_costs_no_stream(client, first, second)
        async with system.client(first_token_deadline_s=DEADLINE_S) as hasty:
            await why_none_answers(hasty, first, second)
        async with system.client(first_token_deadline_s=LONG_S) as client:
            await closed(client)
            await all_are_answered(client)

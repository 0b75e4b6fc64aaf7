"""Replicas that are other servers, behind the real Router: where requests go when one of them misbehaves."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.config import ModelConfig
from core.messages import TokenDelta
from core.replica_config import ReplicaConfig
from core.request import SamplingParams
from services.client import EngineClient
from tests.actors.conftest import CONTINUOUS, open_house
from tests.actors.house import LONG_S, House, eventually, kill, rows
from tests.unit.actors.openai_double import OpenAIDouble

pytestmark = pytest.mark.timeout(300)  # a service starts, and breakers pause

WHOLE = "one two three"
DEADLINE_S = 5.0


@asynccontextmanager
async def two_servers(model_dir: Path, log_dir: Path) -> AsyncIterator[tuple[House, OpenAIDouble, OpenAIDouble]]:
    """They answer in this process, everything else is real; requests go to them by turns."""
    async with AsyncExitStack() as stack:
        doubles = [await stack.enter_async_context(OpenAIDouble().running()) for _ in range(2)]
        replica = tuple(ReplicaConfig("openai", each.url, first_token_timeout_s=0.5) for each in doubles)
        tables = {"model": ModelConfig(name="m", replicas=0), "replica": replica}
        house = stack.enter_context(open_house("fused", model_dir, log_dir, CONTINUOUS, **tables))
        yield house, doubles[0], doubles[1]


async def ask(client: EngineClient) -> list[TokenDelta]:
    async with asyncio.timeout(LONG_S), aclosing(client.stream((5, 6, 7), SamplingParams(9))) as deltas:
        return [delta async for delta in deltas]


async def all_are_answered(client: EngineClient, count: int = 6) -> None:
    for deltas in await asyncio.gather(*(ask(client) for _ in range(count))):
        assert "".join(each.text for each in deltas) == WHOLE
        assert deltas[-1].finish_reason == "stop"
        assert sum(each.num_tokens for each in deltas) == 3


async def breaker(client: EngineClient, name: str) -> str:
    return (await rows(client))[name].breaker


async def closed(client: EngineClient) -> None:
    async def both() -> bool:
        shown = await rows(client)
        return all(shown[name].breaker == "closed" for name in ("backend-0", "backend-1"))

    await eventually(both, "both servers are well")


async def opens_for(client: EngineClient, reason: str) -> None:
    async def opened() -> bool:
        await all_are_answered(client)  # while it opens, and when it is open
        return reason in await breaker(client, "backend-0")

    await eventually(opened, f"the breaker is open: {reason}")


async def a_dead_router_costs_no_stream(client: EngineClient, first: OpenAIDouble, second: OpenAIDouble) -> None:
    """And none is sent twice: a new Router learns of them from those who have them."""
    first.next_s = second.next_s = 1.0
    num_sent = len(first.bodies) + len(second.bodies)
    asking = [asyncio.create_task(ask(client)) for _ in range(4)]

    async def under_way() -> bool:
        return first.open + second.open >= 4

    await eventually(under_way, "all of them are sent")
    kill({(await rows(client))["router"].pid})
    for deltas in await asyncio.gather(*asking):
        assert "".join(each.text for each in deltas) == WHOLE
    assert len(first.bodies) + len(second.bodies) == num_sent + 4
    first.next_s = second.next_s = 0.0
    await all_are_answered(client)


@pytest.mark.usefixtures("ray_cluster")
async def test_requests_go_where_they_are_answered(
    actor_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_servers(actor_model_dir, tmp_path) as (house, first, second):
        async with house.client(first_token_deadline_s=LONG_S) as client:
            await closed(client)
            await all_are_answered(client)
            assert first.bodies and second.bodies, "both take part"
            wrong: list[tuple[dict[str, Any], str]] = [
                ({"status": 500}, "HTTP 500: as told"),
                ({"first_s": math.inf}, "no first token within 0.5 s"),
                ({"break_after": 0}, "the connection broke in the middle of the answer"),
                ({"answers_as": "other"}, "it answers as model 'other'"),
                ({"models": [{"id": "other"}]}, "it serves 'other', not 'm'"),
            ]
            for change, reason in wrong:
                healthy = vars(OpenAIDouble())
                vars(first).update(change)
                await opens_for(client, reason)
                vars(first).update({name: healthy[name] for name in change})
                await closed(client)
            assert await house.metric("backend-0", "farsight:backend_failures_total") >= len(wrong)
            await a_dead_router_costs_no_stream(client, first, second)
        async with house.client(first_token_deadline_s=DEADLINE_S) as client:
            first.status = second.status = 500
            last = (await ask(client))[-1]
            assert last.finish_reason == "error" and last.error is not None
            assert last.error.startswith("no token within 5 s; ")
            assert last.error.endswith("HTTP 500: as told")
            first.status = second.status = 200
            await closed(client)
            await all_are_answered(client)

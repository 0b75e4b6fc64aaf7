"""What can be told about a request by real pieces: while it runs, once it has ended, and by whom."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing

from core.decisions import unpack_decisions
from core.log_messages import RequestTrace
from core.request import Origin
from services.client import EngineClient
from tests.actors.house import NUM_BEFORE_GATE, PROMPTS, House, calm_client, eventually, sampling

NUM_TOKENS = 300


def kinds(trace: RequestTrace) -> list[str]:
    return [decision.kind for decision in unpack_decisions(trace.decisions)]


async def read(client: EngineClient, origin: Origin, begun: asyncio.Event, gate: asyncio.Event) -> None:
    num_tokens = 0
    async with aclosing(client.stream(PROMPTS[0], sampling(0, NUM_TOKENS), None, origin)) as deltas:
        async for delta in deltas:
            num_tokens += len(delta.token_ids)
            if num_tokens >= NUM_BEFORE_GATE:
                begun.set()
                await gate.wait()
    assert num_tokens == NUM_TOKENS


async def test_a_request_is_explained_while_it_runs_and_after_by_any_ingress_replica(fused_house: House) -> None:
    origin = Origin(f"cmpl-{secrets.token_hex(16)}", 3, b"owner")
    begun, gate = asyncio.Event(), asyncio.Event()
    async with calm_client(fused_house) as client, fused_house.client() as other:
        assert await client.explain(origin.response_id) == ()
        reading = asyncio.create_task(read(client, origin, begun, gate))
        await begun.wait()
        attempt, ingress = await client.explain(origin.response_id)
        assert (attempt.source[:-1], ingress.source) == ("scheduler-", "ingress")
        assert {(each.choice, each.owner, each.ended) for each in (attempt, ingress)} == {(3, b"owner", False)}
        assert kinds(attempt)[:3] == ["placed", "arrived", "admitted"]
        assert kinds(ingress) == ["received", "first_token"]
        (seen,) = await other.explain(origin.response_id)
        assert kinds(seen)[:3] == ["placed", "arrived", "admitted"], "another replica knows what the pieces know"
        gate.set()
        await reading

        async def in_the_log() -> bool:
            return sum(each.ended for each in await other.explain(origin.response_id)) == 2

        await eventually(in_the_log, "both parts are in the log")
        attempt, ingress = await other.explain(origin.response_id)
        assert (kinds(attempt)[-1], kinds(ingress)[-1]) == ("finished", "answered")
        instants = [each.at for trace in (ingress, attempt) for each in unpack_decisions(trace.decisions)]
        assert max(instants) - min(instants) < 120.0, "clocks of all pieces have been brought to one"


async def test_a_client_that_leaves_is_told_of_too(fused_house: House) -> None:
    origin = Origin(f"cmpl-{secrets.token_hex(16)}")
    async with calm_client(fused_house) as client:
        async with aclosing(client.stream(PROMPTS[1], sampling(1, NUM_TOKENS), None, origin)) as deltas:
            await anext(deltas)

        async def all_ended() -> bool:
            found = await client.explain(origin.response_id)
            return len(found) == 2 and all(each.ended for each in found)

        await eventually(all_ended, "the end is told by both")
        attempt, ingress = await client.explain(origin.response_id)
        assert kinds(attempt)[-1] in ("aborted", "finished")
        (end,) = [each for each in unpack_decisions(ingress.decisions) if each.kind == "answered"]
        assert end.facts["reason"] == "abort"

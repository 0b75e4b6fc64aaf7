"""What can be told about a request by real components: while it runs, once it has ended, and by whom."""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
from collections.abc import Callable
from contextlib import aclosing

from farsight.core.decisions import unpack_decisions
from farsight.core.errors import FarsightError
from farsight.core.messages.log import RequestTrace
from farsight.core.request import Origin
from farsight.services.api.answers.served import ANSWER, AnswerPromise
from farsight.services.api.requests import unnamed_request
from farsight.services.ingress.engine_client import EngineClient
from tests.actors.local_system import LONG_S, NUM_BEFORE_GATE, PROMPTS, System, calm_client, eventually, sampling

NUM_TOKENS = 1000
"""Far more than a worker makes for a client that does not read: it rests before the end."""


async def explained(
    client: EngineClient, response_id: str, is_known: Callable[[tuple[RequestTrace, ...]], bool], waited_for: str
) -> tuple[RequestTrace, ...]:
    """What is told once that is known: on a busy machine a component may be asked in vain, which is said or leaves
    gaps."""
    found: tuple[RequestTrace, ...] = ()

    async def known() -> bool:
        nonlocal found
        with contextlib.suppress(FarsightError):
            found = await client.overview.explain(response_id)
            return is_known(found)
        return False

    await eventually(known, waited_for)
    return found


def kinds(trace: RequestTrace) -> list[str]:
    return [decision.kind for decision in unpack_decisions(trace.decisions)]


async def read(client: EngineClient, origin: Origin, begun: asyncio.Event, gate: asyncio.Event) -> None:
    num_tokens = 0
    async with aclosing(client.stream(unnamed_request(PROMPTS[0], sampling(0, NUM_TOKENS), origin=origin))) as deltas:
        async for delta in deltas:
            num_tokens += len(delta.token_ids)
            if num_tokens >= NUM_BEFORE_GATE:
                begun.set()
                await gate.wait()
    assert num_tokens == NUM_TOKENS


async def test_a_request_is_explained_while_it_runs_and_after_by_any_ingress_replica(
    fused_system: System,
) -> None:
    origin = Origin(f"cmpl-{secrets.token_hex(16)}", 3, b"owner")
    begun, gate = asyncio.Event(), asyncio.Event()
    async with calm_client(fused_system) as client, fused_system.client() as other:
        await explained(client, origin.response_id, lambda found: found == (), "nothing is known")
        reading = asyncio.create_task(read(client, origin, begun, gate))
        async with asyncio.timeout(LONG_S):
            await begun.wait()
        attempt, ingress = await explained(
            client,
            origin.response_id,
            lambda found: len(found) == 2,
            "components and ingress replica say what they know",
        )
        assert (attempt.source[:-1], ingress.source) == ("scheduler-", "ingress")
        assert {(each.choice, each.owner, each.ended) for each in (attempt, ingress)} == {(3, b"owner", False)}
        assert kinds(attempt)[:3] == ["placed", "arrived", "admitted"]
        while_read = [kind for kind in kinds(ingress) if kind != "client_slow"]  # it waits for us, after all
        assert while_read == ["received", "first_token"]
        (seen,) = await explained(other, origin.response_id, lambda found: bool(found), "another replica knows of it")
        assert kinds(seen)[:3] == ["placed", "arrived", "admitted"], "another replica knows what the components know"
        gate.set()
        await reading

        attempt, ingress = await explained(
            other, origin.response_id, lambda found: sum(each.ended for each in found) == 2, "both parts are in the log"
        )
        assert (kinds(attempt)[-1], kinds(ingress)[-1]) == ("finished", "answered")
        instants = [each.at for trace in (ingress, attempt) for each in unpack_decisions(trace.decisions)]
        assert max(instants) - min(instants) < 120.0, "clocks of all components have been brought to one"


async def test_a_client_is_told_when_its_request_will_end(fused_system: System) -> None:
    """As soon as the cost of steps has been measured, which takes some requests on a fresh system."""
    async with calm_client(fused_system) as client:

        async def told() -> bool:
            origin, answer = Origin(f"cmpl-{secrets.token_hex(16)}", 0, b"owner"), AnswerPromise(1)
            begun, gate = asyncio.Event(), asyncio.Event()
            ANSWER.set(answer)
            reading = asyncio.create_task(read(client, origin, begun, gate))
            await begun.wait()
            found = await explained(
                client, origin.response_id, lambda found: len(found) == 2, "both say what they know"
            )
            gate.set()
            await reading
            (outlook,) = [each for each in unpack_decisions(found[0].decisions) if each.kind == "outlook"]
            assert (outlook.facts["state"], float(outlook.facts["output_tokens"]) > 0) == ("running", True)
            if not answer.headers():
                assert "promised" not in kinds(found[0])
                return False
            p50_s, p90_s = (float(answer.headers()[f"farsight-eta-{name}"]) for name in ("p50", "p90"))
            assert 0 < p50_s <= p90_s < math.inf
            assert "promised" in kinds(found[0]) and 0 < float(outlook.facts["p50_s"]) <= float(outlook.facts["p90_s"])
            return True

        await eventually(told, "the end is predicted")


async def test_a_client_that_leaves_is_told_of_too(fused_system: System) -> None:
    origin = Origin(f"cmpl-{secrets.token_hex(16)}")
    async with calm_client(fused_system) as client:
        async with aclosing(
            client.stream(unnamed_request(PROMPTS[1], sampling(1, NUM_TOKENS), origin=origin))
        ) as deltas:
            await anext(deltas)

        attempt, ingress = await explained(
            client,
            origin.response_id,
            lambda found: len(found) == 2 and all(each.ended for each in found),
            "the end is told by both",
        )
        assert kinds(attempt)[-1] in ("aborted", "finished")
        (end,) = [each for each in unpack_decisions(ingress.decisions) if each.kind == "answered"]
        assert end.facts["reason"] == "abort"

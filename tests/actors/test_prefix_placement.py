"""Placement by prefix over two real replicas: what the Router expects of their caches is what requests find there."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import secrets
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest

from farsight.actors.runtime.names import ROUTER, scheduler_name
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.decisions import unpack_decisions
from farsight.core.errors import FarsightError
from farsight.core.messages.log import RequestTrace
from farsight.core.messages.plans import CacheReply
from farsight.core.messages.requests import LoadSnapshot
from farsight.core.request import Origin
from farsight.services.api.requests import unnamed_request
from farsight.services.ingress.engine_client import EngineClient
from tests.actors.conftest import NUM_REPLICAS, open_system
from tests.actors.local_system import (
    BLOCK_SIZE,
    ENGINE,
    System,
    calm_client,
    eventually,
    kill,
    patient_rows,
    sampling,
)
from tests.stage import on_stage

NUM_GROUPS = 16
PREFIX_LEN = 24 * BLOCK_SIZE
NUM_REQUESTS = 120
NUM_AT_ONCE = 3
KV_MEMORY = "192KiB"
"""Of each replica: prefixes of four groups or so, so that each of the others pushes one out."""


@on_stage(level=1)
def preble(ray_cluster: None, actor_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    engine = dataclasses.replace(ENGINE, kv_memory=KV_MEMORY, max_num_seqs=4)
    scheduler = SchedulerConfig(preset="preble")
    with open_system("fused", actor_model_dir, tmp_path_factory.mktemp("log"), scheduler, engine=engine) as system:
        yield system


@dataclass
class Served:
    """One request: what the Router expected, where it went, and what it found."""

    first_token: int
    expected_len: int
    replica: str
    cached_len: int
    reason: str


def prompt(rng: random.Random) -> tuple[int, ...]:
    group = min(int(rng.paretovariate(1.1)) - 1, NUM_GROUPS - 1)
    shared = random.Random(group)
    own = rng.randint(3, 6 * BLOCK_SIZE)
    tokens = [shared.randrange(3, 200) for _ in range(PREFIX_LEN)] + [rng.randrange(3, 200) for _ in range(own)]
    return tuple(tokens)


async def serve(client: EngineClient, tokens: tuple[int, ...], num_tokens: int, cache_salt: str = "") -> Served:
    origin = Origin(f"cmpl-{secrets.token_hex(16)}")
    cached_len = 0
    async with aclosing(
        client.stream(unnamed_request(tokens, sampling(0, num_tokens), origin=origin, cache_salt=cache_salt))
    ) as deltas:
        async for delta in deltas:
            cached_len += delta.cached_len
    facts: dict[str, float | str] = {}

    async def is_told() -> bool:
        """An account may be on its way from a Scheduler to the log."""
        traces: tuple[RequestTrace, ...] = ()
        with contextlib.suppress(FarsightError):  # nobody could be asked in time
            traces = await client.overview.explain(origin.response_id)
        decisions = [each for trace in traces for each in unpack_decisions(trace.decisions)]
        facts.update(next((each.facts for each in decisions if each.kind == "placed"), {}))
        return bool(facts)

    await eventually(is_told, "why it is where it is")
    return Served(tokens[0], int(facts["hit_len"]), str(facts["replica"]), cached_len, str(facts["reason"]))


async def router_hears(system: System) -> None:
    """Until the Router has heard of the end of all requests, and so of what they left cached."""

    async def has_heard() -> bool:
        return (await system.ask(ROUTER, "outlook", None, LoadSnapshot)).demand.num_requests == 0

    await eventually(has_heard, "the Router has heard of their end")


async def serve_all(system: System, client: EngineClient, rng: random.Random, num_requests: int) -> list[Served]:
    """A few at a time, and the next once the Router has heard of the end of these.

    It hears late of what has become of the caches: what it expects at full pace hangs on how fast the machine is.
    """
    served: list[Served] = []
    while len(served) < num_requests:
        few = [(prompt(rng), rng.randint(1, 12)) for _ in range(NUM_AT_ONCE)]
        served += await asyncio.gather(*(serve(client, tokens, num_tokens) for tokens, num_tokens in few))
        await router_hears(system)
    return served


async def test_requests_find_cached_what_the_router_expects(preble: System) -> None:
    async with calm_client(preble) as client:
        served = await serve_all(preble, client, random.Random(1), NUM_REQUESTS)
    right = sum(each.expected_len == each.cached_len for each in served)
    wrong = [each for each in served if each.expected_len != each.cached_len]
    assert right >= 0.95 * NUM_REQUESTS, wrong
    assert {each.replica for each in served} == {"0", "1"}
    lost = sum(each.cached_len < PREFIX_LEN for each in served)
    assert lost < NUM_REQUESTS / 2, "prefixes are shared"
    assert lost > len({(each.first_token, each.replica) for each in served}), "and evicted"


async def num_cached(system: System, replica: str) -> int:
    reply = await system.ask(scheduler_name(replica), "cached", None, CacheReply)
    return 0 if reply.notice is None else reply.notice.num_hashes


async def test_a_new_router_asks_what_is_cached(preble: System) -> None:
    """It is in one process with the Schedulers here: all of them learn it anew, from the workers."""
    async with calm_client(preble) as client:
        tokens = prompt(random.Random(2))
        before = await serve(client, tokens, 2)
        kill({(await patient_rows(client))[ROUTER].pid})
    async with calm_client(preble) as client:

        async def has_heard() -> bool:
            """The worker's next report tells of its cache; that it is up is known before."""
            with contextlib.suppress(FarsightError):
                replicas = (await client.overview.router.placement()).replicas
                return any(each.replica == before.replica and each.cached_tokens >= PREFIX_LEN for each in replicas)
            return False

        await eventually(has_heard, "the new Router knows what is cached")
        after = await serve(client, tokens, 2)
        assert after.expected_len == after.cached_len >= PREFIX_LEN
        assert (after.replica, after.reason) == (before.replica, "exploit")
        assert sum([await num_cached(preble, str(index)) for index in range(NUM_REPLICAS)]) > 0

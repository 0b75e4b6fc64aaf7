"""What a client of the running components gets: real actors, real messages, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from actors.runtime.names import kv_offload_manager_name, worker_name
from core.messages.kv import KVUsage
from core.request import SamplingParams
from services.api.requests import unnamed_request
from services.ingress.engine_client import SLOW_DELTAS, EngineClient
from tests.actors.local_system import (
    BLOCK_SIZE,
    MAX_LEN,
    NUM_TOKENS,
    PROMPTS,
    System,
    Truth,
    eventually,
    patient_rows,
    read,
    rows,
)

SPLIT_KINDS = {
    "Router": 1,
    "LogStore": 1,
    "StreamStore": 1,
    "Supervisor": 1,
    "LengthPredictor": 1,
    "ServingTimeEstimator": 1,
    "Scheduler": 2,
    "KVOffloadManager": 2,
    "ModelWorker": 2,
    "Ingress": 1,
}


async def test_streams_are_those_of_the_engine(client: EngineClient, truth: Truth) -> None:
    lengths = [10 + 3 * index for index in range(len(PROMPTS))]
    outputs = await asyncio.gather(*(read(client, index, length) for index, length in enumerate(lengths)))
    for index, (tokens, length) in enumerate(zip(outputs, lengths, strict=True)):
        truth.check(index, tokens, length)


async def test_a_slow_client_rests_its_own_sequence_only(system: System, client: EngineClient, truth: Truth) -> None:
    num_tokens = MAX_LEN - 24
    prompt = PROMPTS[0]
    async with aclosing(client.stream(unnamed_request(prompt, SamplingParams(num_tokens, ignore_eos=True)))) as deltas:
        first = await anext(deltas)
        stream = client._streams[first.request_id]
        await eventually(_stands_still(client, first.request_id), "the worker stops")
        num_made = stream.num_tokens
        assert SLOW_DELTAS <= num_made < num_tokens
        others = await asyncio.gather(*(read(client, index, 100) for index in range(1, len(PROMPTS))))
        for index, other in enumerate(others, 1):
            truth.check(index, other, 100)
        assert stream.num_tokens == num_made, "it went on although nobody reads"
        await eventually(lambda: _counts_one(client), "router and ingress count the one that rests")
        status = await patient_rows(client)
        worker = worker_name(stream.replica)
        assert status[worker].queue == 1
        held = (len(prompt) + num_made) / BLOCK_SIZE
        await eventually(lambda: _one_resident(system, stream.replica, held), "the KV of the one that rests is known")
        tokens = first.token_ids
        async for delta in deltas:
            assert delta.start == len(tokens)
            tokens += delta.token_ids
    assert len(tokens) == num_tokens
    truth.check(0, tokens[:NUM_TOKENS])


def _stands_still(client: EngineClient, request_id: str) -> Callable[[], Coroutine[Any, Any, bool]]:
    """Whether it is known as slow and nothing came while other messages went to and fro."""

    async def condition() -> bool:
        if request_id not in client._slow:
            return False
        before = client._streams[request_id].num_tokens
        for _ in range(3):
            await read(client, 1, 5)
        return client._streams[request_id].num_tokens == before

    return condition


async def _one_resident(system: System, replica: str, held_blocks: float) -> bool:
    usage = await system.ask(kv_offload_manager_name(replica), "usage", None, KVUsage)
    return usage.num_resident == 1 and abs(usage.num_blocks - usage.free_blocks - held_blocks) <= 2


async def _counts_one(client: EngineClient) -> bool:
    status = await rows(client)
    return status["router"].queue == status[f"ingress-{client.ingress_id}"].queue == 1


async def test_every_component_is_in_the_status(system: System, client: EngineClient) -> None:
    await eventually(lambda: _introduced(client), "the ingress replica is in the status")
    found = (await patient_rows(client)).values()
    kinds = [row.kind for row in found]
    assert {kind: kinds.count(kind) for kind in kinds} == SPLIT_KINDS
    assert {row.state for row in found} == {"ready"}
    processes = {row.pid for row in found if row.kind != "Ingress"}
    assert len(processes) == (4 if system.site.placement == "fused" else 12)


async def _introduced(client: EngineClient) -> bool:
    return f"ingress-{client.ingress_id}" in await rows(client)

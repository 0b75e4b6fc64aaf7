"""What a client of the running components gets: real actors, real messages, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

import pytest

from actors.runtime.names import ROUTER, kv_offload_manager_name, worker_name
from core.errors import CapacityError, InvalidValueError
from core.messages.kv import KVUsage
from core.messages.requests import Submit, SubmitReply
from core.messages.tokens import TokenBatches, TokenDelta, TokenPoll
from core.request import Request, SamplingParams
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
    sampling,
    wait_whole,
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


async def poll(system: System, replica: str, ingress_id: str, ack_seq: int) -> TokenBatches:
    return await system.ask(worker_name(replica), "poll_tokens", TokenPoll(ingress_id, ack_seq, ()), TokenBatches)


def deltas_of(reply: TokenBatches) -> list[TokenDelta]:
    return [delta for batch in reply.batches for delta in batch.deltas]


async def test_streams_are_those_of_the_engine(client: EngineClient, truth: Truth) -> None:
    lengths = [10 + 3 * index for index in range(len(PROMPTS))]
    outputs = await asyncio.gather(*(read(client, index, length) for index, length in enumerate(lengths)))
    for index, (tokens, length) in enumerate(zip(outputs, lengths, strict=True)):
        truth.check(index, tokens, length)


async def test_a_closed_stream_frees_its_kv(client: EngineClient) -> None:
    async with aclosing(client.stream(unnamed_request(PROMPTS[0], sampling(0)))) as deltas:
        await anext(deltas)
    await wait_whole(client)


async def test_what_is_too_much_is_refused_at_the_first_check(system: System) -> None:
    async with system.client(max_queued_requests=20, max_queued_tokens=400) as client:

        async def alone() -> bool:
            has_heard = client.first_check.snapshot is not None  # before that it knows of no other client
            return has_heard and client.first_check.in_flight == (0, 0)

        await eventually(alone, "clients of other tests are forgotten")
        open_streams = [
            client.stream(unnamed_request((5,) * 20, SamplingParams(200, ignore_eos=True))) for _ in range(20)
        ]
        for stream in open_streams:
            await anext(stream)
        with pytest.raises(CapacityError, match="too many requests in flight: 20, limit 20"):
            await anext(client.stream(unnamed_request((5,), SamplingParams(1))))
        await open_streams.pop().aclose()
        with pytest.raises(CapacityError, match="too many prompt tokens in flight: 380, limit 400"):
            await anext(client.stream(unnamed_request((5,) * 21, SamplingParams(1))))
        for stream in open_streams:
            await stream.aclose()
        await wait_whole(client)
        assert len(await read(client, 8, 3)) == 3


async def test_what_no_worker_can_hold_is_refused_by_name(client: EngineClient) -> None:
    with pytest.raises(InvalidValueError, match="max_tokens") as caught:
        await anext(client.stream(unnamed_request((5,), SamplingParams(MAX_LEN))))
    assert f"a worker holds at most {MAX_LEN}" in str(caught.value)


async def test_a_lost_reply_loses_no_token(system: System, client: EngineClient) -> None:
    request = Request("me-0", 0, "me", (5, 6), SamplingParams(3, ignore_eos=True))
    reply = await system.ask(ROUTER, "submit", Submit((request,)), SubmitReply)
    (placed,) = reply.placed
    ack_seq = 0
    tokens: list[int] = []
    while len(tokens) < 3:
        lost = await poll(system, placed.replica, "me", ack_seq)
        again = await poll(system, placed.replica, "me", ack_seq)
        assert again.batches[: len(lost.batches)] == lost.batches
        for batch in again.batches:
            tokens += [token for delta in batch.deltas for token in delta.token_ids]
            ack_seq = batch.seq
    assert len(tokens) == 3
    assert (await poll(system, placed.replica, "me", ack_seq)).batches == ()


async def test_an_ingress_that_falls_silent_leaves_nothing_running(system: System, client: EngineClient) -> None:
    params = SamplingParams(1000, ignore_eos=True)
    requests = tuple(Request(f"ghost-{index}", 0, "ghost", (5, 6), params) for index in range(12))
    reply = await system.ask(ROUTER, "submit", Submit(requests), SubmitReply)
    replicas = {placed.replica for placed in reply.placed}
    for replica in replicas:
        await poll(system, replica, "ghost", 0)
    await wait_whole(client)
    ends = [delta for replica in replicas for delta in deltas_of(await poll(system, replica, "ghost", 0))]
    reasons = [delta.finish_reason for delta in ends if delta.finish_reason]
    assert set(reasons) <= {"abort", "length"}
    assert len(reasons) == 12, "each request still gets its one end"


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


async def test_replicas_share_the_requests(client: EngineClient) -> None:
    streams = [client.stream(unnamed_request((5, 6), SamplingParams(1000, ignore_eos=True))) for _ in range(6)]
    try:
        for stream in streams:
            await anext(stream)
        status = await patient_rows(client)
        assert {name: status[name].queue for name in ("worker-0", "worker-1")} == {"worker-0": 3, "worker-1": 3}
    finally:
        for stream in streams:
            await stream.aclose()

"""Clients of the running components, without HTTP: what they get, what is written down, and who learns from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from typing import Any

from farsight.actors.runtime.names import kv_offload_manager_name, length_predictor_name, worker_name
from farsight.core.forecast import Forecast
from farsight.core.messages.kv import KVUsage
from farsight.core.request import SamplingParams
from farsight.services.api.requests import unnamed_request
from farsight.services.ingress.engine_client import SLOW_DELTAS, EngineClient
from tests.actors.local_system import (
    BLOCK_SIZE,
    MAX_LEN,
    NUM_TOKENS,
    PROMPTS,
    Reading,
    System,
    Truth,
    eventually,
    patient_rows,
    read,
    rows,
    sampling,
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
        assert stream.num_tokens == num_made, "it went on although no client reads"
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


async def test_every_request_leaves_one_record(system: System, client: EngineClient, truth: Truth) -> None:
    began = time.time()
    whole = Reading(client, PROMPTS[1], sampling(1, 20))
    stopped = Reading(client, PROMPTS[2], sampling(2, 50, stop_token_ids=(truth.tokens[2][9],)))
    output_len = truth.tokens[2].index(truth.tokens[2][9]) + 1
    await asyncio.gather(whole.finish(), stopped.finish())
    async with aclosing(client.stream(unnamed_request(PROMPTS[3], sampling(3)))) as deltas:
        left = (await anext(deltas)).request_id
    records = await system.log(whole.request_id, stopped.request_id, left)
    assert [record.finish_reason for record in records] == ["length", "stop", "abort"]
    assert [record.prompt_len for record in records] == [len(prompt) for prompt in PROMPTS[1:4]]
    assert [record.max_new_tokens for record in records] == [20, 50, sampling(3).max_new_tokens]
    assert [record.output_len for record in records[:2]] == [20, output_len]
    assert 1 <= records[2].output_len <= sampling(3).max_new_tokens
    for record in records:
        assert record.attempts == 1
        assert record.replica in ("0", "1")
        assert began - 1 <= record.received_at <= time.time()
        assert record.ttft_s is not None
        assert 0 < record.ttft_s <= record.jct_s


async def test_the_router_prices_requests_by_the_forecast(system: System, client: EngineClient) -> None:
    """By ``max_tokens`` the first request would be the larger one, by what is expected it is the smaller one."""
    await asyncio.gather(*(read(client, index, 8) for index in range(len(PROMPTS))))

    async def known() -> bool:
        forecast = await system.ask(length_predictor_name(0), "forecast", None, Forecast)
        return forecast.num_samples > 0 and forecast.mean < 700

    await eventually(known, "a forecast")

    async def follows() -> bool:
        large = client.stream(unnamed_request((5,) * 3, SamplingParams(MAX_LEN - 3, ignore_eos=True)))
        await anext(large)
        small = client.stream(unnamed_request((5,) * 700, SamplingParams(300, ignore_eos=True)))
        await anext(small)
        third = client.stream(unnamed_request((5,) * 3, SamplingParams(4, ignore_eos=True)))
        ids = [(await anext(third)).request_id]
        for stream in (third, small, large):
            await stream.aclose()
        number = int(ids[0].rpartition("-")[2])
        stem = ids[0].rpartition("-")[0]
        first, _, last = await system.log(*(f"{stem}-{number - back}" for back in (2, 1, 0)))
        return first.replica == last.replica

    await eventually(follows, "the third request joins the first")

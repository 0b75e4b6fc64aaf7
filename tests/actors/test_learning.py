"""What is written down about requests and steps, and who learns from it."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from actors.runtime.names import kv_offload_manager_name, length_predictor_name, serving_time_estimator_name
from core.forecast import Forecast
from core.messages.kv import KVUsage
from core.messages.step_times import StepProfileReply
from core.request import SamplingParams
from services.api.requests import unnamed_request
from services.ingress.engine_client import EngineClient
from tests.actors.local_system import MAX_LEN, PROMPTS, Reading, System, Truth, eventually, read, sampling


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


async def test_the_step_profile_is_learned_for_every_replica(system: System, client: EngineClient) -> None:
    async def learned() -> bool:
        await asyncio.gather(*(read(client, index, 60) for index in range(len(PROMPTS))))
        reply = await system.ask(serving_time_estimator_name(0), "profile", None, StepProfileReply)
        return {profile.replica for profile in reply.profiles if profile.num_samples >= 32} >= {"0", "1"}

    await eventually(learned, "a profile of both replicas")
    reply = await system.ask(serving_time_estimator_name(0), "profile", None, StepProfileReply)
    for profile in reply.profiles:
        terms = (profile.base_s, profile.prefill_token_s, profile.decode_seq_s, profile.context_token_s)
        assert all(term >= 0 for term in terms)
        assert 0 < sum(terms) < 10


async def test_the_kv_offload_manager_knows_what_is_used(system: System, client: EngineClient) -> None:
    managers = [kv_offload_manager_name(replica) for replica in ("0", "1")]

    async def usages() -> list[KVUsage]:
        return [await system.ask(name, "usage", None, KVUsage) for name in managers]

    async def one_resident() -> bool:
        found = await usages()
        held = sum(usage.num_blocks - usage.free_blocks for usage in found)
        return sum(usage.num_resident for usage in found) == 1 and held >= len(PROMPTS[15]) // 4

    async with aclosing(client.stream(unnamed_request(PROMPTS[15], sampling(15, 900)))) as deltas:
        await anext(deltas)
        await eventually(one_resident, "the one sequence is seen")

    async def adds_up() -> bool:
        status = await client.overview.status()  # without the one who is too busy to answer in a second
        return status.kv.num_blocks == sum(usage.num_blocks for usage in await usages()) > 0

    await eventually(adds_up, "the status has the blocks of both")

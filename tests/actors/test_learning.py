"""What is written down about requests and steps, and who learns from it."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing

from actors.runtime.names import length_predictor_name
from core.forecast import Forecast
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

"""Sends the arrivals to one service, each when it is due; what has come of each answer can be read meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from typing import Any

import aiohttp

from services.bench.answers import SHOWN_CHARS, Answer, Failure, StreamReader, shown
from services.demo.race import RaceLane, RaceSide
from simulator.traffic.workload import SimRequest

_TOKENS = range(5, 250)
"""Tokens of the prompts, drawn for each request, so that no two prompts share a prefix, as in the simulated run."""

_ID = re.compile(rb'"id":\s*"((?:chatcmpl|cmpl)-[0-9a-f]{32})"')


async def send_all(session: aiohttp.ClientSession, url: str, model: str, side: RaceSide, began_at: float) -> None:
    """Sends every request when it is due and reads all answers to their ends.

    Args:
        began_at: Instant 0 of the arrivals on the clock of ``time.perf_counter``.
    """
    async with asyncio.TaskGroup() as group:
        for index, lane in enumerate(side.lanes):
            await asyncio.sleep(max(0.0, began_at + lane.arrival.arrived_at - time.perf_counter()))
            group.create_task(_send(session, url, model, index, lane))


async def _send(session: aiohttp.ClientSession, url: str, model: str, index: int, lane: RaceLane) -> None:
    arrival = lane.arrival
    lane.answer = answer = Answer(index, arrival.app, time.perf_counter())
    try:
        async with session.post(f"{url}/v1/completions", json=request_body(arrival, model)) as reply:
            if reply.status == 200:
                await _read(reply.content, lane, answer)
            else:
                answer.failure = Failure(f"HTTP {reply.status}", shown(await reply.content.read(SHOWN_CHARS)))
    except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
        answer.failure = Failure("stream cut", f"{type(error).__name__}: {error}"[:SHOWN_CHARS])
    if answer.failure is None and answer.num_tokens != arrival.output_len:
        answer.failure = Failure("wrong length", f"{answer.num_tokens} tokens instead of {arrival.output_len}")
    answer.ended_at = time.perf_counter()


async def _read(content: aiohttp.StreamReader, lane: RaceLane, answer: Answer) -> None:
    reader = StreamReader(answer)
    async for data in content.iter_any():
        if not lane.response_id and (found := _ID.search(data)):
            lane.response_id = found[1].decode()
        reader.feed(data, time.perf_counter())
    reader.finish(lane.arrival.output_len)


def request_body(arrival: SimRequest, model: str) -> dict[str, Any]:
    """A completion of exactly the arrival's length, which the service's scheduler cannot see."""
    return {
        "model": model,
        "prompt": random.Random(arrival.request_id).choices(_TOKENS, k=arrival.prompt_len),
        "max_tokens": arrival.max_new_tokens,
        "benchmark_len": arrival.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def warm_up(session: aiohttp.ClientSession, url: str) -> str:
    """Asks for the model's name and for one token, so that every part of the service has run once.

    Returns:
        The model's name.
    """
    async with session.get(f"{url}/v1/models") as reply:
        model = str((await reply.json())["data"][0]["id"])
    body = json.dumps({"model": model, "prompt": list(_TOKENS[:4]), "max_tokens": 2, "temperature": 0}).encode()
    async with session.post(
        f"{url}/v1/completions", data=body, headers={"Content-Type": "application/json"}
    ) as answered:
        answered.raise_for_status()
        await answered.read()
    return model

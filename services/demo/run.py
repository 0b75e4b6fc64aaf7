"""Runs the demo: two services, their arrivals, the page, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import aiohttp
from aiohttp import web

from farsight.core.errors import ConfigError
from farsight.services.bench.answers import SHOWN_CHARS, Answer, Failure, StreamReader, shown
from farsight.services.demo.live_service import LiveService
from farsight.services.demo.pages import DemoPages
from farsight.services.demo.race import Race, RaceLane, RaceSide
from farsight.services.demo.settings import DemoSettings
from farsight.services.words import counted
from farsight.simulator.run import run
from farsight.simulator.traffic.workload import SimRequest


def simulated_ratio(settings: DemoSettings, arrivals: Sequence[SimRequest]) -> float:
    """Mean completion time under the second preset divided by that under the first."""
    first, second = (
        fmean(record.jct_s for record in run(settings.experiment(preset), arrivals).recorder.done)
        for preset in settings.presets
    )
    return second / first


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


LEAD_S = 0.5
"""Between the end of the preparations and the first arrival."""

STAGE_S = 0.5

Say = Callable[[str], None]


def run_demo(settings: DemoSettings, port: int, once: bool, record: Path | None, say: Say) -> dict[str, Any]:
    """Runs until Ctrl-C or TERM, or, with ``once``, until every request has ended.

    Args:
        port: Where the page listens; 0 for any.
        record: File for the lanes at the end, from which a picture is drawn.

    Returns:
        The figures; see ``Race.result``.

    Raises:
        FarsightError: A setting is wrong, or a service cannot start.
    """
    arrivals = settings.arrivals()
    race = Race(settings.presets, arrivals)
    with tempfile.TemporaryDirectory(prefix="farsight-demo-") as folder:
        services = [
            LiveService(f"{side}-{preset}", Path(folder), settings.config(preset, arrivals))
            for side, preset in enumerate(settings.presets)
        ]
        try:
            asyncio.run(_run(race, services, settings, port, once, say))
        finally:
            _end(services)
    if record is not None:
        record.write_text(json.dumps(race.view(time.perf_counter())), encoding="utf-8")
    return race.result()


def _end(services: list[LiveService]) -> None:
    """Both at once; a second Ctrl-C does not leave processes behind."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for service in services:
            service.interrupt()
        for service in services:
            service.wait_ended()
    finally:
        signal.signal(signal.SIGINT, before)


async def _run(
    race: Race, services: list[LiveService], settings: DemoSettings, port: int, once: bool, say: Say
) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with (
        aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20) as session,
        _pages(race, services, session, port) as url,
    ):
        say(f"Page: {url} (opens now; the race begins when both services answer)")
        racing = asyncio.create_task(_race(race, services, settings, session, say))
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait((racing, stopping), return_when=asyncio.FIRST_COMPLETED)
        if racing.done():
            racing.result()  # raises what went wrong
            if not once:
                say("The page stays. Ctrl-C ends everything.")
                await stopping
        for task in (racing, stopping):
            task.cancel()
        await asyncio.gather(racing, stopping, return_exceptions=True)


@asynccontextmanager
async def _pages(
    race: Race, services: list[LiveService], session: aiohttp.ClientSession, port: int
) -> AsyncIterator[str]:
    """The page's address, for as long as the context lasts."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(("127.0.0.1", port))
    except OSError as error:
        bound.close()
        raise ConfigError("--port", port, f"a free port of 127.0.0.1 ({error.strerror})") from error
    actual = bound.getsockname()[1]
    runner = web.AppRunner(DemoPages(race, services, session, actual).app(), access_log=None)
    await runner.setup()
    await web.SockSite(runner, bound).start()
    try:
        yield f"http://127.0.0.1:{actual}/"
    finally:
        await runner.cleanup()


async def _race(
    race: Race, services: list[LiveService], settings: DemoSettings, session: aiohttp.ClientSession, say: Say
) -> None:
    started_at = time.perf_counter()
    for service in services:
        service.start()
    telling = asyncio.create_task(_tell_stage(race, services))
    try:
        await asyncio.gather(*(service.wait_ready(session) for service in services))
        models = await asyncio.gather(*(warm_up(session, service.url) for service in services))
    finally:
        telling.cancel()
    race.stage = "The race is on"
    due = counted(len(race.arrivals), "request")
    say(f"Both services answer after {time.perf_counter() - started_at:.0f} s; {due} to send.")
    for service, preset in zip(services, settings.presets, strict=True):
        say(f"  {preset}: {service.url}/dashboard")
    race.began_at = time.perf_counter() + LEAD_S
    await asyncio.gather(
        *(
            send_all(session, service.url, model, side, race.began_at)
            for service, model, side in zip(services, models, race.sides, strict=True)
        )
    )
    race.stage = "All requests have ended"
    race.simulated = await asyncio.to_thread(simulated_ratio, settings, race.arrivals)


async def _tell_stage(race: Race, services: list[LiveService]) -> None:
    while True:
        race.stage = "; ".join(f"{service.preset}: {service.last_line()}" for service in services)
        await asyncio.sleep(STAGE_S)


def results_text(result: dict[str, Any]) -> str:
    """The figures in words."""
    lines = [
        f"{side['preset']}: mean {_seconds(side['mean_s'])}, p99 {_seconds(side['p99_s'])}, {side['ended']} of"
        f" {result['requests']} ended, {side['broken']} broken streams"
        for side in result["sides"]
    ]
    if result["ratio"] is not None:
        first, second = (side["preset"] for side in result["sides"])
        said = "" if result["simulated"] is None else f"; the simulator says {result['simulated']:.3f}"
        lines.append(f"Mean completion time of {second} / {first}: {result['ratio']:.3f}{said}.")
    return "\n".join(lines)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"

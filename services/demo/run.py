"""Runs the demo: two services, their arrivals, the page, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from core.errors import ConfigError
from services.demo.live_service import LiveService
from services.demo.pages import DemoPages
from services.demo.race import Race
from services.demo.sending import send_all, warm_up
from services.demo.settings import DemoSettings
from services.demo.simulated import simulated_ratio
from services.words import counted

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

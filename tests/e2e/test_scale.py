"""Components come and go under load, and no client sees anything of it."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from farsight.services.commands.scaling import ROW_KINDS
from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import Server, farsight, one_ingress, start_server

NUM_CLIENTS = 32
NUM_TOKENS = 100
TEXT_KINDS = [kind for kind in ROW_KINDS if kind != "image-encoder"]
"""What a model that reads no pictures has; ``test_pictures.py`` scales the encoders."""
TIMEOUT_S = 300.0
"""For anything at all: a busy machine must not fail a test."""


@dataclass
class Load:
    """Clients that each send the same request again and again, and what went wrong."""

    num_done: int = 0
    wrong: list[str] = field(default_factory=list)


def body(index: int) -> dict[str, Any]:
    return {
        "model": EMBEDDED_NAME,
        "prompt": f"client {index} says ",
        "max_tokens": NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(session: aiohttp.ClientSession, index: int) -> aiohttp.ClientResponse:
    """Asked once more where nothing was answered because the connection was closed: HAProxy, told of another number of
    ingress replicas, closes idle ones, and a client that is late may send on one at that moment."""
    try:
        return await session.post("/v1/completions", json=body(index))
    except aiohttp.ServerDisconnectedError:
        return await session.post("/v1/completions", json=body(index))


async def read(session: aiohttp.ClientSession, index: int) -> str:
    """The text of one stream, whose end is checked."""
    text, num_tokens, last = "", 0, ""
    async with await ask(session, index) as reply:
        assert reply.status == 200, await reply.text()
        async for raw in reply.content:
            line = raw.decode().strip()
            if not line:
                continue
            last = line.removeprefix("data: ")
            if last != "[DONE]":
                chunk = json.loads(last)
                text += "".join(choice["text"] for choice in chunk["choices"])
                num_tokens = (chunk["usage"] or {}).get("completion_tokens", num_tokens)
    assert (last, num_tokens) == ("[DONE]", NUM_TOKENS)
    return text


async def repeat(session: aiohttp.ClientSession, index: int, expected: str, load: Load) -> None:
    while True:
        try:
            text = await read(session, index)
        except (aiohttp.ClientError, AssertionError, KeyError, ValueError) as error:
            load.wrong.append(f"client {index}: {error!r}")
        else:
            load.num_done += 1
            if text != expected:
                load.wrong.append(f"client {index}: {text!r} instead of {expected!r}")


@asynccontextmanager
async def running_load(base_url: str) -> AsyncIterator[Load]:
    """All clients at work; each knows its text from a first stream, before anything is scaled."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(TIMEOUT_S)
    async with aiohttp.ClientSession(base_url, connector=connector, timeout=timeout) as session:
        expected = await asyncio.gather(*(read(session, index) for index in range(NUM_CLIENTS)))
        load = Load()
        tasks = [asyncio.create_task(repeat(session, i, text, load)) for i, text in enumerate(expected)]
        try:
            yield load
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def eventually(condition: Callable[[], bool]) -> None:
    """Waits for it; TimeoutError if it does not come true."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            if await asyncio.to_thread(condition):
                return
            await asyncio.sleep(0.05)


def rows(server: Server, kind: str) -> list[dict[str, Any]]:
    """The components of a kind, as ``farsight scale`` calls it."""
    return [row for row in server.get("/status")["actors"] if row["kind"] == ROW_KINDS[kind]]


def living(server: Server, kind: str) -> list[dict[str, Any]]:
    """Those that are ready; on a busy machine one that answers late is shown as dead for once."""
    return [row for row in rows(server, kind) if row["state"] == "ready"]


def num_busy(server: Server, kind: str) -> int:
    return sum(row["queue"] > 0 for row in living(server, kind))


def are_busy(server: Server, kind: str, num: int) -> bool:
    return num_busy(server, kind) == num


async def scale(server: Server, load: Load, kind: str, count: int) -> None:
    """By the command; afterwards ``/status`` shows it, and every client gets another stream through."""
    command = farsight("scale", kind, str(count), "--port", str(server.port))
    await eventually(lambda: bool(rows(server, kind)))
    before = len(rows(server, kind))
    assert before != count, f"there are {count} of {kind} already"
    result = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{kind}: {before} -> {count} after "), result.stdout
    await eventually(lambda: len(living(server, kind)) == count)
    enough = load.num_done + NUM_CLIENTS
    await eventually(lambda: load.num_done >= enough)
    assert not load.wrong


async def drain_and_take_back(server: Server, load: Load) -> None:
    """By the command: replica 0 ends, the other one does all the work, and the last one cannot be drained."""
    began = await asyncio.to_thread(drain, server, "0")
    assert began.stdout.startswith("replica 0: drained after "), began.stderr
    (drained,) = (row for row in rows(server, "replica") if row["name"] == "worker-0")
    assert (drained["name"], drained["state"], drained["pid"]) == ("worker-0", "drained", 0)
    enough = load.num_done + NUM_CLIENTS
    await eventually(lambda: load.num_done >= enough)
    for words, message in [(["1"], "no other replica is left"), (["7"], "one of 0, 1")]:
        refused = await asyncio.to_thread(drain, server, *words)
        assert (refused.returncode, message in refused.stderr) == (1, True), refused
    back = await asyncio.to_thread(drain, server, "0", "--cancel")
    assert back.stdout.startswith("replica 0: takes requests after "), back.stderr
    await eventually(partial(are_busy, server, "replica", 2))
    assert not load.wrong


def drain(server: Server, *words: str) -> subprocess.CompletedProcess[str]:
    command = farsight("drain", *words, "--port", str(server.port))
    return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)


@pytest.fixture(scope="module", params=["fused", "split"])
def scaled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server of its own; ``tests/actors/test_deaths.py`` scales components in both placements."""
    folder: Path = tmp_path_factory.mktemp("scaled")
    # Unless told, there are two ingress replicas from the start where there are more than two processors.
    server = start_server(folder / "server.log", "--placement", request.param, *one_ingress(folder))
    yield server
    server.stop()


@pytest.mark.timeout(10 * TIMEOUT_S)
async def test_scaling_under_load_is_not_seen_by_clients(scaled: Server) -> None:
    async with running_load(scaled.base_url) as load:
        for kind in TEXT_KINDS:
            await scale(scaled, load, kind, 2)
            if kind in ("replica", "ingress"):  # the new one is given work
                await eventually(partial(are_busy, scaled, kind, 2))
        await drain_and_take_back(scaled, load)
        for kind in TEXT_KINDS:
            await scale(scaled, load, kind, 1)
    assert not load.wrong
    await asyncio.to_thread(scaled.wait_idle, ingress_too=False)


def test_the_command_says_what_is_wrong_in_one_line(scaled: Server) -> None:
    for words, message in [
        (["wizard", "2"], "one of replica, length-predictor, serving-time-estimator, image-encoder, ingress"),
        (["replica", "0"], "an integer from 1 to 1000"),
        (["replica", "1", "--token", "guess"], "the admin token is wrong"),
    ]:
        command = farsight("scale", *words, "--port", str(scaled.port))
        result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert result.returncode == 1
        assert message in result.stderr.lower()
        assert len(result.stderr.splitlines()) == 1, result.stderr

"""The contract of the fault-tolerant service: whatever dies behind the ingress, no client notices.

A real server under real streams; processes are killed with SIGKILL while all streams are under way.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.streams import LONG_S, MAX_TRIES, Stream, Streams, open_streams, streams_midway
from tests.e2e.server import Server, start_server

NUM_STREAMS = 64
NUM_TOKENS = 400
STILL_S = 30.0

KILLED = ("router", "scheduler-0", "worker-0")
"""``tests/actors/test_deaths.py`` has every kind, ``test_chaos.py`` the deaths of single ones under HTTP."""

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def split_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """In bfloat16, where another order of summation would show soon: a resumed stream is the same to the token.

    No tokens are guessed: these outputs repeat themselves, so some streams would end before all have begun.
    """
    folder = tmp_path_factory.mktemp("faults")
    config = folder / "config.toml"
    config.write_text('[engine]\nspeculation = "off"\n')
    flags = ("--config", str(config), "--placement", "split", "--replicas", "2", "--dtype", "bfloat16")
    running = start_server(folder / "server.log", *flags)
    yield running
    running.stop()
    assert running.process.returncode == 0
    log = (folder / "server.log").read_text()
    assert "Traceback" not in log and "Unhandled error" not in log, "a death is told in one line"


def assert_same(streams: list[Stream], undisturbed: list[Stream]) -> None:
    for index, (stream, reference) in enumerate(zip(streams, undisturbed, strict=True)):
        assert stream.outcome == reference.outcome, f"stream {index} is not what it is when nothing dies"


async def ready(streams: Streams, gone: Set[int] = frozenset()) -> dict[str, dict[str, Any]]:
    """The status once these components are ready in it, in other processes than those that are gone; one that answers
    late on a busy machine is shown as dead."""
    async with asyncio.timeout(LONG_S):
        while True:
            rows = await streams.rows()
            if all(rows[name]["state"] == "ready" and rows[name]["pid"] not in gone for name in KILLED):
                return rows
            await asyncio.sleep(0.02)


async def test_no_stream_notices_a_death(split_server: Server) -> None:
    """One end, every token, no error, and the same text as when nothing dies."""
    async with open_streams(split_server.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
        undisturbed = await streams.finish()
    for stream in undisturbed:
        assert (stream.errors, stream.reasons, stream.done) == ([], ["length"], True)
        assert stream.num_tokens == NUM_TOKENS
    async with streams_midway(split_server.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
        before = await ready(streams)
        pids = {before[name]["pid"] for name in KILLED}
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        after = await ready(streams, pids)
        assert {after[name]["restarts"] - before[name]["restarts"] for name in KILLED} == {1}
        assert_same(await streams.finish(), undisturbed)
    await asyncio.to_thread(split_server.wait_idle, LONG_S)


async def test_the_death_of_an_ingress_replica_breaks_only_its_own_streams(tmp_path: Path) -> None:
    config = tmp_path / "farsight.toml"
    config.write_text("[server]\ningress_replicas = 2\n")
    server = start_server(tmp_path / "log", "--config", str(config), "--dtype", "float32", "--placement", "fused")
    try:
        await _kill_an_ingress(server)
    finally:
        server.stop()


@pytest.mark.nightly
async def test_ingress_replicas_that_stand_still_for_half_a_minute_lose_no_request(tmp_path: Path) -> None:
    """A silence is no death: no worker aborts what they have open, and their clients read on."""
    server = start_server(tmp_path / "log", "--dtype", "float32", "--placement", "fused")
    try:
        async with open_streams(server.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
            undisturbed = await streams.finish()
            pids = [row["pid"] for row in (await streams.rows()).values() if row["kind"] == "Ingress"]
        async with streams_midway(server.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
            assert pids and not all(stream.ended for stream in streams.each)
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(STILL_S)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
            assert_same(await streams.finish(), undisturbed)
        await asyncio.to_thread(server.wait_idle, LONG_S)
    finally:
        server.stop()
    assert "aborted" not in (tmp_path / "log").read_text()


async def _kill_an_ingress(server: Server) -> None:
    async with open_streams(server.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
        undisturbed = await streams.finish()
    for _ in range(MAX_TRIES):
        async with streams_midway(server.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
            ingresses = await _both_busy(streams)
            if not ingresses:
                continue  # the streams ended too soon, or Ray Serve has given all of them to one replica
            victim = ingresses[0]
            os.kill(victim["pid"], signal.SIGKILL)
            each = await streams.finish()
        await asyncio.to_thread(_wait_two_ingresses, server, victim["name"])
        broken = [index for index, stream in enumerate(each) if stream.broken]
        if broken:
            break  # else it had just ended its last one
    else:
        raise AssertionError(f"{MAX_TRIES} times the streams were never under way at both ingress replicas")
    assert len(broken) < NUM_STREAMS
    for index, (stream, reference) in enumerate(zip(each, undisturbed, strict=True)):
        if index in broken:
            text = "".join(stream.texts)
            assert text == "".join(reference.texts)[: len(text)]
            assert not stream.done
        else:
            assert stream.outcome == reference.outcome, f"stream {index} is of the other replica"
    await asyncio.to_thread(server.wait_idle, LONG_S)


async def _both_busy(streams: Streams) -> list[dict[str, Any]]:
    """The rows of both ingress replicas once they tell of streams, which they do now and then; else none."""
    while not any(stream.ended for stream in streams.each):
        ingresses = [row for row in (await streams.rows()).values() if row["kind"] == "Ingress"]
        # None are shown where the router answers late, one where the other is.
        if len(ingresses) == 2 and all(row["queue"] for row in ingresses):
            return ingresses
        await asyncio.sleep(0.05)
    return []


def _wait_two_ingresses(server: Server, victim: str) -> None:
    """Until a new replica has come and the dead one has been forgotten."""
    deadline = time.monotonic() + LONG_S
    while True:
        found = [row for row in server.get("/status")["actors"] if row["kind"] == "Ingress"]
        if len(found) == 2 and victim not in {row["name"] for row in found}:
            return
        assert time.monotonic() < deadline, found
        time.sleep(0.1)

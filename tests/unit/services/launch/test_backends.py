"""Other servers before anything starts: refused settings, and what is said of each."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator

import pytest

from core.config.load import FarsightConfig
from core.config.model import ModelConfig
from core.config.replica import ReplicaConfig
from core.config.scheduling import SchedulerConfig
from core.errors import ConfigError
from services.launch.backends import check_replicas, look_for_servers
from services.launch.cluster import ServiceFailed
from tests.unit.actors.openai_double import OpenAIDouble


def config(*urls: str, preset: str = "fcfs", own: int = 0) -> FarsightConfig:
    replica = tuple(ReplicaConfig("openai", url, connect_timeout_s=60.0) for url in urls)
    return FarsightConfig(model=ModelConfig(replicas=own), scheduler=SchedulerConfig(preset=preset), replica=replica)


@contextlib.contextmanager
def serving(double: OpenAIDouble) -> Iterator[str]:
    """On an event loop in another thread, for what runs one of its own."""
    ready, done = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        async with double.running():
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    ready.wait()
    try:
        yield double.url
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join()
        loop.close()


GONE = "http://127.0.0.1:1/v1"


@pytest.fixture
def said() -> list[str]:
    return []


def test_batches_are_for_our_own_engine() -> None:
    check_replicas(config(GONE))
    with pytest.raises(ConfigError, match=r"replica: got .*127.0.0.1:1.* expected none with preset 'magnus'"):
        check_replicas(config(GONE, preset="magnus"))
    check_replicas(config(own=1, preset="magnus"))


def test_each_server_is_asked_and_told_of(said: list[str]) -> None:
    with serving(OpenAIDouble()) as url, serving(OpenAIDouble(models=[{"id": "other"}])) as liar:
        look_for_servers(config(url, GONE, liar), "m", said.append)
    assert said[0] == f"Replica backend-0 is {url}: it answers."
    assert said[1].startswith(f"Replica backend-1 is {GONE}: cannot connect")
    assert said[2] == f"Replica backend-2 is {liar}: the server serves 'other', expected 'm'."


def test_where_there_is_nothing_else_one_of_them_must_be_there(said: list[str]) -> None:
    look_for_servers(config(GONE, own=1), "m", said.append)
    with pytest.raises(ServiceFailed, match="none of the servers"):
        look_for_servers(config(GONE), "m", said.append)


def test_without_other_servers_nothing_is_said(said: list[str]) -> None:
    look_for_servers(config(own=1), "m", said.append)
    assert said == []

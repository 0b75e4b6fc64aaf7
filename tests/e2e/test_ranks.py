"""A replica over four processes, each with a GPU that only Ray believes in: the answers of one process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from benchmarks.streams import LONG_S, Streams, stream_body, streams_midway
from core.config import EngineConfig
from core.request import SamplingParams
from engine import Engine
from services.launch import EMBEDDED_MODEL, EMBEDDED_NAME
from tests.e2e.server import Server, start_server

NUM_STREAMS = 4
NUM_TOKENS = 150
RANKS = ("worker-0", "rank-0.1", "rank-0.2", "rank-0.3")

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "farsight.toml").write_text("[actors]\ngpus_per_rank = 1.0\n")
    flags = ["--tensor-parallel", "2", "--pipeline-parallel", "2", "--dtype", "float32", "--placement", "fused"]
    flags += ["--proxy", "serve"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_OVERRIDE_RESOURCES", '{"GPU": 4}')
        server = start_server(folder / "log", *flags, "--config", str(folder / "farsight.toml"))
    yield server
    server.stop()


def texts_of_one_rank() -> list[str]:
    """What the streams are to be, from the engine in this process."""
    bodies = [stream_body(index, NUM_TOKENS) for index in range(NUM_STREAMS)]
    engine = Engine(EMBEDDED_MODEL, dtype="float32", engine=EngineConfig(backend="torch", num_threads=1))
    sampling = [
        SamplingParams(NUM_TOKENS, ignore_eos=True, temperature=body["temperature"], seed=body.get("seed", 0))
        for body in bodies
    ]
    return [each.text for each in engine.generate([body["prompt"] for body in bodies], sampling)]


def test_a_chat(ranked: Server) -> None:
    messages = [{"role": "system", "content": "Write in upper case:"}, {"role": "user", "content": "hello world"}]
    body: dict[str, Any] = {"model": EMBEDDED_NAME, "messages": messages, "temperature": 0}
    reply = httpx.post(f"{ranked.base_url}/v1/chat/completions", json=body, timeout=60)
    assert reply.json()["choices"][0]["message"]["content"] == "HELLO WORLD"


def test_a_rank_that_is_killed_takes_the_replica_with_it_and_nothing_is_lost(ranked: Server) -> None:
    async def run() -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        async with streams_midway(ranked.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
            before = await streams.rows()
            assert {before[name]["state"] for name in RANKS} == {"ready"}
            os.kill(before["rank-0.2"]["pid"], signal.SIGKILL)
            each = await streams.finish()
            return [stream.outcome for stream in each], before, await all_ready(streams)

    outcomes, before, after = asyncio.run(run())
    assert outcomes == [(text, ["length"], [], NUM_TOKENS, True) for text in texts_of_one_rank()]
    assert not {before[name]["pid"] for name in RANKS} & {after[name]["pid"] for name in RANKS}, "one lives on"
    ranked.wait_idle()


async def all_ready(streams: Streams) -> dict[str, Any]:
    """The rows of the status once every rank shows up in it."""
    async with asyncio.timeout(LONG_S):
        while True:
            rows = await streams.rows()
            if {rows[name]["state"] for name in RANKS} == {"ready"}:
                return rows
            await asyncio.sleep(0.1)

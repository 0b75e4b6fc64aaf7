"""A replica over four processes, each with a GPU that only Ray believes in: the answers of one process."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.common.streams import LONG_S, stream_body, streams_midway
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.services.launch.launch import EMBEDDED_MODEL, EMBEDDED_NAME
from tests.e2e.server import Server, start_server, wait_until

NUM_STREAMS = 4
NUM_TOKENS = 150
RANKS = ("worker-0", "rank-0.1", "rank-0.2", "rank-0.3")


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("ranks")
    actors = "[actors]\ngpus_per_rank = 1.0\nsilence_s = 2.0\n"
    (folder / "farsight.toml").write_text(f"{actors}[server]\ningress_replicas = 1\n")
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
    reply = httpx.post(f"{ranked.base_url}/v1/chat/completions", json=body, timeout=LONG_S)
    assert reply.json()["choices"][0]["message"]["content"] == "HELLO WORLD"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_rank_that_is_lost_takes_the_replica_with_it_and_nothing_else(ranked: Server, number: signal.Signals) -> None:
    """The others wait in a collective for one that is stopped."""
    before: dict[str, int] = {}
    wait_until(lambda: before.update(ready_ranks(ranked)) or len(before) == len(RANKS), "not every rank is ready")

    async def run() -> list[Any]:
        async with streams_midway(ranked.base_url, NUM_STREAMS, NUM_TOKENS) as streams:
            os.kill(before["rank-0.2"], number)
            return [stream.outcome for stream in await streams.finish()]

    assert asyncio.run(run()) == [(text, ["length"], [], NUM_TOKENS, True) for text in texts_of_one_rank()]

    def others() -> bool:
        after = ready_ranks(ranked)
        return len(after) == len(RANKS) and not {*before.values()} & {*after.values()}

    wait_until(others, "one lives on, or has not come back")
    ranked.wait_idle()


def test_an_ingress_replica_that_is_stopped_is_replaced(ranked: Server) -> None:
    """The connections of its clients end with it; Ray Serve notices."""
    pid = ranked.pid_of("Ingress")
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: not psutil.pid_exists(pid), "it is there still")
    wait_until(ranked.answers, "no other has taken its place")
    wait_until(lambda: ranked.pid_of("Ingress") != pid, "the status shows the old one")
    ranked.wait_idle()


def ready_ranks(server: Server) -> dict[str, int]:
    """The pids of the ranks that the status shows as ready: on a busy machine it may miss some."""
    rows = server.get("/status")["actors"]
    return {row["name"]: row["pid"] for row in rows if row["name"] in RANKS and row["state"] == "ready"}

"""Whatever dies while pictures are read and answered, no client notices: every stream is whole and the same."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from benchmarks.common.resumable import Client, clients
from benchmarks.common.streams import eventually
from tests.e2e.pictures import chat_body, picture
from tests.e2e.server import Server, start_server, wait_until
from tests.unit.engine.vision.models import save_chatting_model

NUM_TOKENS = 48
SEEDS = (
    *(1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 14, 15, 16, 18, 19, 20),
    *(21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 33, 34, 35, 36, 38),
)
"""Pictures whose first tokens nowhere hang on rounding: no logits closer than 2e-3. It changes when they are encoded
again beside others, and prompts computed again."""

DRAIN_S = 0.3
"""What workers have sent before they stand still has reached its clients by then."""

KILLED = ("ImageEncoder", "ModelWorker", "Ingress")

pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Keeps one picture: nearly every request has its own encoded again."""
    folder = tmp_path_factory.mktemp("faults")
    model_dir = save_chatting_model(folder / "model")
    config = folder / "config.toml"
    config.write_text('[engine]\nspeculation = "off"\n[images]\ncache_mib = 0\n')
    flags = ("--model", str(model_dir), "--dtype", "float32", "--config", str(config), "--replicas", "2")
    running = start_server(folder / "server.log", *flags)
    yield running
    running.stop()


def shown(index: int) -> tuple[int, np.ndarray]:
    seed = SEEDS[index % len(SEEDS)]
    return seed, picture(seed, 30 + seed % 7 * 6, 30 + seed % 5 * 8)


def body_of(index: int, num_tokens: int) -> dict[str, Any]:
    """A text and a picture."""
    seed, rgb = shown(index)
    fields = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": False}
    return chat_body(f"Picture {seed}:", rgb, max_tokens=num_tokens, **fields)


@asynccontextmanager
async def at_work(server: Server, number: int) -> AsyncIterator[list[Client]]:
    async with clients(server.base_url, number, NUM_TOKENS, "/v1/chat/completions", body_of) as found:
        yield found


async def kill_ingress(server: Server, pid: int, found: list[Client]) -> list[Client]:
    """Kills it while workers stand still, so that no stream ends; returns those whose streams it cuts."""
    workers = [await asyncio.to_thread(server.pid_of, f"worker-{number}") for number in range(2)]
    while True:
        await eventually(lambda: any(0 < client.num_read < NUM_TOKENS // 4 for client in found))
        try:
            for worker in workers:
                os.kill(worker, signal.SIGSTOP)
            await asyncio.sleep(DRAIN_S)
            if cut := [client for client in found if client.num_read]:
                os.kill(pid, signal.SIGKILL)
                return cut
        finally:
            for worker in workers:
                os.kill(worker, signal.SIGCONT)


async def each_again(found: list[Client]) -> None:
    """Until every client has had one more whole answer from its first word on."""
    before = [len(client.done) for client in found]

    def has_had() -> bool:
        assert not any(client.failures for client in found), [client.failures for client in found if client.failures]
        return all(len(client.done) >= count + 2 for client, count in zip(found, before, strict=True))

    await eventually(has_had)


@pytest.mark.parametrize("number", [64])
async def test_no_stream_notices_a_death(server: Server, number: int) -> None:
    async with at_work(server, number) as found:
        await each_again(found)
        undisturbed = [client.done[0].outcome for client in found]
        cut: list[Client] = []
        for kind in KILLED:
            pid = await asyncio.to_thread(server.pid_of, kind)
            if kind == "Ingress":
                cut = await kill_ingress(server, pid, found)
            else:
                os.kill(pid, signal.SIGKILL)
            await asyncio.to_thread(wait_until, server.answers, "no server answers")
            await asyncio.to_thread(wait_until, lambda: server.pid_of(kind) != pid, f"no other {kind}")  # noqa: B023
            await each_again(found)
    answers = [(client.index, stream) for client in found for stream in client.done]
    assert len(answers) >= 8 * number
    for index, stream in answers:
        assert stream.outcome == undisturbed[index], f"stream of client {index} is not what it is when nothing dies"
        assert stream.reasons == ["length"] and stream.num_tokens == NUM_TOKENS
    assert cut and all(client.num_resumed for client in cut), "the ingress's death was to be felt"
    await asyncio.to_thread(server.wait_idle, ingress_too=False)

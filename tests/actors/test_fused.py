"""Real actors, real messages, without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import ray

from core.codec import decode, encode
from core.config import EngineConfig
from core.errors import CapacityError, MessageError
from core.messages import Plan, StatusReply, Submit, TokenBatches
from core.request import Request, SamplingParams
from engine import Engine
from services.api.backend import ModelInfo
from services.api.errors import ApiError
from services.client import EngineClient
from tests.actors.conftest import Fused

MODEL = ModelInfo("m", 0, 256, False, 320)


@pytest.fixture
async def client(fused: Fused) -> AsyncIterator[EngineClient]:
    client = EngineClient(fused.control, fused.workers, MODEL, max_requests=20, max_tokens=400)
    client.start()
    yield client
    await client.close()


def sampling(num_tokens: int) -> SamplingParams:
    return SamplingParams(num_tokens, ignore_eos=True)


async def read(client: EngineClient, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    tokens: tuple[int, ...] = ()
    async with aclosing(client.stream(prompt, sampling(num_tokens))) as deltas:
        async for delta in deltas:
            assert delta.start == len(tokens), "a token is missing or repeated"
            tokens += delta.token_ids
    return tokens


async def wait_whole(fused: Fused) -> None:
    """Until the scheduler has heard that every block is free."""
    async with asyncio.timeout(10):
        while True:
            status = decode(await fused.control.status.remote(), StatusReply)
            if status.free_blocks == status.num_blocks and not any(piece.queue for piece in status.pieces):
                return
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("fused", [1, 2], indirect=True, ids=["one replica", "two replicas"])
async def test_streams_are_those_of_the_engine(client: EngineClient, fused: Fused, actor_model_dir: Path) -> None:
    prompts = [tuple(range(5 + i, 12 + 2 * i)) for i in range(16)]
    outputs = await asyncio.gather(*(read(client, prompt, 10 + i) for i, prompt in enumerate(prompts)))
    engine = Engine(actor_model_dir, dtype="float32", engine=EngineConfig(kv_memory="1MiB", num_threads=1))
    expected = engine.generate(prompts, [sampling(10 + i) for i in range(16)])
    assert outputs == [completion.token_ids for completion in expected]
    await wait_whole(fused)


async def test_a_closed_stream_frees_its_kv(client: EngineClient, fused: Fused) -> None:
    async with aclosing(client.stream((5, 6, 7), sampling(200))) as deltas:
        await anext(deltas)
    await wait_whole(fused)


async def test_what_is_too_much_is_refused_at_the_first_check(client: EngineClient, fused: Fused) -> None:
    open_streams = [client.stream((5,) * 20, sampling(200)) for _ in range(20)]
    for stream in open_streams:
        await anext(stream)
    with pytest.raises(CapacityError, match="20 requests are open, the limit is 20"):
        await anext(client.stream((5,), sampling(1)))
    await open_streams.pop().aclose()
    with pytest.raises(CapacityError, match="380 prompt tokens are in the house, the limit is 400"):
        await anext(client.stream((5,) * 21, sampling(1)))
    for stream in open_streams:
        await stream.aclose()
    await wait_whole(fused)
    assert len(await read(client, (5,) * 21, 3)) == 3


async def test_a_lost_reply_loses_no_token(fused: Fused) -> None:
    request = Request("r", 0, "me", (5, 6), sampling(3))
    await fused.control.submit.remote(encode(Submit((request,))))
    ack_seq, tokens = 0, []
    while len(tokens) < 3:
        lost = decode(await fused.worker.poll_tokens.remote("me", ack_seq), TokenBatches)
        again = decode(await fused.worker.poll_tokens.remote("me", ack_seq), TokenBatches)
        assert again.batches[: len(lost.batches)] == lost.batches
        for batch in again.batches:
            tokens += [token for delta in batch.deltas for token in delta.token_ids]
            ack_seq = batch.seq
    assert len(tokens) == 3
    assert decode(await fused.worker.poll_tokens.remote("me", ack_seq), TokenBatches).batches == ()


@pytest.mark.parametrize("data", [b"", b"\xc1", encode(Plan("w", 1, 0, 0, ()))], ids=["empty", "no msgpack", "a plan"])
async def test_a_malformed_message_is_refused_and_kills_nobody(client: EngineClient, fused: Fused, data: bytes) -> None:
    with pytest.raises(MessageError):
        await fused.control.submit.remote(data)
    with pytest.raises(MessageError):
        await fused.worker.push_plan.remote(encode(Submit(())))
    assert len(await read(client, (5, 6), 2)) == 2


async def test_an_ingress_that_falls_silent_leaves_nothing_running(fused: Fused) -> None:
    requests = tuple(Request(f"r{i}", 0, "ghost", (5, 6), sampling(250)) for i in range(12))
    await fused.control.submit.remote(encode(Submit(requests)))
    await fused.worker.poll_tokens.remote("ghost", 0)
    await wait_whole(fused)
    batches = decode(await fused.worker.poll_tokens.remote("ghost", 0), TokenBatches).batches
    reasons = [delta.finish_reason for batch in batches for delta in batch.deltas if delta.finish_reason]
    assert set(reasons) <= {"abort", "length"}
    assert len(reasons) == 12, "each request still gets its one terminal reply"


async def test_every_piece_is_in_the_status(client: EngineClient, fused: Fused) -> None:
    status = await client.status()
    assert sorted(piece.kind for piece in status.pieces) == ["Ingress", "ModelWorker", "Router", "Scheduler"]
    assert {piece.state for piece in status.pieces} == {"ready"}


async def test_a_dead_worker_ends_its_streams_and_is_shown(client: EngineClient, fused: Fused) -> None:
    stream = client.stream((5, 6), sampling(250))
    await anext(stream)
    ray.kill(fused.worker)
    async with asyncio.timeout(20):
        last = [delta async for delta in stream][-1]
    assert last.finish_reason == "error"
    with pytest.raises(ApiError, match="the model worker is gone") as caught:
        await anext(client.stream((5,), sampling(1)))
    assert caught.value.status == 503
    assert not await client.healthy()
    states = {piece.kind: piece.state for piece in decode(await fused.control.status.remote(), StatusReply).pieces}
    assert states["ModelWorker"] == "dead"


@pytest.mark.parametrize("fused", [2], indirect=True)
async def test_replicas_share_the_requests(client: EngineClient, fused: Fused) -> None:
    streams = [client.stream((5, 6), sampling(250)) for _ in range(6)]
    for stream in streams:
        await anext(stream)
    status = await client.status()
    queues = {piece.name: piece.queue for piece in status.pieces if piece.kind == "ModelWorker"}
    assert queues == {"worker-0": 3, "worker-1": 3}
    for stream in streams:
        await stream.aclose()
    await wait_whole(fused)

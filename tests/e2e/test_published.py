"""A published model behind the real server: its answers outlive the worker that has begun them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.common.streams import Stream, eventually
from tests.e2e.server import one_ingress, start_server
from tests.published import smollm2

QUESTIONS = (
    "Tell me a story about a cat and a dog.",
    "What is the capital of France, and what is it known for?",
    "Write a Python function that sorts a list.",
    "Why is the sky blue?",
)
NUM_TOKENS = 160


def body(index: int, question: str) -> dict[str, Any]:
    """A greedy chat, or one that is sampled as people do it."""
    sampling = {"temperature": 0} if index % 2 else {"temperature": 0.8, "top_p": 0.95, "seed": index}
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "max_tokens": NUM_TOKENS, "ignore_eos": True, "stream": True, **sampling}


async def read(client: httpx.AsyncClient, stream: Stream, asked: dict[str, Any]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=asked) as reply:
        async for line in reply.aiter_lines():
            stream.take(line)


async def answers(base_url: str, midway: Callable[[], object]) -> list[Stream]:
    """What the questions are answered, all at once.

    Args:
        midway: Is called when each of the answers has begun.
    """
    streams = [Stream() for _ in QUESTIONS]
    async with httpx.AsyncClient(base_url=base_url, timeout=None) as client, asyncio.TaskGroup() as group:
        for index, (stream, question) in enumerate(zip(streams, QUESTIONS, strict=True)):
            group.create_task(read(client, stream, body(index, question)))
        await eventually(lambda: all(len(stream.texts) > 3 for stream in streams))
        midway()
    return streams


async def test_answers_of_smollm2_outlive_their_worker(tmp_path: Path) -> None:
    smollm2()  # is here, or the test is skipped
    server = start_server(tmp_path / "log", *one_ingress(tmp_path), "--model", "smollm2", "--placement", "split")
    try:
        undisturbed = await answers(server.base_url, lambda: None)
        victim = await asyncio.to_thread(server.pid_of, "worker-0")
        resumed = await answers(server.base_url, lambda: os.kill(victim, signal.SIGKILL))
        assert await asyncio.to_thread(server.pid_of, "worker-0") != victim
        assert [stream.outcome for stream in resumed] == [stream.outcome for stream in undisturbed]
        assert all(stream.reasons == ["length"] and not stream.errors for stream in undisturbed)
    finally:
        server.stop()

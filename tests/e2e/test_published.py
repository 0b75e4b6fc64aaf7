"""A published model behind the real server: its answers outlive the worker that has begun them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.common.streams import Stream, eventually
from farsight.core.config.engine import EngineConfig
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from tests.e2e.server import LONG_S, one_ingress, start_server
from tests.published import smollm2, smollm2_floats

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


async def test_iterations_that_are_cut_off_change_no_token_of_smollm2(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """``mlfq = "preemption"`` on a server, greedy and in float32, beside ``fcfs`` in this process."""
    model = smollm2_floats(tmp_path_factory)
    prompts = [f"{question} " * (1 + 8 * index) for index, question in enumerate(QUESTIONS)]
    config = tmp_path / "farsight.toml"
    config.write_text('[scheduler]\nmlfq = "preemption"\nquantum_s = 0.0001\n[engine]\nmax_num_seqs = 2\n')
    flags = ("--model", str(model), "--dtype", "float32", "--preset", "fastserve", "--config", str(config))
    server = start_server(tmp_path / "log", *flags)
    try:
        async with httpx.AsyncClient(base_url=server.base_url, timeout=LONG_S) as client:
            common = {"max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
            asked = [client.post("/v1/completions", json={"prompt": prompt, **common}) for prompt in prompts]
            replies = [reply.json()["choices"][0] for reply in await asyncio.gather(*asked)]
            page = (await client.get("/metrics")).text
    finally:
        server.stop()
    cut = [float(line.split()[-1]) for line in page.splitlines() if line.startswith("farsight:steps_cut_off_total")]
    assert sum(cut) >= len(prompts), "each prompt outlasts the first quantum"
    engine = Engine(model, dtype="float32", engine=EngineConfig(max_num_seqs=2))
    expected = engine.generate(prompts, SamplingParams(24, ignore_eos=True))
    assert [reply["token_ids"] for reply in replies] == [list(each.token_ids) for each in expected]

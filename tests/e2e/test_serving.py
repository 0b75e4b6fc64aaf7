"""The running server: right tokens, nothing leaks when clients leave, every component is shown."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
from typing import Any

import httpx
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families

from farsight.core.config.engine import EngineConfig
from farsight.core.exposition import OPEN_METRICS_TYPE
from farsight.core.request import SamplingParams
from farsight.engine import Engine
from farsight.services.launch.launch import EMBEDDED_MODEL
from tests.e2e.server import LONG_S, Server, farsight, holds_torch, wait_until

ROW = {
    "name",
    "kind",
    "pid",
    "node",
    "state",
    "queue",
    "last_step_age_s",
    "restarts",
    "http_port",
    "url",
    "breaker",
    "last_end",
    "degraded",
}
NUM_STREAMS = 300
IN_FLIGHT = 50
KINDS = [
    "Ingress",
    "KVOffloadManager",
    "LengthPredictor",
    "LogStore",
    "StreamStore",
    "ModelWorker",
    "Router",
    "Scheduler",
    "ServingTimeEstimator",
    "Supervisor",
]


def completion_body(model: str, prompt: list[int] | list[list[int]], num_tokens: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def read_stream(client: httpx.AsyncClient, body: dict[str, object], leave_after: int | None) -> str | None:
    """The streamed text and its one finish reason checked; None if the client left after some chunks."""
    text, reasons, usage, num_chunks = "", [], None, 0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            if num_chunks == leave_after:
                return None
            num_chunks += 1
            chunk = json.loads(line.removeprefix("data: "))
            for choice in chunk["choices"]:
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
            usage = chunk["usage"] or usage
    assert reasons == ["length"]
    assert usage is not None
    assert usage["completion_tokens"] == body["max_tokens"]
    return text


async def test_streams_carry_the_engines_tokens_while_half_of_the_clients_leave(
    server: Server, model_name: str
) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(4, 256) for _ in range(rng.randint(1, 60))] for _ in range(NUM_STREAMS)]
    leave = [rng.randint(0, 1) if rng.random() < 0.5 else None for _ in prompts]
    # Who is to leave does so before the end: a late chunk may hold all tokens, but one with the usage follows.
    lengths = [rng.randint(8, 60) if after is None else 900 for after in leave]
    gate = asyncio.Semaphore(IN_FLIGHT)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=LONG_S) as client:

        async def one(i: int) -> str | None:
            async with gate:
                return await read_stream(client, completion_body(model_name, prompts[i], lengths[i]), leave[i])

        texts = await asyncio.gather(*(one(i) for i in range(NUM_STREAMS)))
    server.wait_idle()

    engine = Engine(EMBEDDED_MODEL, engine=EngineConfig(kv_memory="16MiB", num_threads=1))
    served = [i for i, after in enumerate(leave) if after is None]
    assert 100 < len(served) < 200
    assert [i for i, text in enumerate(texts) if text is not None] == served
    expected = engine.generate(
        [prompts[i] for i in served], [SamplingParams(lengths[i], ignore_eos=True) for i in served]
    )
    assert [texts[i] for i in served] == [each.text for each in expected]


async def test_a_client_that_leaves_a_blocking_request_frees_its_kv(server: Server, model_name: str) -> None:
    prompts = [[5] * 20] * 64
    body = completion_body(model_name, prompts, 1000) | {"stream": False, "stream_options": None}
    before = await asyncio.to_thread(num_aborted, server)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=LONG_S) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json=body))
        await asyncio.to_thread(wait_until, lambda: holds_kv(server) or asked.done(), "it does not run")
        assert not asked.done()
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
    await asyncio.to_thread(server.wait_idle)
    assert await asyncio.to_thread(num_aborted, server) == before + len(prompts), "they ran to their end"


def num_aborted(server: Server) -> float:
    """Requests that have ended because their clients left."""
    page = httpx.get(f"{server.base_url}/metrics", timeout=LONG_S).text
    name = "vllm:request_success_total{"
    lines = [line for line in page.splitlines() if line.startswith(name) and 'finished_reason="abort"' in line]
    return sum(float(line.split()[-1]) for line in lines)


def holds_kv(server: Server) -> bool:
    kv = server.get("/status")["kv"]
    return bool(kv["free_blocks"] < kv["num_blocks"])


def test_only_the_worker_holds_torch(server: Server) -> None:
    holders = {process.pid for process in server.children() if holds_torch(process)}
    assert holders == {server.pid_of("ModelWorker")}


def test_status_shows_every_logical_component(server: Server) -> None:
    command = farsight("status", "--port", str(server.port), "--json")
    rows: list[dict[str, Any]] = []

    def all_ready() -> bool:
        """A component that answers late, on a busy machine, is shown as dead, or is not shown."""
        done = subprocess.run(command, capture_output=True, text=True)
        rows[:] = [] if done.returncode else json.loads(done.stdout)["actors"]
        return sorted(row["kind"] for row in rows) == sorted(KINDS) and all(row["state"] == "ready" for row in rows)

    wait_until(all_ready, "not every component is ready, or there are others")
    assert all(set(row) == ROW for row in rows)
    shown = farsight("status", "--port", str(server.port))

    def all_named() -> bool:
        table = subprocess.run(shown, capture_output=True, text=True).stdout
        return all(row["name"] in table for row in rows)

    wait_until(all_named, "a component is missing in the table")


def test_a_latency_names_the_answer_that_had_it(server: Server, model_name: str) -> None:
    """By an exemplar, to a scraper that reads OpenMetrics; another ingress replica's too."""
    body = {"model": model_name, "prompt": "upper: red", "max_tokens": 4}
    reply = httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=LONG_S)
    page = httpx.get(f"{server.base_url}/metrics", headers={"Accept": OPEN_METRICS_TYPE}, timeout=LONG_S)
    assert page.headers["content-type"] == OPEN_METRICS_TYPE
    named = {
        family.name
        for family in open_metrics_families(page.text)
        for sample in family.samples
        if sample.exemplar is not None and sample.exemplar.labels["response_id"] == reply.json()["id"]
    }
    assert named == {"vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"}

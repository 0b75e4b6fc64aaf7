"""A server on emulated devices: it says that its answers are made up, logs them, simulates them, and takes a burst."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.burst import load
from farsight.services.launch.launch import EMBEDDED_NAME
from tests.e2e.server import LONG_S, Server, farsight, holds_torch, start_server, wait_until

PROFILE = {
    "base_s": 0.004,
    "prefill_token_s": 0.0,
    "decode_seq_s": 0.0,
    "context_token_s": 0.0,
    "kv_bytes": 1024,
    "copy_bandwidth": 1e8,
}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("emulated")
    (folder / "slow.json").write_text(json.dumps(PROFILE))
    settings = '[engine]\nhost_kv_memory = "4MiB"\n[scheduler]\nplacement = "round-robin"\n'
    (folder / "farsight.toml").write_text(settings)
    flags = ["--device", f"emulated:{folder / 'slow.json'}", "--replicas", "2", "--preset", "fastserve"]
    flags += ["--kv-memory", "4MiB", "--max-model-len", "3000", "--log-format", "json", "--access-log", "--config"]
    server = start_server(folder / "log", *flags, str(folder / "farsight.toml"))
    yield server
    server.stop()


def test_every_page_says_that_answers_are_made_up(emulated: Server) -> None:
    [card] = emulated.get("/v1/models")["data"]
    assert (card["emulated"], card["max_model_len"]) == ("slow.json", 3000)
    assert emulated.get("/status")["emulated"] == "slow.json"
    command = farsight("status", "--port", str(emulated.port))

    def told() -> bool:
        shown = subprocess.run(command, capture_output=True, text=True).stdout
        return shown.startswith("Emulated device (slow.json): answers are made up.")

    wait_until(told, "the command does not say it")
    wait_until(lambda: "The device is emulated (slow.json)" in emulated.log.read_text(), "the log does not say it")
    assert not [process for process in emulated.children() if holds_torch(process)]


def complete(server: Server, prompt: str) -> str:
    """The id of the answer."""
    body = {"model": EMBEDDED_NAME, "prompt": prompt, "max_tokens": 16}
    return str(httpx.post(f"{server.base_url}/v1/completions", json=body, timeout=LONG_S).json()["id"])


def test_what_if_is_answered_by_a_simulation_of_what_is_in_the_log(emulated: Server) -> None:
    texts: list[str] = []

    def is_simulated() -> bool:
        response_id = [complete(emulated, f"Words {n}") for n in range(12)][-1]  # they tell the cost of steps
        address = f"{emulated.base_url}/v1/requests/{response_id}/what-if"
        reply = httpx.get(address, params={"preset": "farsight", "replicas": 2, "priority": -1}, timeout=LONG_S)
        assert reply.status_code in (200, 404, 409, 429, 503), reply.text  # not in the log, or not measured, yet
        texts.extend([reply.json()["text"]] if reply.is_success else [])
        return bool(texts)

    wait_until(is_simulated, "no simulation answers")
    assert texts[0].startswith("With preset=farsight,replicas=2,priority=-1 it would have taken ")
    assert " instead of " in texts[0]


def test_the_log_names_the_answer_and_holds_no_prompt(emulated: Server) -> None:
    prompt = "no log may hold this"
    response_id = complete(emulated, prompt)

    def lines() -> list[dict[str, object]]:
        return [json.loads(each) for each in emulated.log.read_text().splitlines() if response_id in each]

    wait_until(lines, "no line has the id of the answer")
    [found] = lines()
    assert (found["path"], found["status"], str(found["process"])[:8]) == ("/v1/completions", 200, "ingress-")
    assert prompt not in emulated.log.read_text()


async def test_a_burst_is_answered_whole_and_the_server_can_be_asked_how_it_is_meanwhile(emulated: Server) -> None:
    """2,000 at once, each on a connection of its own."""
    _allow_open_files()
    asked: list[int] = []

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=emulated.base_url, timeout=LONG_S) as client:
            while True:
                health, status = await client.get("/health"), await client.get("/status")
                asked.extend((health.status_code, status.status_code))

    asking = asyncio.create_task(ask())
    blocking = load(emulated.port, 1000, 1000, stream=False, max_tokens=2, words=3)
    streaming = load(emulated.port, 1000, 1000, stream=True, max_tokens=2, words=3)
    for answers in await asyncio.gather(blocking, streaming):
        assert answers.outcomes == {"200": 1000}
        assert not answers.wrong
    asking.cancel()
    assert len(asked) >= 2 and set(asked) == {200}
    await asyncio.to_thread(emulated.wait_idle)


def _allow_open_files() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

"""A replica that is a real llama.cpp. Runs where FARSIGHT_LLAMA_SERVER names its ``llama-server``."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from farsight.core.request import Request, SamplingParams
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.launch.launch import EMBEDDED_MODEL
from tests.e2e.other_servers import ANSWER, MESSAGES, answer, answer_to_chat, other_server, own_answers
from tests.e2e.server import start_server
from tests.free_ports import free_port
from tests.unit.actors.components import until
from tests.unit.actors.external.test_backend import backend
from tests.unit.engine.gguf_files import write_gguf
from tests.unit.services.api.api_support import chat_ids

LLAMA_SERVER = os.environ.get("FARSIGHT_LLAMA_SERVER", "")
NAME = "served-by-llama-cpp"
START_S = 60.0
NO_MERGE = ("\u0100 \u0101",)  # two control characters, whose union is no token
MAX_LEN, SLOTS = 1024, 4
FLAGS = ("--parallel", str(SLOTS), "--ctx-size", str(MAX_LEN * SLOTS), "--threads", "1", "--no-webui")
FLOAT32_KV = ("--cache-type-k", "f32", "--cache-type-v", "f32")

pytestmark = pytest.mark.skipif(not LLAMA_SERVER, reason="FARSIGHT_LLAMA_SERVER does not name llama-server")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a llama.cpp with the embedded model."""
    port, folder = free_port(), tmp_path_factory.mktemp("llama")
    model = write_gguf(folder / "model.gguf", EMBEDDED_MODEL, merges=NO_MERGE)
    command = [LLAMA_SERVER, "--model", str(model), "--alias", NAME, "--host", "127.0.0.1", "--port", str(port)]
    with other_server([*command, *FLAGS, *FLOAT32_KV], port, folder / "log", START_S, {}) as address:
        yield address


async def test_llama_cpp_answers_as_our_own_engine(url: str) -> None:
    prompt = chat_ids(PromptEncoder(EMBEDDED_MODEL), MESSAGES)
    samplings = [SamplingParams(30), SamplingParams(5), SamplingParams(30, stop=("ze",))]
    async with backend(url, model=NAME, max_model_len=MAX_LEN, max_num_seqs=SLOTS) as replica:
        await until(lambda: replica.listener.ready is not None)
        for index, expected in enumerate(own_answers(prompt, samplings)):
            assert await answer(replica, f"i-{index}", prompt, samplings[index]) == expected
        sampled = SamplingParams(20, temperature=1.5, seed=3, top_k=9, min_p=0.01, ignore_eos=True)
        twice = [await answer(replica, f"s-{index}", prompt, sampled) for index in range(2)]
        assert twice[0] == twice[1] and twice[0][1:] == (20, "length"), "the seed is passed on"


async def test_llama_cpp_stops_when_the_client_leaves(url: str) -> None:
    async with backend(url, model=NAME, max_model_len=MAX_LEN) as replica:
        await until(lambda: replica.listener.ready is not None)
        endless = Request("i-0", 0, "i", (5, 6), SamplingParams(1000, ignore_eos=True))
        await replica.submit(endless)
        await until(lambda: any(each.text for each in replica.deltas))
        await replica.abort(("i-0", 0))
        assert replica.component.queue == 0
        await until(lambda: not any(slot["is_processing"] for slot in slots(url)))


async def test_llama_cpp_takes_a_chat_as_text_too(url: str) -> None:
    async with backend(url, model=NAME, prompt="text", max_model_len=MAX_LEN) as replica:
        await until(lambda: replica.listener.ready is not None)
        assert await answer_to_chat(replica) == ANSWER


def test_one_command_stands_before_llama_cpp(url: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    running = start_server(log, url, "--tokenizer", str(EMBEDDED_MODEL), command="front")
    try:
        body = {"model": NAME, "messages": MESSAGES, "max_tokens": 30, "temperature": 0}
        request = urllib.request.Request(
            f"{running.base_url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=START_S) as reply:
            assert json.load(reply)["choices"][0]["message"]["content"] == ANSWER
        told = (
            f"{url} is llama.cpp and serves {NAME}: prompts as tokens, max_model_len {MAX_LEN}, max_num_seqs {SLOTS}."
        )
        assert told in log.read_text("utf-8")
    finally:
        running.stop()


def slots(url: str) -> list[dict[str, object]]:
    """What each slot of the server does."""
    with urllib.request.urlopen(f"{url}/slots", timeout=START_S) as reply:
        found: list[dict[str, object]] = json.load(reply)
    return found

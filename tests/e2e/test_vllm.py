"""A replica that is a real vLLM. Runs where FARSIGHT_VLLM names its executable; on CPU a start may take minutes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from farsight.core.request import Request, SamplingParams
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.launch.launch import EMBEDDED_MODEL
from tests.e2e.other_servers import ANSWER, MESSAGES, answer, answer_to_chat, other_server, own_answers
from tests.free_ports import free_port
from tests.unit.actors.components import until
from tests.unit.actors.external.test_backend import backend
from tests.unit.services.api.api_support import chat_ids

VLLM = os.environ.get("FARSIGHT_VLLM", "")
NAME = "served-by-vllm"
START_S = 900.0
FLAGS = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16", "--enable-prompt-tokens-details")

pytestmark = [
    pytest.mark.skipif(not VLLM, reason="FARSIGHT_VLLM does not name the executable of vLLM"),
    pytest.mark.timeout(START_S + 120),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a vLLM with the embedded model."""
    port, log = free_port(), tmp_path_factory.mktemp("vllm") / "log"
    command = [VLLM, "serve", str(EMBEDDED_MODEL), "--served-model-name", NAME, "--port", str(port), *FLAGS]
    quiet = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with other_server(command, port, log, START_S, quiet) as address:
        yield address


async def test_vllm_answers_as_our_own_engine(url: str) -> None:
    prompt = chat_ids(PromptEncoder(EMBEDDED_MODEL), MESSAGES)
    samplings = [
        SamplingParams(30),
        SamplingParams(5),
        SamplingParams(30, stop=("ze",)),
        SamplingParams(30, min_tokens=3),
    ]
    own = own_answers(prompt, samplings)
    async with backend(url, model=NAME) as replica:
        await until(lambda: replica.listener.ready is not None)
        assert replica.listener.ready is not None and replica.listener.ready.max_model_len == 1024
        for index, (sampling, expected) in enumerate(zip(samplings, own, strict=True)):
            assert await answer(replica, f"i-{index}", prompt, sampling) == expected
        sampled = SamplingParams(
            20, temperature=1.5, seed=3, top_k=9, min_p=0.01, repetition_penalty=1.1, ignore_eos=True
        )
        twice = [await answer(replica, f"s-{index}", prompt, sampled) for index in range(2)]
        assert twice[0] == twice[1] and twice[0][1:] == (20, "length"), "the seed is passed on"


async def test_vllm_stops_when_the_client_leaves_and_says_what_it_does_not_take(url: str) -> None:
    async with backend(url, model=NAME) as replica:
        await until(lambda: replica.listener.ready is not None)
        endless = Request("i-0", 0, "i", (5, 6), SamplingParams(1000, ignore_eos=True))
        await replica.submit(endless)
        await until(lambda: any(each.text for each in replica.deltas))
        await replica.abort(("i-0", 0))
        assert replica.component.queue == 0
        unfit = Request("i-1", 0, "i", (10**6,), SamplingParams(5))
        await replica.submit(unfit)
        assert "vocabulary" in str((await replica.end_of(unfit))[-1].error)
        assert (replica.component.breaker, replica.failures("request")) == ("closed", 1)


async def test_vllm_takes_a_chat_as_text_too(url: str) -> None:
    async with backend(url, model=NAME, prompt="text") as replica:
        await until(lambda: replica.listener.ready is not None)
        assert await answer_to_chat(replica) == ANSWER


async def test_another_name_is_not_what_vllm_serves(url: str) -> None:
    async with backend(url, model="other") as replica:
        await until(lambda: f"the server serves '{NAME}', expected 'other'" in replica.component.breaker)
        assert replica.listener.ready is None

"""Beam search: what it finds, on a real engine, is what a search over the model itself finds."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from core.request import SamplingParams
from services.api.answers.beam_search import PromptSearch
from services.api.beams.fields import BeamParams
from services.api.generate import ChoiceResult
from services.api.requests import unnamed_request
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import ScriptedBackend, application
from tests.unit.services.api.engine_backend import EngineBackend, write_checkpoint

END = 1
PROMPT = [40, 41, 42]
BODY: dict[str, Any] = {"prompt": PROMPT, "use_beam_search": True, "return_token_ids": True, "logprobs": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
async def served(checkpoint: Path) -> AsyncGenerator[httpx.AsyncClient, None]:
    backend = EngineBackend(checkpoint)
    backend.model = dataclasses.replace(backend.model, end_ids=(END,))
    transport = httpx.ASGITransport(application(backend, PromptEncoder(checkpoint)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


@torch.no_grad()
def reference(checkpoint: Path, num_beams: int, num_tokens: int, penalty: float) -> list[tuple[list[int], float]]:
    """The plain algorithm on the model itself: all continuations of each beam, no early end."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []

    def score(beam: tuple[list[int], float]) -> float:
        return beam[1] / (len(PROMPT) + len(beam[0])) ** penalty

    for _ in range(num_tokens):
        logits = model(torch.tensor([PROMPT + ids for ids, _ in live])).logits[:, -1].log_softmax(-1)
        grown = [
            ([*ids, token], total + float(row[token]), token)
            for (ids, total), row in zip(live, logits, strict=True)
            for token in range(row.shape[0])
        ]
        ended += [(ids[:-1], total) for ids, total, token in grown if token == END]
        live = sorted(((ids, total) for ids, total, token in grown if token != END), key=score, reverse=True)
        live = live[:num_beams]
    return sorted(ended + live, key=score, reverse=True)[:num_beams]


@pytest.mark.parametrize(("num_beams", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.0), (3, 2.5)])
async def test_the_likeliest_outputs_are_found(
    served: httpx.AsyncClient, checkpoint: Path, num_beams: int, penalty: float
) -> None:
    body = {**BODY, "n": num_beams, "max_tokens": 5, "length_penalty": penalty}
    reply = (await served.post("/v1/completions", json=body)).json()
    expected = reference(checkpoint, num_beams, 5, penalty)
    assert [choice["token_ids"] for choice in reply["choices"]] == [ids for ids, _ in expected]
    for choice, (ids, total) in zip(reply["choices"], expected, strict=True):
        assert choice["finish_reason"] == ("length" if len(ids) == 5 else "stop")
        if len(ids) == 5:
            assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(total, abs=1e-4)
    ended = sum(choice["finish_reason"] == "stop" for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in expected) + ended


async def test_the_search_does_not_depend_on_how_tokens_are_drawn(served: httpx.AsyncClient) -> None:
    body = {**BODY, "n": 2, "max_tokens": 4, "ignore_eos": True}
    found = [
        (await served.post("/v1/completions", json={**body, "seed": seed, "temperature": seed / 4})).json()
        for seed in (0, 3)
    ]
    assert found[0]["choices"] == found[1]["choices"]
    assert all(choice["finish_reason"] == "length" for choice in found[0]["choices"])


async def test_chats_and_several_prompts(served: httpx.AsyncClient) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 3, "use_beam_search": True}
    reply = (await served.post("/v1/chat/completions", json=chat)).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    both = {**BODY, "prompt": [PROMPT, [50, 51]], "n": 2, "max_tokens": 3}
    reply = (await served.post("/v1/completions", json=both)).json()
    alone = (await served.post("/v1/completions", json={**both, "prompt": [50, 51]})).json()
    assert [each["token_ids"] for each in reply["choices"][2:]] == [each["token_ids"] for each in alone["choices"]]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_search_ends_early_only_where_nothing_can_change(penalty: float) -> None:
    """Against one that runs to its limit, over all ways in which a few made-up tokens can fall."""
    prompt = unnamed_request((7, 8), SamplingParams(4))
    for values in itertools.product((-0.1, -1.0, -4.0), repeat=3):
        found = []
        for stops_early in (True, False):
            search = PromptSearch(prompt, BeamParams(2, penalty), (END,))
            while search.requests() if stops_early else len(search._live[0].token_ids) < 4:
                step = ChoiceResult(logprobs=[((9, END, 9, 10), (0.0, *values))])
                search.advance([step] * len(search._live))
            found.append([(beam.token_ids, round(beam.total, 9)) for beam in search.best()])
        assert found[0] == found[1], (values, penalty)


async def test_a_backend_without_log_probabilities(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/completions", json={"prompt": "hi", "n": 2, "use_beam_search": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "use_beam_search")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"n": 17}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"stop": "x"}, "stop"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
async def test_what_a_search_does_not_serve_is_refused(
    client: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "hi", "n": 2, "use_beam_search": True, **fields}
    reply = await client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), reply.text
    assert not backend.calls

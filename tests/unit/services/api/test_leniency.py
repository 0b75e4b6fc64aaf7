"""What clients send beside OpenAI's fields: accepted where it changes nothing, done where vLLM does it."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, application, read_events
from tests.unit.services.api.engine_backend import EngineBackend, write_checkpoint

PATHS = ["/v1/completions", "/v1/chat/completions"]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 6, "seed": 1}
COMPLETION: dict[str, Any] = {"prompt": "the cat", "max_tokens": 6, "seed": 1}


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return {**(CHAT if "chat" in path else COMPLETION), **fields}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
async def served(checkpoint: Path) -> AsyncGenerator[httpx.AsyncClient, None]:
    """A client of a real engine."""
    transport = httpx.ASGITransport(application(EngineBackend(checkpoint), PromptEncoder(checkpoint)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


HARMLESS: dict[str, Any] = {
    "metadata": {"a": "b"},
    "safety_identifier": "x",
    "verbosity": "low",
    "service_tier": "auto",
    "store": False,
    "seed": -1,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "include_stop_str_in_output": False,
    "use_beam_search": False,
    "length_penalty": 1.0,
    "kv_transfer_params": None,
    "stream_options": None,
    "anything": None,
    "at_all": False,
    "that_is": [],
    "empty": {},
    "or_so": "",
}


@pytest.mark.parametrize("path", PATHS)
async def test_what_changes_nothing_is_accepted(client: httpx.AsyncClient, backend: ScriptedBackend, path: str) -> None:
    plain = await client.post(path, json=body_for(path))
    same = await client.post(path, json=body_for(path, **HARMLESS))
    assert plain.status_code == same.status_code == 200, same.text
    assert same.json()["model"] == MODEL, "a request without a model gets the one that is served"
    assert plain.json().keys() == same.json().keys()
    assert backend.calls[0][0] == backend.calls[1][0]


async def test_the_newer_limit_goes_first(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    await client.post(PATHS[1], json=body_for(PATHS[1], max_tokens=9, max_completion_tokens=4))
    assert backend.calls[0][1].max_new_tokens == 4


@pytest.mark.parametrize(("most", "kept"), [(2, [8, 9]), (5, [7, 8, 9]), (-1, [7, 8, 9])])
async def test_prompts_are_truncated(
    client: httpx.AsyncClient, backend: ScriptedBackend, most: int, kept: list[int]
) -> None:
    await client.post(PATHS[0], json={"prompt": [7, 8, 9], "truncate_prompt_tokens": most})
    assert list(backend.calls[0][0]) == kept


async def test_prompts_are_truncated_at_their_end(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    fields = {"prompt": [7, 8, 9], "truncate_prompt_tokens": 2, "truncation_side": "right"}
    await client.post(PATHS[0], json=fields)
    assert list(backend.calls[0][0]) == [7, 8]
    refused = await client.post(PATHS[0], json={**fields, "truncation_side": "middle"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "truncation_side")


async def test_a_prompt_beyond_the_context_is_cut_to_it(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    for path in PATHS:
        body = body_for(path, truncate_prompt_tokens=-1, max_tokens=10)
        long = {"prompt": "hello " * 100} if "chat" not in path else {}
        messages = {"messages": [{"role": "user", "content": "hello " * 100}]} if "chat" in path else {}
        response = await client.post(path, json={**body, **long, **messages})
        assert response.status_code == 200, response.text
    assert [len(ids) for ids, _ in backend.calls] == [54, 54]


async def test_where_a_chat_ends(client: httpx.AsyncClient, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it is"}]
    for fields in ({}, {"add_generation_prompt": False}, {"continue_final_message": True}):
        assert (await client.post(PATHS[1], json={"messages": messages, **fields})).status_code == 200
    new_turn, after, inside = (encoder.echo(ids).text for ids, _ in backend.calls)
    assert new_turn.endswith("<|im_end|>\n<|im_start|>assistant\n")
    assert after.endswith("it is<|im_end|>\n")
    assert inside.endswith("it is")
    assert new_turn.startswith(after) and after.startswith(inside)


async def test_a_message_to_go_on_with_has_text(client: httpx.AsyncClient) -> None:
    empty = [{"role": "assistant", "content": ""}]
    response = await client.post(PATHS[1], json={"messages": empty, "continue_final_message": True})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "continue_final_message")


@pytest.mark.parametrize("path", PATHS)
async def test_only_allowed_tokens_come(served: httpx.AsyncClient, path: str) -> None:
    fields = {"allowed_token_ids": [40, 41], "return_token_ids": True, "ignore_eos": True}
    reply = (await served.post(path, json=body_for(path, **fields))).json()
    assert set(reply["choices"][0]["token_ids"]) <= {40, 41}
    prompt_ids = reply["prompt_token_ids"] if "chat" in path else reply["choices"][0]["prompt_token_ids"]
    assert len(prompt_ids) == reply["usage"]["prompt_tokens"]


async def test_bad_words_do_not_come(served: httpx.AsyncClient) -> None:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 8, "logit_bias": {"40": 50, "41": 49}}
    first = (await served.post(PATHS[0], json=body_for(PATHS[0], **fields))).json()["choices"][0]["text"]
    for word in (first[0], first[:2]):
        reply = await served.post(PATHS[0], json=body_for(PATHS[0], **fields, bad_words=[word]))
        text = reply.json()["choices"][0]["text"]
        assert word in first and text and word not in text


@pytest.mark.parametrize("path", PATHS)
async def test_log_probabilities_of_prompts(served: httpx.AsyncClient, path: str) -> None:
    reply = (await served.post(path, json=body_for(path, prompt_logprobs=2, return_token_ids=True))).json()
    holder = reply if "chat" in path else reply["choices"][0]
    found, ids = holder["prompt_logprobs"], holder["prompt_token_ids"]
    assert found[0] is None and len(found) == len(ids)
    for token_id, entry in zip(ids[1:], found[1:], strict=True):
        assert str(token_id) in entry and 2 <= len(entry) <= 3
        ranks = [each["rank"] for each in entry.values() if each["rank"] is not None]
        assert sorted(ranks) == [1, 2]
    assert reply["choices"][0]["logprobs"] is None


async def test_fewer_log_probabilities_of_the_output_than_of_the_prompt(served: httpx.AsyncClient) -> None:
    fields = {"prompt_logprobs": 3, "logprobs": 1, "temperature": 0, "return_tokens_as_token_ids": True}
    logprobs = (await served.post(PATHS[0], json=body_for(PATHS[0], **fields))).json()["choices"][0]["logprobs"]
    assert all(len(top) == 1 for top in logprobs["top_logprobs"])
    assert all(token.startswith("token_id:") for token in logprobs["tokens"])


@pytest.mark.parametrize("path", PATHS)
async def test_every_chunk_says_the_usage(served: httpx.AsyncClient, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False}
    fields = {"stream": True, "stream_options": options, "return_token_ids": True, "ignore_eos": True}
    reply = await served.post(path, json=body_for(path, **fields))
    events = [each for each in read_events(reply.text) if each != "[DONE]"]
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6 == counts[-2]
    ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
    assert len(ids) == 6
    assert sum("prompt_token_ids" in choice for event in events for choice in event["choices"]) == 1
    whole = (await served.post(path, json=body_for(path, return_token_ids=True, ignore_eos=True))).json()
    assert whole["choices"][0]["token_ids"] == ids


async def test_a_cache_hint_in_a_message_changes_nothing(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    for content in ("hi", [part]):
        response = await client.post(
            PATHS[1],
            content=json.dumps({"messages": [{"role": "user", "content": content}]}),
            headers={"content-type": "application/json"},
        )
        assert response.status_code == 200, response.text
    assert backend.calls[0][0] == backend.calls[1][0]

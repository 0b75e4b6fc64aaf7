"""Tokens, versions, load, the home page, and manners of HTTP."""

from __future__ import annotations

import importlib.metadata

import httpx
import pytest

from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import MAX_MODEL_LEN, MODEL, ScriptedBackend

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "it is"}]


async def test_a_prompt_becomes_the_tokens_that_run(
    client: httpx.AsyncClient, backend: ScriptedBackend, encoder: PromptEncoder
) -> None:
    await client.post("/v1/completions", json={"prompt": "the cat"})
    reply = (
        await client.post("/tokenize", json={"model": MODEL, "prompt": "the cat", "return_token_strs": True})
    ).json()
    assert reply["tokens"] == list(backend.calls[0][0])
    assert (reply["count"], reply["max_model_len"]) == (len(reply["tokens"]), MAX_MODEL_LEN)
    assert "".join(reply["token_strs"]) == "<s>the cat"
    bare = (await client.post("/tokenize", json={"prompt": "the cat", "add_special_tokens": False})).json()
    assert bare["tokens"] == reply["tokens"][1:]
    text = (await client.post("/detokenize", json={"tokens": reply["tokens"]})).json()
    assert text == {"prompt": "<s>the cat"}


@pytest.mark.parametrize("fields", [{}, {"add_generation_prompt": False}, {"continue_final_message": True}])
async def test_messages_become_the_tokens_that_run(
    client: httpx.AsyncClient, backend: ScriptedBackend, fields: dict[str, bool]
) -> None:
    await client.post("/v1/chat/completions", json={"messages": MESSAGES, **fields})
    reply = (await client.post("/tokenize", json={"messages": MESSAGES, **fields})).json()
    assert reply["tokens"] == list(backend.calls[0][0])


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": 5}, 400, "prompt"),
        ("/tokenize", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/tokenize", {"prompt": "a" * 70_000}, 413, None),
        ("/detokenize", {"tokens": [300]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {}, 400, "tokens"),
    ],
)
async def test_wrong_bodies(
    client: httpx.AsyncClient, path: str, body: dict[str, object], status: int, param: str | None
) -> None:
    response = await client.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param), response.text


async def test_version_and_load(client: httpx.AsyncClient) -> None:
    assert (await client.get("/version")).json() == {"version": importlib.metadata.version("farsight")}
    assert (await client.get("/load")).json() == {"server_load": 0}


async def test_ping_is_health(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    for healthy, status in ((True, 200), (False, 503)):
        backend.is_healthy = healthy
        found = {(await client.request(method, "/ping")).status_code for method in ("GET", "POST", "HEAD")}
        assert found == {status, (await client.get("/health")).status_code}


async def test_the_home_page_links_what_there_is(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.status_code == 200 and "script-src 'none'" in page.headers["content-security-policy"]
    assert 'href="dashboard"' in page.text and 'href="play"' in page.text and 'href="docs"' in page.text
    assert "http://" not in page.text and "https://" not in page.text


async def test_slashes_head_and_options(client: httpx.AsyncClient) -> None:
    plain = await client.get("/v1/models")
    assert (await client.get("/v1/models/")).json() == plain.json()
    assert (await client.post("/v1/completions/", json={"prompt": "a"})).status_code == 200
    head = await client.head("/v1/models")
    assert (head.status_code, head.content) == (200, b"")
    options = await client.options("/v1/chat/completions")
    assert (options.status_code, options.headers["allow"]) == (204, "OPTIONS, POST")
    assert (await client.options("/v1/models")).headers["allow"] == "GET, HEAD, OPTIONS"
    assert (await client.options("/nothing")).status_code == 404
    assert (await client.head("/v1/completions")).status_code == 405

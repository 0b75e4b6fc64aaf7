"""The access log: one line a request, with the id of its answer, and without the words of clients or models."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from actors.runtime.log_lines import log_fields
from services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import HELLO, MODEL, ScriptedBackend, delta, whole_app

SECRET = "a prompt that no log may hold"
ANSWER = "an answer that no log may hold"


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    """Access lines as the log has them."""
    found = [log_fields(record, "ingress-1") for record in caplog.records]
    return [each for each in found if each["logger"].endswith("access_log")]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_line_has_the_id_of_the_answer(
    encoder: PromptEncoder, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    transport = httpx.ASGITransport(whole_app(ScriptedBackend(HELLO), encoder, access_log=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        body = {"model": MODEL, "prompt": "One", "max_tokens": 4, "stream": stream}
        reply = await http.post("/v1/completions", json=body)
    answer = reply.text.removeprefix("data: ").splitlines()[0] if stream else reply.text
    [line] = lines_of(caplog)
    assert line["request_id"] == json.loads(answer)["id"]
    assert (line["method"], line["path"], line["status"]) == ("POST", "/v1/completions", 200)
    assert line["took_s"] >= 0


async def test_neither_prompts_nor_answers_nor_keys_get_into_any_log(
    encoder: PromptEncoder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    steps = (delta(ANSWER), RuntimeError(ANSWER))
    transport = httpx.ASGITransport(
        whole_app(ScriptedBackend(steps), encoder, access_log=True), raise_app_exceptions=False
    )
    messages = [{"role": "user", "content": SECRET}]
    bodies = (
        {"model": MODEL, "messages": messages, "stream": True},
        {"model": MODEL, "messages": messages},
        {"model": MODEL, "messages": messages, "max_tokens": SECRET},
        {"model": SECRET, "messages": messages},
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        for body in bodies:
            await http.post(f"/v1/chat/completions?key={SECRET}", json=body, headers={"Authorization": "Bearer sk-1"})
        await http.post("/v1/chat/completions", content=f'{{"messages": "{SECRET}'.encode())
    assert len(lines_of(caplog)) == 5
    logged = "".join(json.dumps(log_fields(each, "ingress-1")) for each in caplog.records if each.name != "httpx")
    for words in (SECRET, ANSWER, "sk-1"):
        assert words not in logged

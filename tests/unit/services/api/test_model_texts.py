"""What a configuration changes about the texts and names of the served model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import httpx
import pytest

from core.config.model import TOOL_FORMATS, ModelConfig
from core.errors import ConfigError
from services.api.text.prompts import ChatPrompt, PromptEncoder
from services.api.text.settings import TextSettings, text_settings
from tests.unit.services.api.api_support import ScriptedBackend, application, write_model_dir
from tests.unit.services.api.conftest import Connect
from tokenization.tool_formats.formats import FORMATS

ASK = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_model_has_several_names(connect: Connect) -> None:
    backend = ScriptedBackend()
    backend.model = dataclasses.replace(backend.model, aliases=ModelConfig(also_named="gpt-4o, b").aliases)
    client = connect(backend)
    assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["tiny", "gpt-4o", "b"]
    assert (await client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
    answer = await client.post("/v1/chat/completions", json={**ASK, "model": "b"})
    assert answer.status_code == 200 and answer.json()["model"] == "b"
    refused = await client.post("/v1/chat/completions", json={**ASK, "model": "c"})
    assert refused.status_code == 404 and "'tiny' or 'gpt-4o' or 'b'" in refused.json()["error"]["message"]


def test_a_file_may_hold_the_chat_template(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "model")
    file = tmp_path / "chat.jinja"
    file.write_text("[TOOL_CALLS] [ {{ messages[0].content }}", encoding="utf-8")
    encoder = PromptEncoder(folder, TextSettings(str(file)))
    assert encoder.render_chat(ChatPrompt(ASK["messages"])) == "[TOOL_CALLS] [ hi"
    assert encoder.dialect.format.name == "mistral"
    assert PromptEncoder(folder, TextSettings(str(file), "llama3")).dialect.format.name == "llama3"
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        PromptEncoder(folder, text_settings(ModelConfig(chat_template=str(tmp_path / "none"))))


KNOWS = (
    "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }} {{ tools[0].function.name }}{# </think> #}"
)
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_a_template_is_told_what_the_request_says(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path, KNOWS))
    backend = ScriptedBackend()
    transport = httpx.ASGITransport(application(backend, encoder))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        body = {**ASK, "tools": [TOOL], "reasoning_effort": "none", "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        values = {"enable_thinking": "<|im_end|>", "reasoning_effort": "low"}
        told = {**ASK, "tools": [TOOL], "chat_template_kwargs": values, "max_tokens": 1}
        assert (await client.post("/v1/chat/completions", json=told)).status_code == 200
        first, second = (encoder.texts.decoder.decode(ids) for ids, _ in backend.calls)
        assert (first, second) == ("hi False none f", "hi <|im_end|> low f")
        assert encoder.texts.decoder.special_ids.isdisjoint(backend.calls[1][0]), "a client's value is plain text"


@pytest.mark.parametrize(
    "values", [{"messages": []}, {"tools": []}, {"bos_token": "x"}, {"a b": 1}, {"a": "x" * 5000}, ["a"], "a"]
)
async def test_what_a_template_is_not_told_by_requests(connect: Connect, values: Any) -> None:
    answer = await connect(ScriptedBackend()).post("/v1/chat/completions", json={**ASK, "chat_template_kwargs": values})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_the_forms_of_tool_calls_can_be_configured() -> None:
    assert set(TOOL_FORMATS) == {"auto", *FORMATS}
    with pytest.raises(ConfigError, match=r"model\.tool_format"):
        ModelConfig(tool_format="xml")

"""What a configuration changes about the texts and names of the served model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from core.config.model import TOOL_FORMATS, ModelConfig
from core.errors import ConfigError
from services.api.text.prompts import ChatPrompt, PromptEncoder
from services.api.text.settings import TextSettings, text_settings
from tests.unit.services.api.api_support import ScriptedBackend, write_model_dir
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


def test_the_forms_of_tool_calls_can_be_configured() -> None:
    assert set(TOOL_FORMATS) == {"auto", *FORMATS}
    with pytest.raises(ConfigError, match=r"model\.tool_format"):
        ModelConfig(tool_format="xml")

"""Prompts: chats and texts as ``transformers`` encodes them, what a configuration changes, and the parts of each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from farsight.core.config.engine import TOOL_FORMATS, ModelConfig
from farsight.core.errors import ConfigError
from farsight.core.forecast import CallForm
from farsight.core.request import PromptSource
from farsight.services.api.generation import PromptText
from farsight.services.api.text.prompts import (
    ChatPrompt,
    PromptEncoder,
    of_chat,
    of_completion,
)
from farsight.tokenization.tool_formats.formats import FORMATS
from tests.unit.services.api.api_support import (
    CHATML,
    Client,
    ScriptedBackend,
    application,
    chat_ids,
    client_on,
    ok,
    refusal,
    write_model_dir,
)

LLAMA_2 = """
{%- if messages[0]['role'] == 'system' -%}
    {%- set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' -%}
    {%- set rest = messages[1:] -%}
{%- else -%}
    {%- set system = '' -%}
    {%- set rest = messages -%}
{%- endif -%}
{%- for message in rest -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant') }}
    {%- endif -%}
    {%- if message['role'] == 'user' -%}
        {{ bos_token + '[INST] ' + (system if loop.first else '') + message['content'].strip() + ' [/INST]' }}
    {%- else -%}
        {{ ' ' + message['content'].strip() + ' ' + eos_token }}
    {%- endif -%}
{%- endfor -%}
"""
LLAMA_3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nToday: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if tools is not none %}
    {{- tools | tojson(indent=4) }}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""
BLOCKS = """{% set state = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}
        {% continue %}
    {% endif %}
    {% generation %}
    {% set state.count = state.count + 1 %}
    {{ message | tojson }} {{ message.content | tojson(ensure_ascii=true, sort_keys=true) }}
    {% endgeneration %}
    {% if state.count > 2 %}{% break %}{% endif %}
{% endfor %}
{{ pad_token is defined }} {{ eos_token }} {{ dict(a=1) }}
"""
SYSTEM = {"role": "system", "content": "be  brief"}
USER = {"role": "user", "content": " the cat <b>&'\"\n 你好 "}
ASSISTANT = {"role": "assistant", "content": "the dog\n"}


@pytest.mark.parametrize("template", [CHATML, LLAMA_2, LLAMA_3, BLOCKS])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ASSISTANT, USER], [SYSTEM, USER, ASSISTANT, USER]])
def test_same_as_transformers(tmp_path: Path, template: str, messages: list[dict[str, str]]) -> None:
    folder = write_model_dir(tmp_path, template)
    reference = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), bos_token="<s>", eos_token="</s>", chat_template=template
    )
    encoder = PromptEncoder(folder)
    arguments: dict[str, Any] = {"add_generation_prompt": True, "return_dict": False}
    assert encoder.render_chat(ChatPrompt(messages)) == reference.apply_chat_template(
        messages, tokenize=False, **arguments
    )
    assert list(chat_ids(encoder, messages)) == reference.apply_chat_template(messages, tokenize=True, **arguments)
    for message in messages:
        assert list(encoder.encode_prompt(message["content"]).ids) == reference.encode(message["content"])


def test_text_gets_the_tokenizers_special_tokens_and_chat_only_the_templates(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path, "{{ bos_token }}{{ messages[0].content }}"))
    assert encoder.encode_prompt("hello").ids[0] == 0
    assert chat_ids(encoder, [{"role": "user", "content": "hello"}]) == encoder.encode_prompt("hello").ids


def test_which_of_several_templates_counts(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path, None)
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    for template, expected in (("from config", "from config"), (named, "plain")):
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
        assert PromptEncoder(folder).render_chat(ChatPrompt([USER])) == expected
    (folder / "chat_template.jinja").write_text("from file", encoding="utf-8")
    assert PromptEncoder(folder).render_chat(ChatPrompt([USER])) == "from file"


def test_developer_is_kept_for_a_template_that_knows_it(tmp_path: Path) -> None:
    message = {"role": "developer", "content": "x"}
    knows = write_model_dir(tmp_path / "a", "{{ 'dev!' if messages[0].role == 'developer' }}")
    knows_not = write_model_dir(tmp_path / "b", "{{ messages[0].role }}")
    assert PromptEncoder(knows).render_chat(ChatPrompt([message])) == "dev!"
    assert PromptEncoder(knows_not).render_chat(ChatPrompt([message])) == "system"


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    path = write_model_dir(tmp_path) / "tokenizer.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(settings), encoding="utf-8")
    assert len(PromptEncoder(tmp_path).encode_prompt("hello cat hello dog").ids) > 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "readable tokenizer.json"),
        ("tokenizer.json", None, r"tokenizer\.json"),
        ("tokenizer_config.json", "{", "a JSON file"),
        ("chat_template.jinja", "{% if %}", "valid Jinja"),
    ],
)
def test_broken_model_directory(tmp_path: Path, name: str, content: str | None, words: str) -> None:
    write_model_dir(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        PromptEncoder(tmp_path)


ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def test_a_model_has_several_names(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    backend.model = dataclasses.replace(backend.model, aliases=ModelConfig(also_named="gpt-4o, b").aliases)
    assert [each["id"] for each in (await client.get("/v1/models")).json()["data"]] == ["tiny", "gpt-4o", "b"]
    assert (await client.get("/v1/models/gpt-4o")).json()["id"] == "gpt-4o"
    assert (await ok(client, "/v1/chat/completions", **ASK, model="b"))["model"] == "b"
    refused = await refusal(client, "/v1/chat/completions", 404, **ASK, model="c")
    assert "'tiny' or 'gpt-4o' or 'b'" in refused["message"]


def test_a_file_may_hold_the_chat_template(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "model")
    file = tmp_path / "chat.jinja"
    file.write_text("[TOOL_CALLS] [ {{ messages[0].content }}", encoding="utf-8")
    encoder = PromptEncoder(folder, ModelConfig(chat_template=str(file)))
    assert encoder.render_chat(ChatPrompt(ASK["messages"])) == "[TOOL_CALLS] [ hi"
    assert encoder.dialect.format.name == "mistral"
    assert (
        PromptEncoder(folder, ModelConfig(chat_template=str(file), tool_format="llama3")).dialect.format.name
        == "llama3"
    )
    with pytest.raises(ConfigError, match=r"model\.chat_template"):
        PromptEncoder(folder, ModelConfig(chat_template=str(tmp_path / "none")))


KNOWS = (
    "{{ messages[0].content }} {{ enable_thinking }} {{ reasoning_effort }} {{ tools[0].function.name }}{# </think> #}"
)
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_a_template_is_told_what_the_request_says(tmp_path: Path, backend: ScriptedBackend) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path, KNOWS))
    client = client_on(application(backend, encoder))
    values = {"enable_thinking": "<|im_end|>", "reasoning_effort": "low"}
    for fields in ({"reasoning_effort": "none"}, {"chat_template_kwargs": values}):
        await ok(client, "/v1/chat/completions", **ASK, tools=[TOOL], max_tokens=1, **fields)
    first, second = (encoder.texts.decoder.decode(ids) for ids, _ in backend.calls)
    assert (first, second) == ("hi False none f", "hi <|im_end|> low f")
    assert encoder.texts.decoder.special_ids.isdisjoint(backend.calls[1][0]), "a client's value is plain text"


@pytest.mark.parametrize(
    "values", [{"messages": []}, {"tools": []}, {"bos_token": "x"}, {"a b": 1}, {"a": "x" * 5000}, ["a"], "a"]
)
async def test_what_a_template_is_not_told_by_requests(client: httpx.AsyncClient, values: Any) -> None:
    error = await refusal(client, "/v1/chat/completions", **ASK, chat_template_kwargs=values)
    assert error["param"] == "chat_template_kwargs"


def test_the_forms_of_tool_calls_can_be_configured() -> None:
    assert set(TOOL_FORMATS) == {"auto", *FORMATS}
    with pytest.raises(ConfigError, match=r"model\.tool_format"):
        ModelConfig(tool_format="xml")


def parts(text: PromptText | None) -> tuple[str, str] | None:
    return None if text is None else (text.instruction, text.user_input)


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_of_a_chat_the_last_message_of_the_user_is_its_input() -> None:
    chat = [said("system", "Be short."), said("user", "Hi"), said("assistant", "Hello"), said("user", "Go")]
    assert parts(of_chat(chat)) == ("Be short.\nHi\nHello", "Go")
    assert parts(of_chat([*chat, said("assistant", "Well,")])) == ("Be short.\nHi\nHello\nWell,", "Go")
    assert parts(of_chat([said("system", "Talk.")])) == ("Talk.", "")
    assert of_chat(chat[:2]).source == PromptSource(messages=(("system", "Be short."), ("user", "Hi")))


@pytest.mark.parametrize(
    ("prompt", "instruction", "expected"),
    [
        ("Translate:\nein Haus", None, ("Translate:", "ein Haus")),
        ("ein Haus", None, ("", "ein Haus")),
        ("Translate: ein Haus", "Translate:", ("Translate:", "ein Haus")),
        ("ein Haus", "Translate", ("Translate", "ein Haus")),
    ],
)
def test_of_a_completion(prompt: str, instruction: str | None, expected: tuple[str, str]) -> None:
    text = of_completion(prompt, instruction)
    assert parts(text) == expected
    assert text.source == PromptSource(prompt)


def test_the_input_has_its_share_of_the_tokens() -> None:
    assert PromptText("abc", "def" * 3).user_input_len(40) == 30
    assert PromptText("", "").user_input_len(3) == 0


async def test_the_backend_is_told_who_calls_and_how(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    async def told(key: str = "", **fields: Any) -> CallForm:
        body = {"model": "tiny", "messages": [said("user", "Hi")], "max_tokens": 4, **fields}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        assert (await client.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
        text = backend.texts[-1]
        assert text is not None
        return text.call

    assert await told() == CallForm()
    assert await told(stream=True) == CallForm(streams=True)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert (await told(tools=[tool])).has_tools and (await told(response_format={"type": "json_object"})).has_schema
    clients = [(await told(**each)).client for each in ({"user": "ada"}, {"key": "k"}, {"key": "k", "user": "ada"})]
    assert len(set(clients)) == 3 and "" not in clients, "the key, the user, and both are clients of their own"
    assert (await told(user="ada")).client == clients[0] and "ada" not in clients[0]


async def test_the_backend_gets_the_parts_of_a_prompt(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    await ok(client, "/v1/chat/completions", messages=[said("system", "Be short."), said("user", "Go")], n=2)
    for prompt in (["Say:\nhi", "Say hello"], [1, 2]):
        await ok(client, "/v1/completions", prompt=prompt, instruction="Say")
    expected = [("Be short.", "Go")] * 2 + [("Say", ":\nhi"), ("Say", "hello"), None]
    assert [parts(text) for text in backend.texts] == expected
    assert (await refusal(client, "/v1/completions", prompt="Say", instruction=3))["param"] == "instruction"


async def test_a_role_of_ones_own_and_notes_of_a_client(client: Client, backend: ScriptedBackend) -> None:
    said = {"role": "my-role", "content": "hi", "provider_specific_fields": {"a": 1}, "timestamp": 5}
    await ok(client, "/v1/chat/completions", messages=[said])
    text = backend.texts[0]
    assert text is not None and text.source is not None and text.source.messages == (("my-role", "hi"),)


async def test_a_role_that_the_template_drops_is_refused(tmp_path: Path) -> None:
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    client = client_on(application(ScriptedBackend(), PromptEncoder(write_model_dir(tmp_path, template))))
    for content in ("gone", [{"type": "text", "text": "gone"}]):
        messages = [{"role": "user", "content": "hi"}, {"role": "wizard", "content": content}]
        error = await refusal(client, "/v1/chat/completions", messages=messages)
        assert error["param"] == "messages[1].role" and "the model's chat template shows no other" in error["message"]


async def test_the_configuration_of_the_tokenizer(encoder: PromptEncoder, checkpoint: Path) -> None:
    backend = ScriptedBackend()
    client = client_on(application(backend, encoder))
    bare = (await client.get("/tokenizer_info")).json()
    assert (bare["model_max_length"], bare["chat_template"]) == (backend.model.max_model_len, encoder.template)
    backend.model = dataclasses.replace(backend.model, root=str(checkpoint))
    told = (await client.get("/tokenizer_info")).json()
    assert told["bos_token"] == "<s>" and told["tokenizer_class"] == "PreTrainedTokenizerFast"

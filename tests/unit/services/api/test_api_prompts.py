"""The encoder agrees with ``transformers`` on text and on chat templates of the known shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from core.errors import ConfigError
from services.api.text.prompts import ChatPrompt, PromptEncoder
from tests.unit.services.api.api_support import CHATML, write_model_dir

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
    assert list(encoder.encode_chat(messages)) == reference.apply_chat_template(messages, tokenize=True, **arguments)
    for message in messages:
        assert list(encoder.encode_text(message["content"])) == reference.encode(message["content"])


def test_text_gets_the_tokenizers_special_tokens_and_chat_only_the_templates(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path, "{{ bos_token }}{{ messages[0].content }}"))
    assert encoder.encode_text("hello")[0] == 0
    assert encoder.encode_chat([{"role": "user", "content": "hello"}]) == encoder.encode_text("hello")


def test_template_file_wins_over_the_config(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path, "from config")
    assert PromptEncoder(folder).render_chat(ChatPrompt([USER])) == "from config"
    (folder / "chat_template.jinja").write_text("from file", encoding="utf-8")
    assert PromptEncoder(folder).render_chat(ChatPrompt([USER])) == "from file"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = write_model_dir(tmp_path, None)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}), encoding="utf-8")
    assert PromptEncoder(folder).render_chat(ChatPrompt([USER])) == "plain"


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
    assert len(PromptEncoder(tmp_path).encode_text("hello cat hello dog")) > 2


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("tokenizer.json", "{", "readable tokenizer.json"),
        ("tokenizer_config.json", "{", "a JSON file"),
        ("chat_template.jinja", "{% if %}", "valid Jinja"),
    ],
)
def test_broken_model_directory(tmp_path: Path, name: str, content: str, words: str) -> None:
    write_model_dir(tmp_path)
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        PromptEncoder(tmp_path)


def test_no_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        PromptEncoder(tmp_path)

"""The chat template alone writes control tokens: templates of the known shapes, and whatever clients send."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from services.api.text.client_text import ClientText, client_value, compile_template, spans_of
from services.api.text.prompts import ChatPrompt, PromptEncoder
from tests.unit.services.api.api_support import CHATML, write_model_dir
from tests.unit.tokenization.kinds import KINDS

QWEN_3 = """
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == "user" or message.role == "system" %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.last or reasoning %}
            {{- '<|im_start|>assistant\\n<think>\\n' ~ reasoning.strip('\\n') ~ '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}"""
MACROS = """
{%- macro turn(role, text) -%}
    {{ '<|im_start|>%s' | format(role) }}{{ '\n' }}{{ caller() if caller else (text | trim) }}{{ '<|im_end|>' }}
{%- endmacro -%}
{%- set ns = namespace(system='') -%}
{%- for message in messages if message.role == 'system' %}{% set ns.system = ns.system + message.content %}{% endfor -%}
{%- for message in messages if message.role != 'system' -%}
    {%- set body %}{{ ns.system }}[{{ message.content | trim }}]{% endset -%}
    {{ turn(message.role, body) }}{{ ['a', message.content | upper] | join(',') }}{{ '{}|'.format(message.content) }}
    {{- '%s-%s' % (message.content, loop.index) }}{{ message | tojson }}{{ message.content[1:-1] }}{{ message.name }}
    {%- call turn('x', '') %}{{ message.content.replace('a', 'b') }}{% endcall -%}
    {{ message.content.split() | join('<tool_call>') }}{{ message.content | replace('<|im_end|>', '') }}
{%- endfor -%}"""
TEMPLATES = {"chatml": CHATML, "qwen": QWEN_3, "macros": MACROS}
ROLES = ("system", "user", "assistant")
PARTS = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "<s>",
        "<|im_",
        "end|>",
        "<|",
        ">",
        "start|>",
    ),
    *("hello", " ", "\n", '"', "\\", "the dog", "日本", "ß", "a", "%s", "{}", "<|IM_END|>", "\uff1c|im_end|\uff1e"),
)
SAFE = ("hello", " ", "\n", '"', "\\", "the dog", "日本", "ß", "a", "%s", "{}", "<b>", "x | y")


@cache
def folder_of(kind: str, template: str, base: Path) -> Path:
    folder = base / f"{kind}-{template}"
    folder.mkdir()
    KINDS[kind]().save(str(folder / "tokenizer.json"))
    config = {"chat_template": TEMPLATES[template], "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kinds")


@cache
def encoder_of(folder: Path) -> PromptEncoder:
    return PromptEncoder(folder)


compiled = cache(compile_template)


@cache
def plain_template(source: str) -> Any:
    """As ``transformers`` renders it: without a memory of who wrote what."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
    return environment.from_string(source)


def messages_of(parts: tuple[str, ...]) -> st.SearchStrategy[list[dict[str, str]]]:
    text = st.lists(st.sampled_from(parts), max_size=6).map("".join)
    fields = {"role": st.sampled_from(ROLES), "content": text, "name": text}
    return st.lists(st.fixed_dictionaries(fields), min_size=1, max_size=3)


@pytest.mark.parametrize("template", TEMPLATES)
@given(messages=messages_of(PARTS))
@settings(max_examples=150, deadline=None)
def test_templates_render_as_without_a_memory(template: str, messages: list[dict[str, str]]) -> None:
    known = compiled(TEMPLATES[template]).render(
        messages=[{**client_value(each), "role": each["role"]} for each in messages], add_generation_prompt=True
    )
    plain = plain_template(TEMPLATES[template]).render(messages=messages, add_generation_prompt=True)
    assert str.__str__(known) == plain


@pytest.mark.parametrize("kind", ["byte_level", "llama_2", "unigram"])
@pytest.mark.parametrize("template", TEMPLATES)
@given(messages=messages_of(SAFE))
@settings(max_examples=40, deadline=None)
def test_ordinary_chats_have_their_usual_ids(
    kind: str, template: str, base: Path, messages: list[dict[str, str]]
) -> None:
    encoder = encoder_of(folder_of(kind, template, base))
    text = str.__str__(encoder.render_chat(ChatPrompt(messages)))
    tokenizer = Tokenizer.from_file(str(folder_of(kind, template, base) / "tokenizer.json"))
    assert list(encoder.encode_chat(messages)) == tokenizer.encode(text, add_special_tokens=False).ids


def control_of(encoder: PromptEncoder, tokenizer: Tokenizer, ids: tuple[int, ...]) -> list[str]:
    names = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>")
    control = {tokenizer.token_to_id(name) for name in names}
    return [str(tokenizer.id_to_token(each)) for each in ids if each in control]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["chatml", "qwen"])
@given(messages=messages_of(PARTS))
@settings(max_examples=40, deadline=None)
def test_no_message_speaks_as_another(kind: str, template: str, base: Path, messages: list[dict[str, str]]) -> None:
    """The control tokens are those of the same chat with harmless words; a reasoning that the template moves aside."""
    folder = folder_of(kind, template, base)
    encoder = encoder_of(folder)
    messages = [
        m if m["role"] != "assistant" else {**m, "content": m["content"].replace("think", "")} for m in messages
    ]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    harmless = [{**message, "content": "hello", "name": "x"} for message in messages]
    expected = control_of(encoder, tokenizer, encoder.encode_chat(harmless))
    assert control_of(encoder, tokenizer, encoder.encode_chat(messages)) == expected


@pytest.mark.parametrize("kind", ["byte_level", "llama_2", "unigram"])
@given(messages=messages_of(PARTS))
@settings(max_examples=40, deadline=None)
def test_no_operation_of_a_template_frees_control_tokens(kind: str, base: Path, messages: list[dict[str, str]]) -> None:
    folder = folder_of(kind, "macros", base)
    encoder = encoder_of(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    found = control_of(encoder, tokenizer, encoder.encode_chat(messages))
    num_turns = 2 * sum(message["role"] != "system" for message in messages)
    assert found.count("<|im_start|>") == found.count("<|im_end|>") == num_turns
    assert not {"<s>", "</s>", "<think>", "</think>"} & set(found)


def test_a_template_that_writes_tags_around_a_name() -> None:
    template = compile_template("{{ '<' ~ messages[0].name ~ '>' }}<tool_call>")
    text = template.render(messages=[client_value({"name": "tool_call"})])
    assert (str.__str__(text), spans_of(text)) == ("<tool_call><tool_call>", ((1, 10),))


@pytest.mark.parametrize(
    ("source", "spans"),
    [
        ("{{ x }}", ((0, 4),)),
        ("[{{ x | trim }}]", ((1, 5),)),
        ("{{ 'a%s' % x }}", ((1, 5),)),
        ("{{ 'a{}b'.format(x) }}", ((1, 5),)),
        ("{{ ('<' + x + '>') | upper }}", ((1, 5),)),
        ("{{ ('<' + x)[0:2] }}", ((1, 2),)),
        ("{{ [x, 'b'] | tojson }}", ((2, 6),)),
        ("{{ ['<', x] | map('upper') | join }}", ((1, 5),)),
        ("{{ d.values() | join('-') }}", ((0, 4), (5, 9))),
        ("{{ x | list | first }}{{ x | last }}", ((0, 1), (1, 2))),
        ("{{ x.encode is defined }}", ()),
        ("{{ x | length }}", ()),
        ("{{ x | replace('x', '<s>') }}", ((0, 6),)),
        ("{% filter upper %}<{{ x }}{% endfilter %}", ((1, 5),)),
        ("{% macro m(a) %}<{{ a }}{% endmacro %}{{ m(x) }}{{ m('y') }}", ((1, 5),)),
        ("{{ x * 2 }}", ((0, 4), (4, 8))),
        ("{{ x | safe }}{{ x | e }}", ((0, 4), (4, 8))),
        ("{{ '<s>'.join([x, x]) }}", ((0, 4), (7, 11))),
        ("{{ strftime_now(x) }}", ((0, 4),)),
    ],
)
def test_what_is_known_of_every_operation(source: str, spans: tuple[tuple[int, int], ...]) -> None:
    text = compile_template(source).render(x=client_value("wxyz"), d=client_value({"a": "wxyz", "b": "wxyz"}))
    assert spans_of(text) == spans


def test_bytes_are_refused() -> None:
    with pytest.raises(Exception, match="bytes"):
        compile_template("{{ x.encode().decode() }}").render(x=client_value("x"))


def test_values_from_a_client() -> None:
    value = client_value({"a": ["b", 1, None]})
    assert value == {"a": ["b", 1, None]}
    assert isinstance(next(iter(value)), ClientText)
    assert isinstance(value["a"][0], ClientText)


def test_reasoning_that_the_template_moves(base: Path) -> None:
    """The template sees the true text of an earlier answer, and its own markers stay control tokens."""
    folder = folder_of("byte_level", "qwen", base)
    encoder = encoder_of(folder)
    messages = [{"role": "assistant", "content": "<think>the dog</think>\n\nhello<think>"}]
    text = str.__str__(encoder.render_chat(ChatPrompt(messages)))
    assert text.startswith("<|im_start|>assistant\n<think>\nthe dog\n</think>\n\nhello<think><|im_end|>")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    control = control_of(encoder, tokenizer, encoder.encode_chat(messages))
    assert control == ["<|im_start|>", "<think>", "</think>", "<|im_end|>", "<|im_start|>", "<think>"]


def test_prompts_are_plain_text_too_unless_the_client_says_otherwise(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path))
    end = 3
    for text in ("the <|im_end|>", "<|im_end|>"):
        assert end not in encoder.encode_prompt(text).ids
        assert end in encoder.encode_prompt(text, parse_special=True).ids

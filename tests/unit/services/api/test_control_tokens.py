"""Chat templates and tokenizers are programs from elsewhere, and clients write what they like.

The template alone writes control tokens; what does not end is stopped, what grows is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

from farsight.core.errors import CapacityError, ConfigError, InvalidValueError
from farsight.services.api.errors import ApiError
from farsight.services.api.text import prompts
from farsight.services.api.text.client_text import client_value, compile_template, spans_of
from farsight.services.api.text.prompts import ChatPrompt, PromptEncoder
from farsight.services.api.text.template_process import RENDER_CPU_S, TemplateProcess, TemplateRefused, TemplateStopped
from tests.unit.services.api.api_support import CHATML, chat_ids, write_model_dir
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


@cache
def tokenizer_of(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


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
    folder = folder_of(kind, template, base)
    encoder = encoder_of(folder)
    text = str.__str__(encoder.render_chat(ChatPrompt(messages)))
    assert list(chat_ids(encoder, messages)) == tokenizer_of(folder).encode(text, add_special_tokens=False).ids


def control_of(folder: Path, messages: list[dict[str, str]]) -> list[str]:
    """The control tokens of a chat."""
    tokenizer = tokenizer_of(folder)
    names = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>")
    control = {tokenizer.token_to_id(name) for name in names}
    ids = chat_ids(encoder_of(folder), messages)
    return [str(tokenizer.id_to_token(each)) for each in ids if each in control]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["chatml", "qwen"])
@given(messages=messages_of(PARTS))
@settings(max_examples=40, deadline=None)
def test_no_message_speaks_as_another(kind: str, template: str, base: Path, messages: list[dict[str, str]]) -> None:
    """The control tokens are those of the same chat with harmless words; a reasoning that the template moves aside."""
    messages = [
        m if m["role"] != "assistant" else {**m, "content": m["content"].replace("think", "")} for m in messages
    ]
    harmless = [{**message, "content": "hello", "name": "x"} for message in messages]
    folder = folder_of(kind, template, base)
    assert control_of(folder, messages) == control_of(folder, harmless)


@pytest.mark.parametrize("kind", ["byte_level", "llama_2", "unigram"])
@given(messages=messages_of(PARTS))
@settings(max_examples=40, deadline=None)
def test_no_operation_of_a_template_frees_control_tokens(kind: str, base: Path, messages: list[dict[str, str]]) -> None:
    found = control_of(folder_of(kind, "macros", base), messages)
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
        ("<{{ d | list | first }}>{{ n[0][0] }}", ((1, 2), (3, 7))),
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
    values = {"x": "wxyz", "d": {"a": "wxyz", "b": "wxyz"}, "n": [["wxyz"], 1]}
    named = {name: client_value(value) for name, value in values.items()}
    assert spans_of(compile_template(source).render(named)) == spans


def test_bytes_are_refused() -> None:
    with pytest.raises(Exception, match="bytes"):
        compile_template("{{ x.encode().decode() }}").render(x=client_value("x"))


def test_reasoning_that_the_template_moves(base: Path) -> None:
    """The template sees the true text of an earlier answer, and its own markers stay control tokens."""
    folder = folder_of("byte_level", "qwen", base)
    messages = [{"role": "assistant", "content": "<think>the dog</think>\n\nhello<think>"}]
    text = str.__str__(encoder_of(folder).render_chat(ChatPrompt(messages)))
    assert text.startswith("<|im_start|>assistant\n<think>\nthe dog\n</think>\n\nhello<think><|im_end|>")
    assert control_of(folder, messages) == [
        "<|im_start|>",
        "<think>",
        "</think>",
        "<|im_end|>",
        "<|im_start|>",
        "<think>",
    ]


def test_prompts_are_plain_text_too_unless_the_client_says_otherwise(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path))
    end = 3
    for text in ("the <|im_end|>", "<|im_end|>"):
        assert end not in encoder.encode_prompt(text).ids
        assert end in encoder.encode_prompt(text, parse_special=True).ids


HELLO = {"role": "user", "content": "hello"}
BOMB = {"role": "user", "content": "bomb"}
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}"
GUARDED = "{% if messages[0].content == 'bomb' %}" + LOOPS.replace("{{ a }}", "") + "{% endif %}fine"

STOPPED = {
    "a power": "{{ (messages | length + 8) ** (9 ** 9) }}",
    "a growing number": "{% set n = namespace(x=3) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "loops that write": LOOPS,
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}
REFUSED = {
    "a long text": "{{ messages[0].content * 10 ** 10 }}",
    "a doubled text": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "padding": "{{ messages[0].content.ljust(10 ** 11) }}",
    "a filter": "{{ messages[0].content | center(10 ** 11) }}",
    "a format": "{{ '%99999999999d' % (messages | length) }}",
    "a replacement": "{{ ('a' * 10 ** 6).replace('a', 'b' * 10 ** 6) }}",
    "a long list": "{{ [messages] * 10 ** 10 }}",
    "a long range": "{{ range(10 ** 9) | list | length }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "an attribute of Python": "{{ messages.__class__.__mro__ }}",
    "a division by zero": "{{ 1 // 0 }}",
    "a long answer": "{{ 'ab' * 10 ** 8 }}",
}


def test_an_endless_template_is_stopped_and_the_next_chat_is_rendered() -> None:
    template = TemplateProcess(GUARDED, {})
    used = _children_cpu_s()
    with pytest.raises(TemplateStopped, match="processor time"):
        template.render([BOMB])
    assert _children_cpu_s() - used < 3 * RENDER_CPU_S
    assert template.render([HELLO]) == ("fine", ())


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("name", STOPPED)
def test_time_bombs_are_stopped(name: str) -> None:
    with pytest.raises(TemplateRefused):
        TemplateProcess(STOPPED[name], {}).render([HELLO])


def test_what_takes_memory_or_raises_is_refused() -> None:
    """All in one process: none of them brings it down, and each is followed by a chat that is well."""
    source = "".join(
        "{% if messages[0].content == '" + name + "' %}" + body + "{% endif %}" for name, body in REFUSED.items()
    )
    template = TemplateProcess(
        source.replace("{{ 'ab' * 10 ** 8 }}", "{{ ('ab' * (messages | length)) * 10 ** 8 }}"), {}
    )
    for name in REFUSED:
        with pytest.raises(TemplateRefused):
            template.render([{"role": "user", "content": name}])
        assert template.render([HELLO]) == ("", ())


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'a' * 10 ** 11 }}",
        "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
        "{% if %}",
        LOOPS,
    ],
    ids=["a power", "a text", "deep", "wrong", "loops"],
)
def test_a_start_refuses_what_cannot_be_compiled_or_tried(source: str, tmp_path: Path) -> None:
    """Constants are computed while a template is compiled."""
    with pytest.raises(ConfigError, match="chat template"):
        PromptEncoder(write_model_dir(tmp_path, source))


def test_a_client_gets_an_error_and_others_go_on(tmp_path: Path) -> None:
    encoder = PromptEncoder(write_model_dir(tmp_path, GUARDED))

    async def talk() -> float:
        bomb = asyncio.create_task(encoder.render_chat_soon(ChatPrompt([BOMB])))
        turns, longest, last = 0, 0.0, time.thread_time()
        while not bomb.done():
            await asyncio.sleep(0)
            now = time.thread_time()
            longest, last, turns = max(longest, now - last), now, turns + 1
        with pytest.raises(ApiError, match="processor time") as caught:
            await bomb
        assert (caught.value.status, caught.value.code, caught.value.param) == (400, "chat_template_error", "messages")
        assert str(await encoder.render_chat_soon(ChatPrompt([HELLO]))) == "fine"
        assert turns > 100
        return longest

    assert asyncio.run(talk()) < 0.5 * RENDER_CPU_S, "seconds of this thread in one turn of the event loop"


def test_few_chats_wait_for_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_WAITING_CHATS", 2)
    encoder = PromptEncoder(write_model_dir(tmp_path, "fine"))

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(encoder.render_chat_soon(ChatPrompt([HELLO])) for _ in range(4)), return_exceptions=True
        )

    found = asyncio.run(ask())
    assert [type(each) for each in found] == [str, str, CapacityError, CapacityError]
    assert asyncio.run(encoder.render_chat_soon(ChatPrompt([HELLO]))) == "fine"


def test_a_process_that_is_killed_costs_no_chat() -> None:
    before = {child.pid for child in psutil.Process().children()}  # another test's may end at any time
    template = TemplateProcess("{{ messages[0].content }}", {})
    for _ in range(2):
        (child,) = [each for each in psutil.Process().children() if each.pid not in before]
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        assert template.render([HELLO]) == ("hello", ((0, 5),))


def test_a_template_knows_no_secrets_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_API_KEY", "a secret of some length")
    before = {child.pid for child in psutil.Process().children()}
    template = TemplateProcess("{{ messages[0].content }}", {})
    (child,) = [each for each in psutil.Process().children() if each.pid not in before]
    assert "FARSIGHT_API_KEY" not in child.environ()
    del template
    child.wait(60)


def test_text_without_a_utf8_form_comes_back_as_it_was() -> None:
    template = TemplateProcess("{{ messages[0].content }}", {})
    assert template.render([{"role": "user", "content": "\ud800"}])[0] == "\ud800"


def in_turn(steps: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": steps}


@pytest.mark.parametrize(
    ("normalizer", "words"),
    [
        (in_turn([json.loads(normalizers.Replace("a", "aa").__getstate__())] * 40), "1099511627776 characters for one"),
        (in_turn([{"type": "NFC"}] * 100), "100 steps"),
        ({"type": "Prepend", "prepend": "a" * 10_000}, "long text"),
        ({"type": "Precompiled", "precompiled_charsmap": ""}, None),
    ],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(
    tmp_path: Path, normalizer: dict[str, Any], words: str | None
) -> None:
    write_model_dir(tmp_path)
    _change(tmp_path, normalizer=normalizer)
    with pytest.raises(ConfigError, match=words):
        PromptEncoder(tmp_path)


def test_a_regular_expression_that_tries_for_ever_ends_with_an_error(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    split = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
    _change(tmp_path, normalizer=None, pre_tokenizer=json.loads(split.__getstate__()))
    encoder = PromptEncoder(tmp_path)
    for text in ("a" * 40 + "!", "a" * 20_000 + "!"):
        with pytest.raises(InvalidValueError, match="tokenizer can encode"):
            encoder.encode_prompt(text)


def _change(folder: Path, **fields: Any) -> None:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))

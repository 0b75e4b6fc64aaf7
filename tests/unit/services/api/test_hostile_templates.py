"""Chat templates and tokenizers are programs from elsewhere: what does not end is stopped, what grows is refused."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from tokenizers import Regex, normalizers, pre_tokenizers

from core.errors import CapacityError, ConfigError, InvalidValueError
from services.api.errors import ApiError
from services.api.text import prompts
from services.api.text.prompts import ChatPrompt, PromptEncoder
from services.api.text.template_process import RENDER_CPU_S, TemplateProcess, TemplateRefused, TemplateStopped
from tests.unit.services.api.api_support import write_model_dir

USER = {"role": "user", "content": "hello"}
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
    assert template.render([USER]) == ("fine", ())


def _children_cpu_s() -> float:
    times = os.times()
    return times.children_user + times.children_system


@pytest.mark.parametrize("name", STOPPED)
def test_time_bombs_are_stopped(name: str) -> None:
    with pytest.raises(TemplateRefused):
        TemplateProcess(STOPPED[name], {}).render([USER])


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
        assert template.render([USER]) == ("", ())


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
        assert str(await encoder.render_chat_soon(ChatPrompt([USER]))) == "fine"
        assert turns > 100
        return longest

    assert asyncio.run(talk()) < 0.5 * RENDER_CPU_S, "seconds of this thread in one turn of the event loop"


def test_few_chats_wait_for_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "MAX_WAITING_CHATS", 2)
    encoder = PromptEncoder(write_model_dir(tmp_path, "fine"))

    async def ask() -> list[Any]:
        return await asyncio.gather(
            *(encoder.render_chat_soon(ChatPrompt([USER])) for _ in range(4)), return_exceptions=True
        )

    found = asyncio.run(ask())
    assert [type(each) for each in found] == [str, str, CapacityError, CapacityError]
    assert asyncio.run(encoder.render_chat_soon(ChatPrompt([USER]))) == "fine"


def test_a_process_that_is_killed_costs_no_chat() -> None:
    before = {child.pid for child in psutil.Process().children()}  # another test's may end at any time
    template = TemplateProcess("{{ messages[0].content }}", {})
    for _ in range(2):
        (child,) = [each for each in psutil.Process().children() if each.pid not in before]
        child.send_signal(signal.SIGKILL)
        child.wait(60)
        assert template.render([USER]) == ("hello", ((0, 5),))


def test_a_template_knows_no_secrets_and_ends_with_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARSIGHT_API_KEY", "a secret of some length")
    before = {child.pid for child in psutil.Process().children()}
    template = TemplateProcess("{{ messages[0].content }}", {})
    (child,) = [each for each in psutil.Process().children() if each.pid not in before]
    assert "FARSIGHT_API_KEY" not in child.environ()
    del template
    child.wait(60)


def test_text_without_a_utf8_form_comes_back_as_it_was() -> None:
    assert (
        TemplateProcess("{{ messages[0].content }}", {}).render([{"role": "user", "content": "\ud800"}])[0] == "\ud800"
    )


def test_a_tokenizer_that_multiplies_texts_is_refused(tmp_path: Path) -> None:
    write_model_dir(tmp_path)
    steps = {"type": "Sequence", "normalizers": [json.loads(normalizers.Replace("a", "aa").__getstate__())] * 40}
    _change(tmp_path, normalizer=steps)
    with pytest.raises(ConfigError, match="1099511627776 characters for one"):
        PromptEncoder(tmp_path)
    _change(tmp_path, normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100})
    with pytest.raises(ConfigError, match="100 steps"):
        PromptEncoder(tmp_path)
    _change(tmp_path, normalizer={"type": "Prepend", "prepend": "a" * 10_000})
    with pytest.raises(ConfigError, match="long text"):
        PromptEncoder(tmp_path)
    _change(tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": ""})
    with pytest.raises(ConfigError):
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

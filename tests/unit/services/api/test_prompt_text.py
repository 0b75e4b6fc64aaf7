"""What of a prompt is said each time, and what is new."""

from __future__ import annotations

import httpx
import pytest

from core.request import PromptSource
from services.api.text.prompts import PromptText, of_chat, of_completion
from tests.unit.services.api.api_support import MODEL, ScriptedBackend


def parts(text: PromptText | None) -> tuple[str, str] | None:
    return None if text is None else (text.instruction, text.user_input)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_of_a_chat_the_last_message_of_the_user_is_its_input() -> None:
    chat = [message("system", "Be short."), message("user", "Hi"), message("assistant", "Hello"), message("user", "Go")]
    assert parts(of_chat(chat)) == ("Be short.\nHi\nHello", "Go")
    assert parts(of_chat([*chat, message("assistant", "Well,")])) == ("Be short.\nHi\nHello\nWell,", "Go")
    assert parts(of_chat([message("system", "Talk.")])) == ("Talk.", "")
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


async def test_the_backend_gets_the_parts_of_a_prompt(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    said = message("user", "Go")
    chat = {"model": MODEL, "messages": [message("system", "Be short."), said], "n": 2}
    texts = {"model": MODEL, "prompt": ["Say:\nhi", "Say hello"], "instruction": "Say"}
    for path, body in (("chat/completions", chat), ("completions", texts), ("completions", texts | {"prompt": [1, 2]})):
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
    expected = [("Be short.", "Go")] * 2 + [("Say", ":\nhi"), ("Say", "hello"), None]
    assert [parts(text) for text in backend.texts] == expected
    reply = await client.post("/v1/completions", json=texts | {"instruction": 3})
    assert reply.status_code == 400 and "instruction" in reply.text

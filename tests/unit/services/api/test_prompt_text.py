"""What of a prompt is said each time, and what is new."""

from __future__ import annotations

import httpx
import pytest
from api_support import MODEL, ScriptedBackend

from services.api.prompt_text import PromptText, of_chat, of_completion


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_of_a_chat_the_last_message_of_the_user_is_its_input() -> None:
    chat = [message("system", "Be short."), message("user", "Hi"), message("assistant", "Hello"), message("user", "Go")]
    assert of_chat(chat) == PromptText("Be short.\nHi\nHello", "Go")
    assert of_chat([*chat, message("assistant", "Well,")]) == PromptText("Be short.\nHi\nHello\nWell,", "Go")
    assert of_chat([message("system", "Talk.")]) == PromptText("Talk.", "")


@pytest.mark.parametrize(
    ("prompt", "instruction", "expected"),
    [
        ("Translate:\nein Haus", None, PromptText("Translate:", "ein Haus")),
        ("ein Haus", None, PromptText("", "ein Haus")),
        ("Translate: ein Haus", "Translate:", PromptText("Translate:", "ein Haus")),
        ("ein Haus", "Translate", PromptText("Translate", "ein Haus")),
    ],
)
def test_of_a_completion(prompt: str, instruction: str | None, expected: PromptText) -> None:
    assert of_completion(prompt, instruction) == expected


def test_the_input_has_its_share_of_the_tokens() -> None:
    assert PromptText("abc", "def" * 3).user_input_len(40) == 30
    assert PromptText("", "").user_input_len(3) == 0


async def test_the_backend_gets_the_parts_of_a_prompt(client: httpx.AsyncClient, backend: ScriptedBackend) -> None:
    said = message("user", "Go")
    chat = {"model": MODEL, "messages": [message("system", "Be short."), said], "n": 2}
    texts = {"model": MODEL, "prompt": ["Say:\nhi", "Say hello"], "instruction": "Say"}
    for path, body in (("chat/completions", chat), ("completions", texts), ("completions", texts | {"prompt": [1, 2]})):
        assert (await client.post(f"/v1/{path}", json=body)).status_code == 200
    expected = [PromptText("Be short.", "Go")] * 2 + [PromptText("Say", ":\nhi"), PromptText("Say", "hello"), None]
    assert backend.texts == expected
    reply = await client.post("/v1/completions", json=texts | {"instruction": 3})
    assert reply.status_code == 400 and "instruction" in reply.text

"""Pictures in chats: what the backend gets of them, and what is refused."""

from __future__ import annotations

import base64
import dataclasses
import functools
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from core.images import digest_of
from services.api.app import build_app
from services.api.body_workers import BodyWorkers
from services.api.pictures.placing import Sight
from services.api.text.prompts import ChatPrompt, PromptEncoder
from tests.unit.services.api.api_support import (
    IMAGE_TOKENS,
    MAX_MODEL_LEN,
    MODEL,
    ScriptedBackend,
    application,
    write_model_dir,
)
from tests.unit.services.api.conftest import Connect

PARTS = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
STRINGS = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
PARTS_ALONE = (
    "{% for message in messages %}[{{ message.role }}]"
    "{% for part in message.content | selectattr('type', 'equalto', 'image') %}<|image|>{% endfor %}"
    "{% for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text }}{% endfor %}{% endfor %}"
)
"""As LLaVA's: a string has no parts of either type, so it would be left out."""

FILE = b"\x89PNG of some kind"


def url_of(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image(data: bytes = FILE, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(data), **fields}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": list(content)}], **fields}


def seeing_dir(folder: Path, template: str) -> Path:
    write_model_dir(folder, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|image|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def placeholder_id(folder: Path) -> int:
    found = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|image|>")
    assert isinstance(found, int)
    return found


def seeing_backend(folder: Path, max_model_len: int = MAX_MODEL_LEN) -> ScriptedBackend:
    backend = ScriptedBackend()
    sight = Sight("<|image|>", placeholder_id(folder), max_per_request=3)
    backend.model = dataclasses.replace(backend.model, sight=sight, max_model_len=max_model_len)
    return backend


def client_of(backend: ScriptedBackend, folder: Path, workers: BodyWorkers | None = None) -> httpx.AsyncClient:
    build: Any = application if workers is None else functools.partial(build_app, workers=workers)
    app = build(backend, PromptEncoder(folder), 1_000_000)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize("template", [PARTS, STRINGS, PARTS_ALONE], ids=["parts", "strings", "parts alone"])
async def test_each_picture_has_its_tokens_where_it_stands(tmp_path: Path, template: str) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, template))
    async with client_of(backend, tmp_path) as client:
        reply = await client.post("/v1/chat/completions", json=chat(text("a"), image(), image(b"other")))
    assert reply.status_code == 200, reply.text
    [(prompt_ids, sampling)] = backend.calls
    [images] = backend.images
    assert [each.digest for each in images] == [digest_of(FILE), digest_of(b"other")]
    assert prompt_ids.count(placeholder_id(tmp_path)) == 2 * IMAGE_TOKENS
    for each in images:
        assert set(prompt_ids[each.start : each.end]) == {placeholder_id(tmp_path)}
        assert each.embeddings == b"rows" and each.grid == (1, IMAGE_TOKENS)
    assert reply.json()["usage"]["prompt_tokens"] == len(prompt_ids)
    assert sampling.max_new_tokens == MAX_MODEL_LEN - len(prompt_ids)
    assert [(file.data, file.field) for file, _ in backend.seen] == [
        (FILE, "messages[0].content[1].image_url.url"),
        (b"other", "messages[0].content[2].image_url.url"),
    ]


async def test_what_a_client_writes_stands_for_no_picture(tmp_path: Path) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS), max_model_len=200)
    async with client_of(backend, tmp_path) as client:
        reply = await client.post("/v1/chat/completions", json=chat(text("<|image|>"), image()))
    assert reply.status_code == 200, reply.text
    assert backend.calls[0][0].count(placeholder_id(tmp_path)) == IMAGE_TOKENS
    assert len(backend.images[0]) == 1


def test_a_template_for_parts_alone_shows_texts_that_are_strings(tmp_path: Path) -> None:
    encoder = PromptEncoder(seeing_dir(tmp_path, PARTS_ALONE))
    rendered = encoder.render_chat(ChatPrompt([{"role": "user", "content": "words"}]))
    assert rendered == "[user]words"


async def test_a_large_picture_is_read_by_another_process(tmp_path: Path) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS))
    workers = BodyWorkers(tmp_path)
    file = bytes(range(256)) * 400
    try:
        async with client_of(backend, tmp_path, workers) as client:
            reply = await client.post("/v1/chat/completions", json=chat(image(file), text("b")))
    finally:
        workers.close()
    assert reply.status_code == 200, reply.text
    assert backend.seen[0][0].data == file
    assert backend.images[0][0].digest == digest_of(file)


def refusals() -> list[tuple[dict[str, Any], str, str]]:
    return [
        (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,@@"}}), "data:image/png", "base64"),
        (chat({"type": "image_url", "image_url": {"url": "ftp://a/b.png"}}), "ftp://a/b.png", "data URL"),
        (chat({"type": "image_url", "image_url": {"url": "data:text/html;base64,aaaa"}}), "data:text", "data URL"),
        (chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}), "data:image", "with data"),
        (chat({"type": "image_url", "image_url": 7}), "7", "data URL"),
        (chat({"type": "image_url"}), "None", "data URL"),
        (chat(image(detail="very")), "very", "auto, low, high"),
        (chat(image(shape="round")), "round", "'url' and 'detail'"),
        (chat({"type": "input_audio", "input_audio": {}}), "input_audio", "'text' or 'image_url'"),
        (chat(image(), image(), image(), image()), "picture 4", "at most 3"),
        (chat(image(), truncate_prompt_tokens=2), "2", "null beside pictures"),
        (chat(image(), max_tokens=MAX_MODEL_LEN - 8), str(MAX_MODEL_LEN - 8), "context"),
        ({"model": MODEL, "messages": [{"role": "system", "content": [image()]}]}, "a picture", "role 'system'"),
        ({"model": MODEL, "messages": [{"role": "assistant", "content": [image()]}]}, "a picture", "'assistant'"),
    ]


@pytest.mark.parametrize(("body", "found", "expected"), refusals())
async def test_refusals_name_the_picture(tmp_path: Path, body: dict[str, Any], found: str, expected: str) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS))
    async with client_of(backend, tmp_path) as client:
        reply = await client.post("/v1/chat/completions", json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert found in error["message"] and expected in error["message"], error
    assert error["param"].startswith(("messages", "max_tokens", "truncate")), error
    assert backend.calls == []


async def test_pictures_that_do_not_fit_are_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS), max_model_len=12)
    async with client_of(backend, tmp_path) as client:
        reply = await client.post("/v1/chat/completions", json=chat(image(), image()))
    assert reply.status_code == 400
    assert reply.json()["error"]["code"] == "context_length_exceeded"


async def test_a_model_that_reads_text_alone_refuses_pictures(connect: Connect) -> None:
    backend = ScriptedBackend()
    reply = await connect(backend).post("/v1/chat/completions", json=chat(text("a"), image()))
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == "messages[0].content[1].type"
    assert backend.calls == []


async def test_salts_divide_what_is_kept_of_pictures(tmp_path: Path) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS))
    app = application(backend, PromptEncoder(tmp_path), shares_across_keys=False)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for key, salt in (("a", "x"), ("a", "x"), ("b", "x"), ("a", "y")):
            headers = {"Authorization": f"Bearer {key}"}
            reply = await client.post("/v1/chat/completions", json=chat(image(), cache_salt=salt), headers=headers)
            assert reply.status_code == 200, reply.text
    salts = [salt for _, salt in backend.seen]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert salts == backend.salts, "the KV is divided as the pictures are"

"""Pictures in chats, messages, responses, answers of tools and counts of tokens: what arrives, what is refused."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from farsight.core.images import digest_of
from farsight.services.api.app import build_app
from farsight.services.api.backend import ImageInput
from farsight.services.api.body_workers import BodyWorkers
from farsight.services.api.text.prompts import ChatPrompt, PromptEncoder
from tests.unit.services.api.api_support import (
    IMAGE_TOKENS,
    MAX_MODEL_LEN,
    MODEL,
    ScriptedBackend,
    application,
    client_on,
    ok,
    refusal,
    write_model_dir,
)

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
    image_input = ImageInput("<|image|>", placeholder_id(folder), max_per_request=3)
    backend.model = dataclasses.replace(backend.model, image_input=image_input, max_model_len=max_model_len)
    return backend


def client_of(backend: ScriptedBackend, folder: Path, workers: BodyWorkers | None = None) -> httpx.AsyncClient:
    build: Any = application if workers is None else functools.partial(build_app, workers=workers)
    return client_on(build(backend, PromptEncoder(folder), 1_000_000))


@pytest.mark.parametrize("template", [PARTS, STRINGS, PARTS_ALONE], ids=["parts", "strings", "parts alone"])
async def test_each_picture_has_its_tokens_where_it_stands(tmp_path: Path, template: str) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, template))
    body = chat(text("a"), image(), image(b"other"))
    reply = await ok(client_of(backend, tmp_path), "/v1/chat/completions", **body)
    [(prompt_ids, sampling)] = backend.calls
    [images] = backend.images
    assert [each.digest for each in images] == [digest_of(FILE), digest_of(b"other")]
    assert prompt_ids.count(placeholder_id(tmp_path)) == 2 * IMAGE_TOKENS
    for each in images:
        assert set(prompt_ids[each.start : each.end]) == {placeholder_id(tmp_path)}
        assert each.embeddings == b"rows" and each.grid == (1, IMAGE_TOKENS)
    assert reply["usage"]["prompt_tokens"] == len(prompt_ids)
    assert sampling.max_new_tokens == MAX_MODEL_LEN - len(prompt_ids)
    assert [(file.data, file.field) for file, _ in backend.seen] == [
        (FILE, "messages[0].content[1].image_url.url"),
        (b"other", "messages[0].content[2].image_url.url"),
    ]


async def test_what_a_client_writes_stands_for_no_picture(tmp_path: Path) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS), max_model_len=200)
    await ok(client_of(backend, tmp_path), "/v1/chat/completions", **chat(text("<|image|>"), image()))
    assert backend.calls[0][0].count(placeholder_id(tmp_path)) == IMAGE_TOKENS
    assert len(backend.images[0]) == 1


def test_a_template_for_parts_alone_shows_texts_that_are_strings(tmp_path: Path) -> None:
    encoder = PromptEncoder(seeing_dir(tmp_path, PARTS_ALONE))
    rendered = encoder.render_chat(ChatPrompt([{"role": "user", "content": "words"}]))
    assert rendered == "[user]words"


async def test_a_large_picture_is_read_by_another_process(tmp_path: Path) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS))
    file = bytes(range(256)) * 400
    with contextlib.closing(BodyWorkers(tmp_path)) as workers:
        await ok(client_of(backend, tmp_path, workers), "/v1/chat/completions", **chat(image(file), text("b")))
    assert backend.seen[0][0].data == file
    assert backend.images[0][0].digest == digest_of(file)


def said_by(role: str) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [image()]}]}


def linked(url: str) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": {"url": url}})


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (linked("data:image/png;base64,@@"), "data:image/png", "base64"),
    (linked("ftp://a/b.png"), "ftp://a/b.png", "data URL"),
    (linked("data:text/html;base64,aaaa"), "data:text", "data URL"),
    (linked("data:image/png;base64,"), "data:image", "with data"),
    (chat({"type": "image_url", "image_url": 7}), "7", "data URL"),
    (chat({"type": "image_url"}), "None", "data URL"),
    (chat(image(detail="very")), "very", "auto, low, high"),
    (chat(image(shape="round")), "round", "'url' and 'detail'"),
    (chat({"type": "input_audio", "input_audio": {}}), "input_audio", "'text' or 'image_url'"),
    (chat(image(), image(), image(), image()), "picture 4", "at most 3"),
    (chat(image(), truncate_prompt_tokens=2), "2", "null beside pictures"),
    (chat(image(), max_tokens=MAX_MODEL_LEN - 8), str(MAX_MODEL_LEN - 8), "context"),
    (said_by("system"), "a picture", "role 'system'"),
    (said_by("assistant"), "a picture", "'assistant'"),
]


@pytest.mark.parametrize(("body", "found", "expected"), REFUSED)
async def test_refusals_name_the_picture(tmp_path: Path, body: dict[str, Any], found: str, expected: str) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS))
    error = await refusal(client_of(backend, tmp_path), "/v1/chat/completions", **body)
    assert found in error["message"] and expected in error["message"], error
    assert error["param"].startswith(("messages", "max_tokens", "truncate")), error
    assert backend.calls == []


async def test_pictures_that_do_not_fit_are_a_prompt_that_is_too_long(tmp_path: Path) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS), max_model_len=12)
    error = await refusal(client_of(backend, tmp_path), "/v1/chat/completions", **chat(image(), image()))
    assert error["code"] == "context_length_exceeded"


async def test_salts_divide_what_is_kept_of_pictures(tmp_path: Path) -> None:
    backend = seeing_backend(seeing_dir(tmp_path, PARTS))
    client = client_on(application(backend, PromptEncoder(tmp_path), shares_across_keys=False))
    for key, salt in (("a", "x"), ("a", "x"), ("b", "x"), ("a", "y")):
        client.headers["Authorization"] = f"Bearer {key}"
        await ok(client, "/v1/chat/completions", **chat(image(), cache_salt=salt))
    salts = [salt for _, salt in backend.seen]
    assert salts[0] == salts[1]
    assert len(set(salts)) == 3
    assert salts == backend.salts, "the KV is divided as the pictures are"


OTHER = b"GIF89a of some kind"
URL = "https://pictures.example/a.png?signature=1"
TOOLS = "{% for message in messages if message.tool_calls %}called {% endfor %}" + PARTS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return seeing_dir(tmp_path, TOOLS)


@pytest.fixture
def backend(folder: Path) -> ScriptedBackend:
    return seeing_backend(folder, max_model_len=400)


def block(source: Any) -> dict[str, Any]:
    return {"type": "image", "source": source}


def given(data: bytes, kind: str = "image/png") -> dict[str, Any]:
    return block({"type": "base64", "media_type": kind, "data": base64.b64encode(data).decode()})


def of_bytes(**fields: Any) -> dict[str, Any]:
    return block({"type": "base64", "media_type": "image/png", **fields})


def shown(url: str, **fields: Any) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, **fields}


def message(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": list(content)}], **fields}


def response(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": [{"role": "user", "content": list(content)}], **fields}


async def seen(backend: ScriptedBackend, folder: Path, path: str, body: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What the backend was shown; the prompt has the tokens of these pictures, in one place each."""
    await ok(client_of(backend, folder), path, **body)
    [(prompt_ids, _)] = backend.calls
    assert prompt_ids.count(placeholder_id(folder)) == IMAGE_TOKENS * len(backend.seen)
    return [(file.field, file.url or file.data) for file, _ in backend.seen]


async def test_anthropic_blocks_of_both_sources(backend: ScriptedBackend, folder: Path) -> None:
    body = message(text("see"), given(FILE), block({"type": "url", "url": URL}), text("and"), given(OTHER, "image/gif"))
    assert await seen(backend, folder, "/v1/messages", body) == [
        ("messages[0].content[1].source.data", FILE),
        ("messages[0].content[2].source.url", URL),
        ("messages[0].content[4].source.data", OTHER),
    ]
    assert [each.digest for each in backend.images[0]][::2] == [digest_of(FILE), digest_of(OTHER)]


async def test_a_tool_may_answer_a_picture(backend: ScriptedBackend, folder: Path) -> None:
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("found"), given(FILE)]}
    body = message(text("look"))
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    body["messages"] += [{"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert await seen(backend, folder, "/v1/messages", body) == [
        ("messages[2].content[0].content[1].source.data", FILE)
    ]


async def test_responses_take_pictures_of_messages_and_of_tools(backend: ScriptedBackend, folder: Path) -> None:
    body = response({"type": "input_text", "text": "see"}, shown(url_of(FILE), detail="high"), shown(URL))
    call = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    body["input"] += [call, {"type": "function_call_output", "call_id": "c1", "output": [shown(url_of(OTHER))]}]
    assert await seen(backend, folder, "/v1/responses", body) == [
        ("input[0].content[1].image_url", FILE),
        ("input[0].content[2].image_url", URL),
        ("input[2].output[0].image_url", OTHER),
    ]


REFUSED_BLOCKS = [
    (block(None), "source.type"),
    (block({"type": "file", "file_id": "file_1"}), "source.type"),
    (given(FILE, "image/tiff"), "source.media_type"),
    (given(FILE, "text/html"), "source.media_type"),
    (of_bytes(), "source.data"),
    (of_bytes(data="no base64!"), "source.data"),
    (of_bytes(data=""), "source.data"),
    (of_bytes(data="AAAA", url=URL), "source.url"),
    (block({"type": "url", "url": "file:///etc/passwd"}), "source.url"),
    (block({"type": "url", "url": url_of(FILE)}), "source.url"),
    (block({"type": "url"}), "source.url"),
]


@pytest.mark.parametrize(("part", "field"), REFUSED_BLOCKS)
async def test_wrong_blocks_are_refused_with_their_field(
    backend: ScriptedBackend, folder: Path, part: dict[str, Any], field: str
) -> None:
    error = await refusal(client_of(backend, folder), "/v1/messages", **message(part))
    assert error["param"] == f"messages[0].content[0].{field}"
    assert not backend.seen


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "input_image"}, "image_url"),
        (shown("file:///etc/passwd"), "image_url"),
        (shown("data:text/html;base64,AAAA"), "image_url"),
        (shown(url_of(FILE), detail="all"), "detail"),
        ({"type": "input_image", "file_id": "file_1"}, "file_id"),
    ],
)
async def test_wrong_parts_of_responses_are_refused(
    backend: ScriptedBackend, folder: Path, part: dict[str, Any], field: str
) -> None:
    error = await refusal(client_of(backend, folder), "/v1/responses", **response(part))
    assert f"[0].{field}: got" in error["message"]


async def test_an_assistant_shows_no_pictures(backend: ScriptedBackend, folder: Path) -> None:
    body = message(text("see"))
    body["messages"] += [{"role": "assistant", "content": [given(FILE)]}, {"role": "user", "content": "?"}]
    client = client_of(backend, folder)
    assert (await refusal(client, "/v1/messages", **body))["param"] == "messages[1].content[0].type"
    await refusal(client, "/v1/responses", input=[{"role": "assistant", "content": [shown(url_of(FILE))]}])


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", chat(image())),
        ("/v1/messages", message(given(FILE))),
        ("/v1/responses", response(shown(url_of(FILE)))),
        ("/v1/messages/count_tokens", {"messages": message(given(FILE))["messages"]}),
        ("/tokenize", {"messages": chat(image())["messages"]}),
    ],
)
async def test_a_model_that_reads_text_refuses_pictures_of_every_dialect(path: str, body: Any, folder: Path) -> None:
    backend = ScriptedBackend()
    error = await refusal(client_of(backend, folder), path, **body)
    assert "text alone is read here" in error["message"]
    assert backend.calls == []


async def test_counted_tokens_are_those_of_the_message(backend: ScriptedBackend, folder: Path) -> None:
    body = message(text("see"), given(FILE), text("and"), given(OTHER))
    client = client_of(backend, folder)
    count = (await ok(client, "/v1/messages/count_tokens", messages=body["messages"]))["input_tokens"]
    used = (await ok(client, "/v1/messages", **body))["usage"]
    assert count == used["input_tokens"] + used["cache_read_input_tokens"] > 2 * IMAGE_TOKENS
    assert len({salt for _, salt in backend.seen}) == 1, "the message finds what the count has had encoded"


@pytest.mark.parametrize("data", [bytes(range(256)) * 20, bytes(100_000)], ids=["small", "large"])
async def test_tokens_of_a_chat_are_those_of_its_prompt(backend: ScriptedBackend, folder: Path, data: bytes) -> None:
    """Also of one whose picture is larger than other bodies may be."""
    body = chat(text("see"), image(data))
    client = client_of(backend, folder)
    found = await ok(client, "/tokenize", messages=body["messages"])
    reply = await ok(client, "/v1/chat/completions", **body)
    assert tuple(found["tokens"]) == tuple(backend.calls[0][0])
    assert found["count"] == reply["usage"]["prompt_tokens"]


async def test_large_messages_and_responses_are_read(backend: ScriptedBackend, folder: Path) -> None:
    data = bytes(range(256)) * 400
    found = await seen(backend, folder, "/v1/messages", message(given(data)))
    assert found == [("messages[0].content[0].source.data", data)]
    again = seeing_backend(folder, max_model_len=400)
    found = await seen(again, folder, "/v1/responses", response(shown(url_of(data))))
    assert found == [("input[0].content[0].image_url", data)]


async def test_completions_have_no_place_for_a_picture(backend: ScriptedBackend, folder: Path) -> None:
    for fields in ({"images": [url_of(FILE)]}, {"multi_modal_data": {"image": url_of(FILE)}}):
        error = await refusal(client_of(backend, folder), "/v1/completions", prompt="see", **fields)
        assert error["code"] == "unknown_parameter"

"""Ollama's API by the official ``ollama`` package, in this process; what it has no words for by plain requests."""

# The client's fields may all be None by its types, and its calls streams: what comes is asserted instead.
# mypy: disable-error-code="union-attr,operator,arg-type,index,misc"
from __future__ import annotations

import asyncio
import base64
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from farsight.core.abilities import Abilities
from farsight.core.messages.tokens import DeltaLogprobs, TokenDelta
from farsight.services.api.backend import ImageInput
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import (
    CHATML,
    MAX_MODEL_LEN,
    MODEL,
    Client,
    ScriptedBackend,
    application,
    chat_ids,
    delta,
    ok,
    write_model_dir,
)

SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "get_weather", "description": "It.", "parameters": SCHEMA}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLS = [delta("Let me see. "), *(delta(char) for char in CALL), delta("", "stop")]
PIXEL = base64.b64encode(b"\x89PNG and more").decode()

Library = Callable[..., ollama.AsyncClient]


@pytest.fixture
def library(encoder: PromptEncoder) -> Library:
    """Opens the package's client on an application over the given backend."""

    def open_on(backend: ScriptedBackend, texts: PromptEncoder = encoder) -> ollama.AsyncClient:
        app = application(backend, texts, 100_000)
        return ollama.AsyncClient(host="http://test", transport=httpx.ASGITransport(app))

    return open_on


async def test_a_chat(library: Library, backend: ScriptedBackend, encoder: PromptEncoder) -> None:
    options = {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "seed": 3, "stop": ["END"], "num_predict": 9}
    penalties = {"repeat_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    ignored = {"num_ctx": 4096, "num_thread": 2, "mirostat": 0}
    answer = await library(backend).chat(f"{MODEL}:latest", SAID, options={**options, **penalties, **ignored})
    assert answer.message.role == "assistant" and answer.message.content == "Hello!"
    assert (answer.done, answer.done_reason, answer.eval_count) == (True, "stop", 4)
    prompt_ids, sampling = backend.calls[0]
    assert prompt_ids == chat_ids(encoder, SAID) and answer.prompt_eval_count == len(prompt_ids)
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.5, 7, 0.5, 0.1)
    assert (sampling.seed, sampling.stop, sampling.max_new_tokens) == (3, ("END",), 9)
    assert (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) == (1.2, 0.5, 0.25)


async def test_durations_are_nanoseconds_that_add_up(library: Library) -> None:
    script: list[TokenDelta | float | Exception] = [0.03, delta("a"), 0.02, delta("b", "length")]
    for stream in (False, True):
        asked = await library(ScriptedBackend(script)).generate(MODEL, "hi", stream=stream)
        answer = [each async for each in asked][-1] if stream else asked
        assert answer.prompt_eval_duration >= 25_000_000 and answer.eval_duration >= 15_000_000
        assert answer.total_duration == answer.prompt_eval_duration + answer.eval_duration
        assert (answer.load_duration, answer.eval_count, answer.done_reason) == (0, 2, "length")


async def test_a_stream_is_the_whole(library: Library, backend: ScriptedBackend) -> None:
    lines = [each async for each in await library(backend).chat(MODEL, SAID, stream=True)]
    assert "".join(each.message.content for each in lines) == "Hello!"
    assert [each.done for each in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1].done_reason, lines[-1].eval_count) == ("stop", 4)


async def test_lines_have_their_type_and_stream_unless_it_is_false(client: Client) -> None:
    response = await client.post("/api/chat", json={"model": MODEL, "messages": SAID})
    assert response.headers["content-type"] == "application/x-ndjson"
    assert json.loads(response.text.splitlines()[-1])["done"] is True
    response = await client.post("/api/chat", json={"model": MODEL, "messages": SAID, "stream": False})
    assert response.headers["content-type"] == "application/json" and response.json()["message"]["content"] == "Hello!"


async def test_ollamas_defaults_where_nothing_is_said(library: Library, backend: ScriptedBackend) -> None:
    await library(backend).chat(MODEL, SAID)
    prompt_ids, sampling = backend.calls[0]
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0.8, 40, 0.9, 1)
    assert sampling.max_new_tokens == MAX_MODEL_LEN - len(prompt_ids), "the rest of the context"
    await library(backend).chat(MODEL, SAID, options={"num_predict": 10_000})
    assert backend.calls[1][1].max_new_tokens == MAX_MODEL_LEN - len(prompt_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_tools(library: Library, stream: bool) -> None:
    client = library(ScriptedBackend(CALLS))
    if stream:
        messages = [each.message async for each in await client.chat(MODEL, SAID, tools=[TOOL], stream=True)]
    else:
        messages = [(await client.chat(MODEL, SAID, tools=[TOOL])).message]
    assert "".join(each.content or "" for each in messages) == "Let me see."
    [call] = [call for each in messages for call in each.tool_calls or ()]
    assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Rome"})


async def test_results_of_tools_go_back(library: Library, backend: ScriptedBackend) -> None:
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    said = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "thinking": "Hm.", "tool_calls": [call]},
        {"role": "tool", "content": "sun", "tool_name": "get_weather"},
    ]
    await library(backend).chat(MODEL, said, options={"num_predict": 1})
    text = backend.texts[0]
    assert text is not None and "sun" in text.user_input + text.instruction + str(text.source)


async def test_thinking(library: Library, tmp_path: Path) -> None:
    texts = PromptEncoder(write_model_dir(tmp_path, CHATML + "{# </think> #}{{ enable_thinking }}"))
    client = library(ScriptedBackend([delta("<think>\nHm"), delta(".\n</think>\n\nFour"), delta(".", "stop")]), texts)
    answer = await client.chat(MODEL, SAID, think=True)
    assert (answer.message.thinking, answer.message.content) == ("Hm.", "Four.")
    lines = [each async for each in await client.generate(MODEL, "hi", think=True, stream=True)]
    assert "".join(each.thinking or "" for each in lines) == "Hm."
    assert "".join(each.response or "" for each in lines) == "Four."
    assert "thinking" in (await client.show(MODEL)).capabilities
    assert (await client.chat(MODEL, SAID, think="low")).message.content == "Four."


@pytest.mark.parametrize("form", ["json", SCHEMA])
async def test_a_format(library: Library, backend: ScriptedBackend, form: Any) -> None:
    await library(backend).generate(MODEL, "hi", format=form)
    await library(backend).chat(MODEL, SAID, format=form)
    grammars = [sampling.grammar for _, sampling in backend.calls]
    assert all(grammars) and (form == "json" or "city" in grammars[0])


async def test_generate_with_a_system_prompt_and_a_context(
    library: Library, backend: ScriptedBackend, encoder: PromptEncoder
) -> None:
    client = library(backend)
    first = await client.generate(MODEL, "hi", system="Be brief.")
    assert first.response == "Hello!" and backend.calls[0][0] == chat_ids(encoder, SAID)
    assert list(first.context) == [*backend.calls[0][0], 0, 0, 0, 0], "token ids of prompt and output"
    backend.model = dataclasses.replace(backend.model, max_model_len=1000)
    await client.generate(MODEL, "and", context=first.context)
    ids = (*first.context, *chat_ids(encoder, [{"role": "user", "content": "and"}]))
    assert backend.calls[1][0] == ids and backend.calls[1][1].max_new_tokens == 1000 - len(ids)


async def test_a_raw_prompt_has_no_template_and_may_name_control_tokens(
    library: Library, backend: ScriptedBackend, encoder: PromptEncoder
) -> None:
    answer = await library(backend).generate(MODEL, "<|im_end|>hello", raw=True, options={"num_predict": -1})
    assert answer.context is None and answer.response == "Hello!"
    ids = encoder.encode_prompt("<|im_end|>hello", parse_special=True).ids
    assert backend.calls[0][0] == ids and backend.calls[0][1].max_new_tokens == MAX_MODEL_LEN - len(ids)


async def test_pictures(library: Library, tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<|im_start|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    backend, texts = ScriptedBackend(), PromptEncoder(write_model_dir(tmp_path, template))
    backend.model = dataclasses.replace(backend.model, image_input=ImageInput("<|im_start|>", 2, 2))
    client = library(backend, texts)
    await client.chat(MODEL, [{"role": "user", "content": "look", "images": [PIXEL]}])
    await client.generate(MODEL, "look", images=[PIXEL])
    assert [len(images) for images in backend.images] == [1, 1]
    assert {file.data for file, _ in backend.seen} == {b"\x89PNG and more"}


async def test_log_probabilities(library: Library) -> None:
    scored = TokenDelta(
        "r", 0, 0, (40,), "a", None, None, logprobs=DeltaLogprobs((((40, 40, 41), (-0.5, -0.5, -1.5)),))
    )
    for stream in (False, True):
        client = library(ScriptedBackend([scored, delta("", "stop", num_tokens=0)]))
        asked = await client.chat(MODEL, SAID, logprobs=True, top_logprobs=2, stream=stream)
        answer = await anext(asked) if stream else asked
        [token] = answer.logprobs
        assert token.logprob == -0.5 and [each.logprob for each in token.top_logprobs] == [-0.5, -1.5]


async def test_an_empty_request_loads_what_is_loaded(library: Library, backend: ScriptedBackend) -> None:
    client = library(backend)
    assert (await client.generate(MODEL)).done_reason == "load"
    assert (await client.chat(MODEL, keep_alive="5m")).done_reason == "load"
    for call in (client.generate(MODEL, keep_alive=0), client.chat(MODEL, keep_alive="0s")):
        with pytest.raises(ollama.ResponseError, match=r"keep_alive: got .*stays loaded"):
            await call
    assert not backend.calls


async def test_what_is_served(library: Library, backend: ScriptedBackend, checkpoint: Path) -> None:
    backend.model = dataclasses.replace(backend.model, root=str(checkpoint), aliases=("other",))
    client = library(backend)
    shown = [(row.model, row.details.family, row.details.format) for row in (await client.list()).models]
    assert shown == [(MODEL, "llama", "safetensors"), ("other", "llama", "safetensors")]
    row = (await client.list()).models[0]
    assert row.size == await asyncio.to_thread(
        lambda: sum(each.stat().st_size for each in checkpoint.glob("*.safetensors"))
    )
    assert len(row.digest) == 64 and row.details.quantization_level == "F32"
    facts = await client.show(MODEL)
    assert (
        facts.modelinfo["general.architecture"] == "llama" and facts.modelinfo["llama.context_length"] == MAX_MODEL_LEN
    )
    assert facts.template == CHATML and facts.capabilities == ["completion", "tools"]
    [loaded] = (await client.ps()).models
    assert loaded.model == MODEL and loaded.context_length == MAX_MODEL_LEN and loaded.expires_at.year > 2100


async def test_a_model_without_files_here_has_a_name(library: Library, backend: ScriptedBackend) -> None:
    backend.model = dataclasses.replace(backend.model, root="/nowhere")
    [row] = (await library(backend).list()).models
    assert (row.model, row.size, row.details.family) == (MODEL, 0, "")


async def test_embeddings(library: Library, checkpoint: Path) -> None:
    from tests.unit.services.api.engine_backend import EngineBackend  # loads torch

    backend = EngineBackend(checkpoint)
    backend.model = dataclasses.replace(backend.model, abilities=Abilities(pooling="last", dim=32))
    client = library(backend)
    several = await client.embed(MODEL, ["hello", "the cat " * 100, "hello"])
    one, cut, same = several.embeddings
    assert len(one) == 32 and one == pytest.approx(same, abs=1e-6) and len(cut) == 32
    assert several.prompt_eval_count > 2
    alone = await client.embed(MODEL, "hello", dimensions=8)
    assert len(alone.embeddings[0]) == 8
    assert (await client.embeddings(MODEL, "hello")).embedding == pytest.approx(one, abs=1e-6)
    assert (await client.embed(MODEL, [])).embeddings == []
    with pytest.raises(ollama.ResponseError, match="input"):
        await client.embed(MODEL, "the cat " * 100, truncate=False)


MESSAGE = {"messages": SAID}
PROMPT = {"prompt": "hi"}
REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("chat", {**MESSAGE, "model": "other"}, 404, "model: got 'other'"),
    ("generate", {"model": "other"}, 404, "model"),
    ("show", {"model": "other"}, 404, "model"),
    ("embed", {"input": "x"}, 400, "makes no embeddings"),
    ("chat", {**MESSAGE, "options": {"temperature": 9}}, 400, "options.temperature"),
    ("chat", {**MESSAGE, "options": {"mirostat": 1}}, 400, "options.mirostat"),
    ("chat", {**MESSAGE, "options": {"repeat_last_n": 64}}, 400, "options.repeat_last_n"),
    ("chat", {**MESSAGE, "options": {"temprature": 1}}, 400, "did you mean 'temperature'"),
    ("chat", {**MESSAGE, "format": "xml"}, 400, "format: got 'xml'"),
    ("chat", {**MESSAGE, "format": {"not": {}}}, 400, "response_format"),
    ("chat", {**MESSAGE, "think": True}, 400, "think: got True, expected false or null"),
    ("chat", {**MESSAGE, "keep_alive": "soon"}, 400, "keep_alive"),
    ("chat", {"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": [PIXEL]}]}, 400, "messages[0].images[0]"),
    ("chat", {"messages": [{"role": "user", "content": "x", "images": ["!"]}]}, 400, "messages[0].images[0]"),
    ("chat", {"messages": [{"role": "user", "content": "x " * 500}]}, 400, "messages"),
    ("chat", {**MESSAGE, "tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function.name"),
    ("generate", {**PROMPT, "suffix": "x"}, 400, "suffix"),
    ("generate", {**PROMPT, "template": "x"}, 400, "template"),
    ("generate", {**PROMPT, "raw": True, "system": "x"}, 400, "system"),
    ("generate", {**PROMPT, "context": [10**6]}, 400, "context"),
    ("generate", {**PROMPT, "context": [5] * 1000}, 400, "context"),
]


@pytest.mark.parametrize(("route", "fields", "status", "words"), REFUSED)
async def test_what_is_refused_names_its_field(
    client: Client, route: str, fields: dict[str, Any], status: int, words: str
) -> None:
    response = await client.post(f"/api/{route}", json={"model": MODEL, **fields})
    assert response.status_code == status, response.text
    assert words in response.json()["error"], "a text, as Ollama's errors are"


@pytest.mark.parametrize("route", ["pull", "push", "create", "copy", "delete", "blobs/sha256:0"])
async def test_models_are_not_managed(client: Client, route: str) -> None:
    method = "DELETE" if route == "delete" else "POST"
    response = await client.request(method, f"/api/{route}", content=b"anything")
    assert response.status_code == 400
    assert response.json()["error"].startswith(f"{route.split('/')[0]}: models are not managed over HTTP")


async def test_every_layer_refuses_in_that_shape(client: Client) -> None:
    for content, status in ((b"{", 400), (b"x" * 200_000, 413), (b"[" * 70_000, 400)):
        response = await client.post("/api/chat", content=content, headers={"content-type": "application/json"})
        assert response.status_code == status and isinstance(response.json()["error"], str)
    assert isinstance((await client.get("/api/nothing")).json()["error"], str)


async def test_a_failure_is_a_line_once_a_stream_has_begun(library: Library) -> None:
    client = library(ScriptedBackend([delta("a"), delta("", "error", error="the replica has ended")]))
    with pytest.raises(ollama.ResponseError, match="the replica has ended"):
        async for _ in await client.chat(MODEL, SAID, stream=True):
            pass
    with pytest.raises(ollama.ResponseError, match="the replica has ended") as failed:
        await client.chat(MODEL, SAID)
    assert failed.value.status_code == 503


async def test_a_large_body_is_read(client: Client) -> None:
    answer = await ok(client, "/api/generate", prompt="hi", images=[], system="", model=MODEL, stream=False, options={})
    assert answer["response"] == "Hello!"
    padded = json.dumps({"prompt": "hi", "stream": False}) + " " * 70_000
    response = await client.post("/api/generate", content=padded, headers={"content-type": "application/json"})
    assert response.json()["response"] == "Hello!"

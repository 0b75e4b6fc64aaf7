"""Log probabilities, several choices, best_of, echo: what clients get, over a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import LlamaForCausalLM

from services.api.text.prompts import PromptEncoder
from services.api.text.token_texts import TokenTexts
from tests.unit.services.api.api_support import MODEL, VOCAB_SIZE, ScriptedBackend, application, delta, read_events
from tests.unit.services.api.engine_backend import EngineBackend, write_checkpoint

COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "the cat", "max_tokens": 8, "seed": 1, "ignore_eos": True}
CHAT: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 8,
    "seed": 1,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def encoder(checkpoint: Path) -> PromptEncoder:
    return PromptEncoder(checkpoint)


@pytest.fixture
def backend(checkpoint: Path) -> EngineBackend:
    return EngineBackend(checkpoint)


@pytest.fixture
async def client(backend: EngineBackend, encoder: PromptEncoder) -> AsyncGenerator[httpx.AsyncClient, None]:
    transport = httpx.ASGITransport(application(backend, encoder))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


async def post(client: httpx.AsyncClient, base: dict[str, Any], **change: Any) -> dict[str, Any]:
    path = "/v1/chat/completions" if "messages" in base else "/v1/completions"
    response = await client.post(path, json={**base, **change})
    assert response.status_code == 200, response.text
    return dict(response.json())


async def stream(client: httpx.AsyncClient, base: dict[str, Any], **change: Any) -> list[dict[str, Any]]:
    path = "/v1/chat/completions" if "messages" in base else "/v1/completions"
    response = await client.post(path, json={**base, **change, "stream": True})
    assert response.status_code == 200, response.text
    return read_events(response.text)


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    """Without what differs from run to run."""
    return answer | {"id": 0, "created": 0, "usage": answer["usage"] | {"gpu_seconds": 0}}


@torch.inference_mode()
def reference_logprobs(checkpoint: Path, prompt: tuple[int, ...], output: list[int]) -> list[float]:
    model = LlamaForCausalLM.from_pretrained(checkpoint)
    known = [*prompt, *output]
    logprobs = model(torch.tensor([known])).logits[0].log_softmax(-1)
    return [float(logprobs[i - 1, known[i]]) for i in range(1, len(known))]


def ids_of_names(encoder: PromptEncoder, names: list[str]) -> list[int]:
    ids = {encoder.texts.name(token_id): token_id for token_id in reversed(range(300))}
    return [ids[name] for name in names]


async def test_completion_logprobs(client: httpx.AsyncClient, encoder: PromptEncoder, checkpoint: Path) -> None:
    choice = (await post(client, COMPLETION, logprobs=3))["choices"][0]
    found = choice["logprobs"]
    assert {name: len(items) for name, items in found.items()} == dict.fromkeys(
        ["tokens", "token_logprobs", "top_logprobs", "text_offset"], 8
    )
    prompt = encoder.encode_text("the cat")
    expected = reference_logprobs(checkpoint, prompt, ids_of_names(encoder, found["tokens"]))[len(prompt) - 1 :]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    for name, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) in (3, 4) and top[name] == logprob
        assert max(top.values()) <= 0
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0


async def test_logprobs_0_is_of_the_token_alone(client: httpx.AsyncClient) -> None:
    found = (await post(client, COMPLETION, logprobs=0))["choices"][0]["logprobs"]
    assert [list(top) for top in found["top_logprobs"]] == [[name] for name in found["tokens"]]


async def test_chat_logprobs(client: httpx.AsyncClient) -> None:
    choice = (await post(client, CHAT, logprobs=True, top_logprobs=2, temperature=0))["choices"][0]
    content = choice["logprobs"]["content"]
    assert len(content) == 8
    for token in content:
        assert token.keys() == {"token", "logprob", "bytes", "top_logprobs"}
        assert bytes(token["bytes"]).decode(errors="replace") == token["token"]
        best = token["top_logprobs"][0]
        assert len(token["top_logprobs"]) == 2
        assert best == {name: token[name] for name in best}, "greedy: the token is the likeliest"
    plain = (await post(client, CHAT, logprobs=True))["choices"][0]["logprobs"]["content"]
    assert [token["top_logprobs"] for token in plain] == [[]] * 8


@pytest.mark.parametrize("base", [COMPLETION, CHAT])
async def test_streamed_logprobs_are_those_of_the_whole_answer(client: httpx.AsyncClient, base: dict[str, Any]) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2} if base is CHAT else {"logprobs": 2}
    whole = (await post(client, base, **wanted))["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {}
    for chunk in await stream(client, base, **wanted):
        for name, items in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(items or [])
    assert joined == {name: items or [] for name, items in whole.items()}


@pytest.mark.parametrize("base", [COMPLETION, CHAT])
async def test_n_choices_are_those_of_their_own_seeds(client: httpx.AsyncClient, base: dict[str, Any]) -> None:
    whole = await post(client, base, n=3)
    alone = [await post(client, base, seed=1 + i) for i in range(3)]
    say = "message" if base is CHAT else "text"
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
    assert [choice[say] for choice in whole["choices"]] == [each["choices"][0][say] for each in alone]
    assert len({str(choice[say]) for choice in whole["choices"]}) == 3
    assert whole["usage"]["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"]
    assert whole["usage"]["completion_tokens"] == 24
    assert timeless(await post(client, base, n=3)) == timeless(whole)


@pytest.mark.parametrize("base", [COMPLETION, CHAT])
async def test_streamed_choices_are_interleaved(client: httpx.AsyncClient, base: dict[str, Any]) -> None:
    whole = await post(client, base, n=3)
    events = await stream(client, base, n=3, stream_options={"include_usage": True})
    assert events[-1]["usage"]["gpu_seconds"] > 0
    assert timeless(events[-1])["usage"] == timeless(whole)["usage"]
    choices = [event["choices"][0] for event in events[:-1]]
    indices = [choice["index"] for choice in choices]
    assert indices != sorted(indices)
    for index in range(3):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[-1]["finish_reason"] == "length"
        if base is CHAT:
            assert own[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(choice["delta"].get("content", "") for choice in own)
            assert text == whole["choices"][index]["message"]["content"]
        else:
            assert "".join(choice["text"] for choice in own) == whole["choices"][index]["text"]


async def test_choices_of_several_prompts_follow_their_prompts(client: httpx.AsyncClient) -> None:
    both = await post(client, COMPLETION, prompt=["the cat", "dog"], n=2)
    each = [await post(client, COMPLETION, prompt=prompt, n=2) for prompt in ("the cat", "dog")]
    assert [choice["text"] for choice in both["choices"]] == [
        choice["text"] for answer in each for choice in answer["choices"]
    ]
    assert both["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in each)


async def test_the_seed_of_a_choice_wraps_around(client: httpx.AsyncClient, backend: EngineBackend) -> None:
    await post(client, COMPLETION, seed=2**64 - 1, n=2)
    assert [sampling.seed for _, sampling in backend.calls] == [2**64 - 1, 0]


async def test_best_of_shows_the_likeliest(client: httpx.AsyncClient) -> None:
    everything = (await post(client, COMPLETION, n=5, logprobs=0))["choices"]
    means = {choice["text"]: math.fsum(choice["logprobs"]["token_logprobs"]) / 8 for choice in everything}
    best = await post(client, COMPLETION, n=2, best_of=5)
    assert [choice["text"] for choice in best["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 40


async def test_echo(client: httpx.AsyncClient, encoder: PromptEncoder, checkpoint: Path) -> None:
    plain = await post(client, COMPLETION)
    echoed = await post(client, COMPLETION, echo=True, logprobs=1)
    choice = echoed["choices"][0]
    assert choice["text"] == "the cat" + plain["choices"][0]["text"]
    assert timeless(echoed)["usage"] == timeless(plain)["usage"]
    found = choice["logprobs"]
    prompt = encoder.encode_text("the cat")
    assert found["tokens"][: len(prompt)] == [encoder.texts.name(token_id) for token_id in prompt]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    output = ids_of_names(encoder, found["tokens"][len(prompt) :])
    assert found["token_logprobs"][1:] == pytest.approx(reference_logprobs(checkpoint, prompt, output), abs=1e-3)
    assert found["text_offset"][:2] == [0, 0], "<s> is no text"
    assert found["text_offset"][len(prompt)] == len("the cat")


async def test_echo_of_token_ids_and_without_logprobs(client: httpx.AsyncClient, encoder: PromptEncoder) -> None:
    ids = list(encoder.encode_text("the dog"))
    choices = (await post(client, COMPLETION, prompt=[ids, ids[1:]], echo=True, n=2))["choices"]
    texts = [choice["text"] for choice in choices]
    assert [text.startswith("<s>the dog") for text in texts] == [True, True, False, False]
    assert all(text.startswith("the dog") for text in texts[2:])
    assert all(choice["logprobs"] is None for choice in choices)


async def test_echo_shows_the_special_tokens_of_token_ids(client: httpx.AsyncClient) -> None:
    choice = (await post(client, COMPLETION, prompt=[0, 0, 0], echo=True, logprobs=0, max_tokens=2))["choices"][0]
    assert choice["text"].startswith("<s><s><s>")
    assert choice["logprobs"]["tokens"][:3] == ["<s>"] * 3
    assert choice["logprobs"]["text_offset"][:4] == [0, 3, 6, 9]


async def test_offsets_of_an_echoed_text_that_names_control_tokens(
    client: httpx.AsyncClient, encoder: PromptEncoder
) -> None:
    text = "é <s>"
    for parse_special in (False, True):
        fields = {"prompt": text, "echo": True, "logprobs": 0, "max_tokens": 1, "parse_special": parse_special}
        choice = (await post(client, COMPLETION, **fields))["choices"][0]
        lists = choice["logprobs"]
        ids = encoder.encode_prompt(text, parse_special).ids
        assert (ids.count(0), len(lists["tokens"])) == (1 + parse_special, len(ids) + 1)
        assert choice["text"].startswith(text)
        assert lists["text_offset"][-1] == len(text)
        offsets = lists["text_offset"]
        for token, begin, end in zip(lists["tokens"][1:-1], offsets[1:-1], offsets[2:], strict=True):
            assert token.startswith("bytes:") or text[begin:end] == token


async def test_an_echo_that_ends_inside_a_character(client: httpx.AsyncClient, encoder: PromptEncoder) -> None:
    ids = list(encoder.encode_text("the €"))[:-1]
    choice = (await post(client, COMPLETION, prompt=ids, echo=True, logprobs=0, max_tokens=1))["choices"][0]
    assert choice["text"].startswith("<s>the \ufffd")
    assert choice["logprobs"]["text_offset"][len(ids)] == len("<s>the \ufffd")


async def test_echo_alone_scores_a_text(client: httpx.AsyncClient, encoder: PromptEncoder, checkpoint: Path) -> None:
    answer = await post(client, COMPLETION, max_tokens=0, echo=True, logprobs=0)
    choice = answer["choices"][0]
    prompt = encoder.encode_text("the cat")
    assert (choice["text"], choice["finish_reason"]) == ("the cat", "length")
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        reference_logprobs(checkpoint, prompt, []), abs=1e-3
    )
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("change", [{}, {"logprobs": 1}, {"max_tokens": 0}, {"n": 2, "prompt": [[6, 5], [9, 8]]}])
async def test_streamed_echo(client: httpx.AsyncClient, change: dict[str, Any]) -> None:
    whole = (await post(client, COMPLETION, echo=True, **change))["choices"]
    chunks = [event["choices"][0] for event in await stream(client, COMPLETION, echo=True, **change)]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        if choice["logprobs"]:
            offsets = [offset for chunk in own for offset in chunk["logprobs"]["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"]


async def test_min_tokens(client: httpx.AsyncClient) -> None:
    ending = {"logit_bias": {"1": 100}, "ignore_eos": False}
    for least, expected in ((0, 1), (5, 6), (8, 8)):
        assert (await post(client, COMPLETION, min_tokens=least, **ending))["usage"]["completion_tokens"] == expected


async def test_logit_bias_decides(client: httpx.AsyncClient) -> None:
    choice = (await post(client, COMPLETION, logit_bias={"70": 100}, logprobs=0))["choices"][0]
    assert len(set(choice["logprobs"]["tokens"])) == 1


HOSTILE = {"min_tokens": 1, "stop_token_ids": list(range(VOCAB_SIZE)), "temperature": 1}


@pytest.mark.parametrize("change", [{}, {"n": 3}, {"logprobs": 2}, {"temperature": 0}, {"prompt": [[5, 6], [7]]}])
async def test_a_request_that_forbids_every_token_is_told_so_and_harms_no_other(
    client: httpx.AsyncClient, backend: EngineBackend, change: dict[str, Any]
) -> None:
    expected = (await post(client, COMPLETION))["choices"]
    beside = asyncio.create_task(post(client, COMPLETION))
    for streamed in (False, True):
        body = {**COMPLETION, **HOSTILE, **change, "stream": streamed}
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 400
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "no_token_possible")
        assert "min_tokens = 1 forbids every token" in error["message"] and "all 300" in error["message"]
    assert (await beside)["choices"] == expected
    assert backend.engine.idle


async def test_benchmark_len(client: httpx.AsyncClient, backend: EngineBackend) -> None:
    backend.model = dataclasses.replace(backend.model, benchmark_mode=True)
    answer = await post(client, COMPLETION, benchmark_len=3, ignore_eos=False, logit_bias={"1": 100})
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("streamed", [False, True])
async def test_cached_tokens_are_counted_once_a_prompt(encoder: PromptEncoder, streamed: bool) -> None:
    """A resumed attempt may find more in the cache: that prompt was counted already."""
    first = dataclasses.replace(delta("a"), cached_len=1)
    resumed = dataclasses.replace(delta("b", "stop"), start=1, cached_len=2)
    app = application(ScriptedBackend([first, resumed]), encoder)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
        change: dict[str, Any] = {"prompt": [[5, 6], [7, 8]], "n": 2}
        if streamed:
            used = (await stream(client, COMPLETION, stream_options={"include_usage": True}, **change))[-1]["usage"]
        else:
            used = (await post(client, COMPLETION, **change))["usage"]
    assert used["prompt_tokens_details"] == {"cached_tokens": 2}
    assert used["prompt_tokens"] == 4


def test_the_bytes_of_tokens_join_to_those_of_the_text(encoder: PromptEncoder) -> None:
    text = "hello 日本語 🙂 café\n"
    assert b"".join(map(encoder.texts.data, encoder.encode_text(text)[1:])).decode() == text
    half = encoder.encode_text("日")[1]
    assert encoder.texts.name(half) == "bytes:\\xe6" and encoder.texts.text(half) == "\ufffd"
    assert encoder.texts.name(0) == "<s>" and encoder.texts.data(299_999) == b""


def test_tokens_of_a_byte_fallback_tokenizer() -> None:
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, "\u2581the": 1, "<0xE6>": 2, "cat": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(tokenizer)
    assert [texts.data(i) for i in range(4)] == [b"<unk>", b" the", b"\xe6", b"cat"]


TURN = {"role": "assistant", "content": "the cat"}


@pytest.mark.parametrize(
    ("last", "echoed"), [([TURN], "the cat"), ([TURN, {"role": "user", "content": "and then"}], ""), ([], "")]
)
async def test_a_chat_echoes_the_turn_that_it_goes_on_with(
    client: httpx.AsyncClient, last: list[dict[str, str]], echoed: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, *last]
    fields = {"messages": messages, "temperature": 0, "max_tokens": 4}
    if last == [TURN]:
        fields["continue_final_message"] = True
    plain = (await post(client, CHAT, **fields))["choices"][0]["message"]["content"]
    whole = (await post(client, CHAT, **fields, echo=True, n=2))["choices"]
    assert whole[0]["message"]["content"] == echoed + plain
    assert all(choice["message"]["content"].startswith(echoed) for choice in whole)
    reply = await client.post("/v1/chat/completions", json={**CHAT, **fields, "echo": True, "stream": True})
    chunks = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert streamed == echoed + plain

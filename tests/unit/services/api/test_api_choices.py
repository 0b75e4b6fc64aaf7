"""Log probabilities, several choices, best_of, echo: what clients get, over a real engine with a tiny model."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from farsight.core.request import SamplingParams
from farsight.services.api.answers.beam_search import PromptSearch
from farsight.services.api.generation import BeamParams, ChoiceResult
from farsight.services.api.requests import unnamed_request
from farsight.services.api.text.dialect import TokenTexts
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import (
    MODEL,
    VOCAB_SIZE,
    Client,
    ScriptedBackend,
    application,
    client_on,
    delta,
    ok,
    read_events,
    refusal,
)
from tests.unit.services.api.engine_backend import EngineBackend

SAME: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "seed": 1, "ignore_eos": True}
COMPLETION: dict[str, Any] = {**SAME, "prompt": "the cat"}
CHAT: dict[str, Any] = {**SAME, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def encoder(checkpoint: Path) -> PromptEncoder:
    return PromptEncoder(checkpoint)


@pytest.fixture
def backend(checkpoint: Path) -> EngineBackend:
    return EngineBackend(checkpoint)


@pytest.fixture
def client(backend: EngineBackend, encoder: PromptEncoder) -> Client:
    return client_on(application(backend, encoder))


def path_of(base: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in base else "/v1/completions"


async def post(client: Client, base: dict[str, Any], **change: Any) -> dict[str, Any]:
    return dict(await ok(client, path_of(base), **{**base, **change}))


async def stream(client: Client, base: dict[str, Any], **change: Any) -> list[dict[str, Any]]:
    response = await client.post(path_of(base), json={**base, **change, "stream": True})
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


async def test_completion_logprobs(client: Client, encoder: PromptEncoder, checkpoint: Path) -> None:
    choice = (await post(client, COMPLETION, logprobs=3))["choices"][0]
    found = choice["logprobs"]
    assert {name: len(items) for name, items in found.items()} == dict.fromkeys(
        ["tokens", "token_logprobs", "top_logprobs", "text_offset"], 8
    )
    prompt = encoder.encode_prompt("the cat").ids
    expected = reference_logprobs(checkpoint, prompt, ids_of_names(encoder, found["tokens"]))[len(prompt) - 1 :]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-3)
    for name, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) in (3, 4) and top[name] == logprob
        assert max(top.values()) <= 0
    assert found["text_offset"] == sorted(found["text_offset"]) and found["text_offset"][0] == 0


async def test_logprobs_0_is_of_the_token_alone(client: Client) -> None:
    found = (await post(client, COMPLETION, logprobs=0))["choices"][0]["logprobs"]
    assert [list(top) for top in found["top_logprobs"]] == [[name] for name in found["tokens"]]


async def test_chat_logprobs(client: Client) -> None:
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
async def test_streamed_logprobs_are_those_of_the_whole_answer(client: Client, base: dict[str, Any]) -> None:
    wanted = {"logprobs": True, "top_logprobs": 2} if base is CHAT else {"logprobs": 2}
    whole = (await post(client, base, **wanted))["choices"][0]["logprobs"]
    joined: dict[str, list[Any]] = {}
    for chunk in await stream(client, base, **wanted):
        for name, items in (chunk["choices"][0]["logprobs"] or {}).items():
            joined.setdefault(name, []).extend(items or [])
    assert joined == {name: items or [] for name, items in whole.items()}


@pytest.mark.parametrize("base", [COMPLETION, CHAT])
async def test_n_choices_are_those_of_their_own_seeds(client: Client, base: dict[str, Any]) -> None:
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
async def test_streamed_choices_are_interleaved(client: Client, base: dict[str, Any]) -> None:
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


async def test_best_of_shows_the_likeliest(client: Client) -> None:
    everything = (await post(client, COMPLETION, n=5, logprobs=0))["choices"]
    means = {choice["text"]: math.fsum(choice["logprobs"]["token_logprobs"]) / 8 for choice in everything}
    best = await post(client, COMPLETION, n=2, best_of=5)
    assert [choice["text"] for choice in best["choices"]] == sorted(means, key=lambda text: -means[text])[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in best["choices"])
    assert best["usage"]["completion_tokens"] == 40


async def test_echo(client: Client, encoder: PromptEncoder, checkpoint: Path) -> None:
    plain = await post(client, COMPLETION)
    echoed = await post(client, COMPLETION, echo=True, logprobs=1)
    choice = echoed["choices"][0]
    assert choice["text"] == "the cat" + plain["choices"][0]["text"]
    assert timeless(echoed)["usage"] == timeless(plain)["usage"]
    found = choice["logprobs"]
    prompt = encoder.encode_prompt("the cat").ids
    assert found["tokens"][: len(prompt)] == [encoder.texts.name(token_id) for token_id in prompt]
    assert (found["token_logprobs"][0], found["top_logprobs"][0]) == (None, None)
    output = ids_of_names(encoder, found["tokens"][len(prompt) :])
    assert found["token_logprobs"][1:] == pytest.approx(reference_logprobs(checkpoint, prompt, output), abs=1e-3)
    assert found["text_offset"][:2] == [0, 0], "<s> is no text"
    assert found["text_offset"][len(prompt)] == len("the cat")


async def test_echo_of_token_ids_and_without_logprobs(client: Client, encoder: PromptEncoder) -> None:
    ids = list(encoder.encode_prompt("the dog").ids)
    choices = (await post(client, COMPLETION, prompt=[ids, ids[1:]], echo=True, n=2))["choices"]
    texts = [choice["text"] for choice in choices]
    assert [text.startswith("<s>the dog") for text in texts] == [True, True, False, False]
    assert all(text.startswith("the dog") for text in texts[2:])
    assert all(choice["logprobs"] is None for choice in choices)


async def test_offsets_of_an_echoed_text_that_names_control_tokens(client: Client, encoder: PromptEncoder) -> None:
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


async def test_an_echo_that_ends_inside_a_character(client: Client, encoder: PromptEncoder) -> None:
    ids = list(encoder.encode_prompt("the €").ids)[:-1]
    choice = (await post(client, COMPLETION, prompt=ids, echo=True, logprobs=0, max_tokens=1))["choices"][0]
    assert choice["text"].startswith("<s>the \ufffd")
    assert choice["logprobs"]["text_offset"][len(ids)] == len("<s>the \ufffd")


async def test_echo_alone_scores_a_text(client: Client, encoder: PromptEncoder, checkpoint: Path) -> None:
    answer = await post(client, COMPLETION, max_tokens=0, echo=True, logprobs=0)
    choice = answer["choices"][0]
    prompt = encoder.encode_prompt("the cat").ids
    assert (choice["text"], choice["finish_reason"]) == ("the cat", "length")
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(
        reference_logprobs(checkpoint, prompt, []), abs=1e-3
    )
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("change", [{}, {"logprobs": 1}, {"max_tokens": 0}, {"n": 2, "prompt": [[6, 5], [9, 8]]}])
async def test_streamed_echo(client: Client, change: dict[str, Any]) -> None:
    whole = (await post(client, COMPLETION, echo=True, **change))["choices"]
    chunks = [event["choices"][0] for event in await stream(client, COMPLETION, echo=True, **change)]
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        if choice["logprobs"]:
            offsets = [offset for chunk in own for offset in chunk["logprobs"]["text_offset"]]
            assert offsets == choice["logprobs"]["text_offset"]


HOSTILE = {"min_tokens": 1, "stop_token_ids": list(range(VOCAB_SIZE)), "temperature": 1}


@pytest.mark.parametrize("change", [{}, {"n": 3}, {"logprobs": 2}, {"temperature": 0}, {"prompt": [[5, 6], [7]]}])
async def test_a_request_that_forbids_every_token_is_told_so_and_harms_no_other(
    client: Client, backend: EngineBackend, change: dict[str, Any]
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


@pytest.mark.parametrize("streamed", [False, True])
async def test_cached_tokens_are_counted_once_a_prompt(encoder: PromptEncoder, streamed: bool) -> None:
    """A resumed attempt may find more in the cache: that prompt was counted already."""
    first = dataclasses.replace(delta("a"), cached_len=1)
    resumed = dataclasses.replace(delta("b", "stop"), start=1, cached_len=2)
    client = client_on(application(ScriptedBackend([first, resumed]), encoder))
    change: dict[str, Any] = {"prompt": [[5, 6], [7, 8]], "n": 2}
    if streamed:
        used = (await stream(client, COMPLETION, stream_options={"include_usage": True}, **change))[-1]["usage"]
    else:
        used = (await post(client, COMPLETION, **change))["usage"]
    assert (used["prompt_tokens_details"], used["prompt_tokens"]) == ({"cached_tokens": 2}, 4)


def test_the_bytes_of_tokens_join_to_those_of_the_text(encoder: PromptEncoder) -> None:
    text = "hello 日本語 🙂 café\n"
    assert b"".join(map(encoder.texts.data, encoder.encode_prompt(text).ids[1:])).decode() == text
    half = encoder.encode_prompt("日").ids[1]
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
    client: Client, last: list[dict[str, str]], echoed: str
) -> None:
    messages = [{"role": "user", "content": "hi"}, *last]
    fields = {"messages": messages, "temperature": 0, "max_tokens": 4}
    if last == [TURN]:
        fields["continue_final_message"] = True
    plain = (await post(client, CHAT, **fields))["choices"][0]["message"]["content"]
    whole = (await post(client, CHAT, **fields, echo=True, n=2))["choices"]
    assert whole[0]["message"]["content"] == echoed + plain
    assert all(choice["message"]["content"].startswith(echoed) for choice in whole)
    chunks = await stream(client, CHAT, **fields, echo=True)
    streamed = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert streamed == echoed + plain


END = 1
BEAM_PROMPT = [40, 41, 42]
BEAMS: dict[str, Any] = {"prompt": BEAM_PROMPT, "use_beam_search": True, "return_token_ids": True, "logprobs": 0}


@pytest.fixture
def served(checkpoint: Path) -> Client:
    backend = EngineBackend(checkpoint)
    backend.model = dataclasses.replace(backend.model, end_ids=(END,))
    return client_on(application(backend, PromptEncoder(checkpoint)))


@torch.no_grad()
def reference(checkpoint: Path, num_beams: int, num_tokens: int, penalty: float) -> list[tuple[list[int], float]]:
    """The plain algorithm on the model itself: all continuations of each beam, no early end."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    live: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []

    def score(beam: tuple[list[int], float]) -> float:
        return beam[1] / (len(BEAM_PROMPT) + len(beam[0])) ** penalty

    for _ in range(num_tokens):
        logits = model(torch.tensor([BEAM_PROMPT + ids for ids, _ in live])).logits[:, -1].log_softmax(-1)
        grown = [
            ([*ids, token], total + float(row[token]), token)
            for (ids, total), row in zip(live, logits, strict=True)
            for token in range(row.shape[0])
        ]
        ended += [(ids[:-1], total) for ids, total, token in grown if token == END]
        live = sorted(((ids, total) for ids, total, token in grown if token != END), key=score, reverse=True)
        live = live[:num_beams]
    return sorted(ended + live, key=score, reverse=True)[:num_beams]


@pytest.mark.parametrize(("num_beams", "penalty"), [(1, 1.0), (3, 1.0), (4, 0.0), (3, 2.5)])
async def test_the_likeliest_outputs_are_found(
    served: Client, checkpoint: Path, num_beams: int, penalty: float
) -> None:
    body = {**BEAMS, "n": num_beams, "max_tokens": 5, "length_penalty": penalty}
    reply = await ok(served, "/v1/completions", **body)
    expected = reference(checkpoint, num_beams, 5, penalty)
    assert [choice["token_ids"] for choice in reply["choices"]] == [ids for ids, _ in expected]
    for choice, (ids, total) in zip(reply["choices"], expected, strict=True):
        assert choice["finish_reason"] == ("length" if len(ids) == 5 else "stop")
        if len(ids) == 5:
            assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(total, abs=1e-4)
    ended = sum(choice["finish_reason"] == "stop" for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == sum(len(ids) for ids, _ in expected) + ended


async def test_the_search_does_not_depend_on_how_tokens_are_drawn(served: Client) -> None:
    body = {**BEAMS, "n": 2, "max_tokens": 4, "ignore_eos": True}
    found = [await ok(served, "/v1/completions", **body, seed=seed, temperature=seed / 4) for seed in (0, 3)]
    assert found[0]["choices"] == found[1]["choices"]
    assert all(choice["finish_reason"] == "length" for choice in found[0]["choices"])


async def test_chats_and_several_prompts(served: Client) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "n": 3, "max_tokens": 3, "use_beam_search": True}
    choices = (await ok(served, "/v1/chat/completions", **chat))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    both = {**BEAMS, "prompt": [BEAM_PROMPT, [50, 51]], "n": 2, "max_tokens": 3}
    choices = (await ok(served, "/v1/completions", **both))["choices"]
    alone = (await ok(served, "/v1/completions", **{**both, "prompt": [50, 51]}))["choices"]
    assert [each["token_ids"] for each in choices[2:]] == [each["token_ids"] for each in alone]


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_search_ends_early_only_where_nothing_can_change(penalty: float) -> None:
    """Against one that runs to its limit, over all ways in which a few made-up tokens can fall."""
    prompt = unnamed_request((7, 8), SamplingParams(4))
    for values in itertools.product((-0.1, -1.0, -4.0), repeat=3):
        found = []
        for stops_early in (True, False):
            search = PromptSearch(prompt, BeamParams(2, penalty), (END,))
            while search.requests() if stops_early else len(search._live[0].token_ids) < 4:
                step = ChoiceResult(logprobs=[((9, END, 9, 10), (0.0, *values))])
                search.advance([step] * len(search._live))
            found.append([(beam.token_ids, round(beam.total, 9)) for beam in search.best()])
        assert found[0] == found[1], (values, penalty)


async def test_a_backend_without_log_probabilities(encoder: PromptEncoder) -> None:
    scripted = client_on(application(ScriptedBackend(), encoder))
    error = await refusal(scripted, "/v1/completions", prompt="hi", n=2, use_beam_search=True)
    assert error["param"] == "use_beam_search"


NO_SEARCH: list[tuple[dict[str, Any], str]] = [
    ({"stream": True}, "stream"),
    ({"n": 17}, "n"),
    ({"best_of": 3}, "best_of"),
    ({"stop": "x"}, "stop"),
    ({"guided_regex": "a+"}, "guided_regex"),
    ({"prompt_logprobs": 1}, "prompt_logprobs"),
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    ({"presence_penalty": 0.5}, "presence_penalty"),
    ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty"),
    ({"early_stopping": True}, "early_stopping"),
]


@pytest.mark.parametrize(("fields", "param"), NO_SEARCH)
async def test_what_a_search_does_not_serve_is_refused(
    client: Client, backend: ScriptedBackend, fields: dict[str, Any], param: str
) -> None:
    body = {"prompt": "hi", "n": 2, "use_beam_search": True, **fields}
    assert (await refusal(client, "/v1/completions", **body))["param"] == param
    assert not backend.calls

"""Pictures over HTTP: answers are those of transformers, and nothing is encoded twice."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.pictures import ask, chat_body, image_outcomes, picture, placeholders_of
from tests.e2e.server import LONG_S, Server, farsight, start_server
from tests.unit.engine.vision.models import IMAGE_ID, SeeingReference, save_chatting_model
from tests.unit.engine.vision.test_tokens import assert_likeliest

SHAPE = "qwen2_vl"
NUM_TOKENS = 24
BLOCK_SIZE = 16


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chatting_model(tmp_path_factory.mktemp("seeing"), SHAPE)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pictures")
    config = folder / "config.toml"
    config.write_text(f"[engine]\nblock_size = {BLOCK_SIZE}\n")
    flags = ("--model", str(model_dir), "--dtype", "float32", "--config", str(config))
    running = start_server(folder / "server.log", *flags)
    yield running
    running.stop()


async def test_tokens_are_those_of_transformers(seeing: Server, model_dir: Path) -> None:
    """One picture, several, and none, all of them in flight together."""
    first, second, third = picture(1, 50, 40), picture(2, 30, 70), picture(3, 33, 31)
    chats = [
        ["What is this?", first],
        [second, "and this", third, "?"],
        ["No picture at all."],
        ["What is this?", first, "And this?", second],
    ]
    async with aiohttp.ClientSession() as session:
        replies = await asyncio.gather(*(ask(session, seeing.base_url, chat_body(*chat)) for chat in chats))
    reference = SeeingReference(model_dir, SHAPE)
    for chat, reply in zip(chats, replies, strict=True):
        rgbs = [part for part in chat if not isinstance(part, str)]
        prompt_ids, output_ids = reply["prompt_token_ids"], reply["choices"][0]["token_ids"]
        assert prompt_ids.count(IMAGE_ID) == sum(placeholders_of(reference, rgb) for rgb in rgbs)
        assert reply["usage"]["prompt_tokens"] == len(prompt_ids)
        assert len(output_ids) == NUM_TOKENS
        assert_likeliest(reference, prompt_ids, rgbs, output_ids)


async def test_a_repeated_picture_is_encoded_once_and_its_prefix_is_found(seeing: Server) -> None:
    body = chat_body(picture(7, 64, 48), "Which colours?")
    async with aiohttp.ClientSession() as session:
        before = image_outcomes(seeing.base_url)
        once = await ask(session, seeing.base_url, body)
        again = [await ask(session, seeing.base_url, body) for _ in range(3)]
        after = image_outcomes(seeing.base_url)
    assert after["encoded"] - before.get("encoded", 0) == 1
    assert after["cached"] - before.get("cached", 0) == 3
    prompt_len = once["usage"]["prompt_tokens"]
    for reply in again:
        assert reply["choices"][0]["token_ids"] == once["choices"][0]["token_ids"]
        hits = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert hits >= (prompt_len - 1) // BLOCK_SIZE * BLOCK_SIZE, (
            f"{hits} of {prompt_len} tokens came from the prefix cache"
        )


async def test_an_encoder_is_a_component_like_others(seeing: Server) -> None:
    [row] = [row for row in seeing.get("/status")["actors"] if row["kind"] == "ImageEncoder"]
    assert row["name"] == "image-encoder-0" and row["state"] == "ready"
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://127.0.0.1:{row['http_port']}/healthz") as reply:
            assert reply.status == 200
        for count in ("2", "1"):
            command = farsight("scale", "image-encoder", count, "--port", str(seeing.port))
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=LONG_S)
            assert done.returncode == 0, done.stderr
            assert f"-> {count} " in done.stdout
            assert (await ask(session, seeing.base_url, chat_body(picture(8, 40, 40), "?")))["choices"]

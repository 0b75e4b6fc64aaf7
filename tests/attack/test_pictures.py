"""Hostile pictures over HTTP: each is read as transformers reads it, or refused; nothing leaks, and nothing is lost."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from PIL import Image
from transformers.image_utils import load_image

from farsight.engine.vision.decoder import DecodeLimits
from farsight.engine.vision.decoder_process import FORMATS
from tests.attack.hostile_pictures import hostile_picture
from tests.attack.victim import Victim
from tests.e2e.pictures import placeholders_of
from tests.e2e.server import LONG_S, Server, start_server
from tests.free_ports import free_port
from tests.unit.engine.vision.models import IMAGE_ID, SeeingReference, save_chatting_model
from tests.unit.engine.vision.test_tokens import assert_likeliest
from tests.unit.services.api.pictures.picture_host import PictureHost, http

pytestmark = pytest.mark.filterwarnings("ignore")  # Pillow warns of many of these files when this process reads them

SHAPE = "qwen2_vl"
AT_ONCE = 4
TOKENS = 2

PATIENT = f"[server]\ningress_replicas = 1\n[images]\nurl_timeout_s = {LONG_S}\nwait_s = {LONG_S}\n"
"""A busy machine makes no picture late: this process sends them and computes the reference beside."""

MAX_GROWTH = 32 << 20
"""Memory that each process may take over the last three quarters of the pictures, beside what it has by then. Each
process that kept 50 KiB of each of 750 pictures would take more, and the pictures have megabytes."""


@pytest.fixture(scope="module")
def host_port() -> int:
    return free_port()


@pytest.fixture
async def host(host_port: int) -> AsyncIterator[PictureHost]:
    async with PictureHost().serving(port=host_port) as host:
        yield host


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chatting_model(tmp_path_factory.mktemp("seeing"), SHAPE)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory, model_dir: Path, host_port: int) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "config.toml").write_text(PATIENT)
    flags = ("--model", str(model_dir), "--dtype", "float32", "--config", str(folder / "config.toml"))
    server = start_server(folder / "server.log", *flags, "--allow-image-urls", f"127.0.0.1:{host_port}")
    yield server
    server.stop()


def expected_pixels(data: bytes) -> np.ndarray | None:
    """What transformers reads; None where it does not, or where the limits or the model's shape forbid it."""
    limits = DecodeLimits()
    try:
        with Image.open(BytesIO(data), formats=FORMATS) as image:
            width, height = image.size
            if width * height > limits.max_pixels or max(width, height) > limits.max_side:
                return None
            return np.asarray(load_image(image))
    except Exception:  # a decoder raises what it likes for a damaged file
        return None


def memory_of(server: Server) -> dict[str, int]:
    """Bytes of each component's process, and of the children of each."""
    rows = server.get("/status")["actors"]
    found: dict[str, int] = {}
    for name, pid in {row["name"]: row["pid"] for row in rows}.items():
        process = psutil.Process(pid)
        found[name] = process.memory_info().rss
        for child in process.children(recursive=True):
            for module in ("decoder_process", "template_process", "body_workers"):
                if module in " ".join(child.cmdline()):
                    found[f"{name}: {module}"] = child.memory_info().rss
    return found


async def test_hostile_pictures_are_read_right_or_refused(
    seeing: Server, model_dir: Path, host: PictureHost, volume: float
) -> None:
    """A tenth is fetched by URL. The reference computes each answer that is given."""
    victim = Victim(seeing)
    victim.remember()
    reference = SeeingReference(model_dir, SHAPE)
    outcomes: Counter[tuple[str, int]] = Counter()
    turns = asyncio.Semaphore(AT_ONCE)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        async with turns:
            name, data = hostile_picture(number)
            reply = await client.post("/v1/chat/completions", json=_chat(_url(host, number, data)))
            victim.statuses[reply.status_code] += 1
            outcomes[name, reply.status_code] += 1
            await asyncio.to_thread(_check, reference, f"{number}, {name}", data, reply)

    async def run(numbers: range) -> None:
        async with httpx.AsyncClient(base_url=seeing.base_url, timeout=LONG_S) as client:
            await asyncio.gather(*(one(client, number) for number in numbers))
        await asyncio.to_thread(seeing.wait_idle)

    total = int(1000 * volume)
    await run(range(total // 4))
    before = memory_of(seeing)
    await run(range(total // 4, total))
    after = memory_of(seeing)
    grown = {name: size - before.get(name, 0) for name, size in after.items() if name in before}
    shown = {name: f"{after[name] / 2**20:.1f} MiB, {size / 2**20:+.1f}" for name, size in grown.items()}
    print(f"{dict(victim.statuses)}\n{sorted(outcomes.items())}\n{shown}")  # noqa: T201
    assert set(victim.statuses) == {200, 400}, outcomes
    assert victim.statuses[200] + victim.statuses[400] == total
    assert max(grown.values()) < MAX_GROWTH, shown
    victim.check_unharmed()


def _url(host: PictureHost, number: int, data: bytes) -> str:
    if number % 10 != 9:
        return f"data:image/png;base64,{base64.b64encode(data).decode()}"
    host.answers[f"/{number}"] = http(data)
    return f"http://127.0.0.1:{host.port}/{number}"


def _chat(url: str) -> dict[str, Any]:
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": TOKENS}
    return body | {"ignore_eos": True, "return_token_ids": True}


def _check(reference: SeeingReference, what: str, data: bytes, reply: httpx.Response) -> None:
    rgb = expected_pixels(data)
    if rgb is not None and max(rgb.shape[:2]) > 200 * min(rgb.shape[:2]):
        rgb = None  # no model of this family takes it, nor does its processor
    if rgb is None:
        assert reply.status_code == 400, f"{what}: {reply.text}"
        error = reply.json()["error"]
        assert error["param"] == "messages[0].content[1].image_url.url" and "expected" in error["message"], error
        assert "/root" not in error["message"] and "0x" not in error["message"], error
        return
    assert reply.status_code == 200, f"{what}: {reply.text}"
    found = reply.json()
    prompt_ids = found["prompt_token_ids"]
    assert prompt_ids.count(IMAGE_ID) == placeholders_of(reference, rgb), what
    assert_likeliest(reference, prompt_ids, [rgb], found["choices"][0]["token_ids"])

"""What pictures do to the text streams beside them: ``python -m benchmarks.mixed_pictures``.

A real server of a small random Qwen2-VL. ``--streams`` clients ask for one answer after the other, by turns in two
kinds of phases. In both, half of them send texts. In the phases "pictures" the other half show pictures that are
new to the server; in the phases "text" they send as many random tokens. Clients begin one after the other, for a
start of all at once would be the largest gap of either phase; answers that begin in that time do not count. Measured is
the largest gap between two events of each answer of the first half; printed is its 99th percentile in either kind of
phase, and the ratio of the two (1.2 is asked at most). The machine's load is printed, since a busy one decides both.

At the end ``--again`` pictures are shown twice, each time with another question behind the picture. Printed is how many
were encoded the second time, and which share of the prompts' tokens came from the prefix cache.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import os
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from benchmarks.common.seeing_model import PIXELS_OF_A_TOKEN, save_seeing_model
from benchmarks.common.servers import RunningServer, ServerCommand, free_port
from benchmarks.make_model import VOCAB_SIZE

READY_S = 300.0
WIDTH, HEIGHT = 448, 336
IMAGE_TOKENS = WIDTH * HEIGHT // PIXELS_OF_A_TOKEN
MODEL = "seeing"
KINDS = ("text", "pictures")
LEAD_S = 3.0
"""Within so long all clients of a phase begin."""

_ENCODED = re.compile(r'^farsight:images_total\{[^}]*outcome="encoded"[^}]*\} (\S+)', re.MULTILINE)


@dataclass(slots=True)
class Phase:
    """What was seen in the phases of one kind.

    Attributes:
        gaps_s: The largest gap of each answer to a text of the first half that began when all clients were there.
        num_others: Answers to the other half.
    """

    gaps_s: list[float] = field(default_factory=list)
    num_others: int = 0


class Clients:
    """Clients of one server.

    Args:
        num_tokens: Length of each answer.
    """

    def __init__(self, url: str, num_tokens: int) -> None:
        self._draw = random.Random(1)
        self._numbers = itertools.count()
        self._num_tokens = num_tokens
        self._jpeg = _jpeg()
        connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
        self._session = aiohttp.ClientSession(url, connector=connector, timeout=timeout)

    async def close(self) -> None:
        await self._session.close()

    async def run(self, phase: Phase, kind: str, number: int, seconds: float) -> None:
        """One phase, and ``LEAD_S`` before it."""
        begin = time.monotonic() + LEAD_S
        end = begin + seconds
        delays = [LEAD_S * index / number for index in range(number)]
        texts = [self._texts(phase, delay, begin, end) for delay in delays[::2]]
        others = [self._others(phase, kind, delay, end) for delay in delays[1::2]]
        await asyncio.gather(*texts, *others)

    async def _texts(self, phase: Phase, delay: float, begin: float, end: float) -> None:
        await asyncio.sleep(delay)
        while (began := time.monotonic()) < end:
            gap_s = await self._largest_gap_s(*self._text(32))
            if began >= begin:
                phase.gaps_s.append(gap_s)

    async def _others(self, phase: Phase, kind: str, delay: float, end: float) -> None:
        await asyncio.sleep(delay)
        while time.monotonic() < end:
            await self._largest_gap_s(*(self._picture() if kind == "pictures" else self._text(IMAGE_TOKENS)))
            phase.num_others += 1

    async def shown_again(self, number: int) -> dict[str, float]:
        """So many new pictures, each shown twice: pictures encoded the second time, and the share of tokens found."""
        bodies = [self._picture()[1] for _ in range(number)]
        await asyncio.gather(*(self._asked(body, "What is this?") for body in bodies))
        before = await self._encoded()
        usages = await asyncio.gather(*(self._asked(body, "Which colours has it?") for body in bodies))
        found = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        share = found / sum(usage["prompt_tokens"] for usage in usages)
        return {"encoded": await self._encoded() - before, "prefix_hit_rate": round(share, 3)}

    async def _asked(self, body: dict[str, Any], question: str) -> dict[str, Any]:
        """The usage of an answer to a picture with a question behind it."""
        [message] = body["messages"]
        content = [*message["content"], {"type": "text", "text": question}]
        fields = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": content}]}
        async with self._session.post("/v1/chat/completions", json=fields) as reply:
            answer = await reply.json()
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {answer}")
            usage: dict[str, Any] = answer["usage"]
        return usage

    async def _encoded(self) -> float:
        async with self._session.get("/metrics") as reply:
            return sum(map(float, _ENCODED.findall(await reply.text())))

    def _text(self, length: int) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {"prompt": [self._draw.randrange(3, VOCAB_SIZE) for _ in range(length)]}

    def _picture(self) -> tuple[str, dict[str, Any]]:
        """A file that the server has not seen: a number behind the same picture, for making one would delay streams."""
        data = self._jpeg + next(self._numbers).to_bytes(8)
        url = f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"
        return "/v1/chat/completions", {
            "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        }

    async def _largest_gap_s(self, path: str, body: dict[str, Any]) -> float:
        fields = {"model": MODEL, "max_tokens": self._num_tokens, "ignore_eos": True, "temperature": 0, "stream": True}
        largest, before = 0.0, 0.0
        async with self._session.post(path, json=body | fields) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{reply.status}: {await reply.text()}")
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    if b'"error"' in line:
                        raise RuntimeError(line.decode())
                    now = time.monotonic()
                    largest, before = max(largest, now - before if before else 0.0), now
        return largest


def _jpeg() -> bytes:
    coarse = np.random.default_rng(0).integers(0, 256, (HEIGHT // 28, WIDTH // 28, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(np.kron(coarse, np.ones((28, 28, 1), np.uint8))).save(file, "JPEG")
    return file.getvalue()


async def measure(url: str, args: argparse.Namespace) -> tuple[dict[str, Phase], dict[str, float]]:
    """Phases by turns, of which the first of each kind warms up and is dropped; then pictures that are shown again."""
    clients = Clients(url, args.tokens)
    phases = {kind: Phase() for kind in KINDS}
    try:
        for kind in KINDS:
            await clients.run(Phase(), kind, args.streams, args.seconds / 2)
        for _ in range(args.rounds):
            for kind in KINDS:
                await clients.run(phases[kind], kind, args.streams, args.seconds)
        again = await clients.shown_again(args.again)
    finally:
        await clients.close()
    return phases, again


def report(phases: dict[str, Phase], again: dict[str, float]) -> dict[str, Any]:
    p99 = {kind: float(np.percentile(phases[kind].gaps_s, 99)) for kind in KINDS}
    found: dict[str, Any] = {f"{kind}_gap_p99_ms": round(1e3 * p99[kind], 1) for kind in KINDS}
    found |= {f"{kind}_answers": [len(phases[kind].gaps_s), phases[kind].num_others] for kind in KINDS}
    found |= {"ratio": round(p99["pictures"] / p99["text"], 3), "again": again}
    return found | {"load": [round(x, 1) for x in os.getloadavg()]}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each phase")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--again", type=int, default=32, help="pictures that are shown twice at the end")
    args = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_dir = save_seeing_model(folder / MODEL, IMAGE_TOKENS)
        port = free_port()
        flags = ["--model", str(model_dir), "--port", str(port)]
        server = RunningServer(
            ServerCommand([sys.executable, "-m", "services.cli", "serve", *flags], port, MODEL), folder / "server.log"
        )
        try:
            server.wait_until_ready(READY_S)
            print(json.dumps(report(*asyncio.run(measure(server.command.base_url, args)))))
        finally:
            server.stop()


if __name__ == "__main__":
    main()

"""Throughput on pictures beside ``transformers``: ``python -m benchmarks.pictures_beside_transformers``.

The live counterpart of Past-Future's Table 2, which reports the throughput of multimodal models, on the embedded vision
model: our server with a number of clients, ``transformers`` picture by picture, and ``transformers`` in static batches.
All three answer the same questions about the same pictures, decode their PNG files, compute in float32 with the same
number of threads, and write the same number of tokens. They take turns. Each round has new pictures, so no cache helps.
``taskset -c 0`` before it keeps everything, server and clients too, on one processor.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

from benchmarks.common.servers import RunningServer, ServerCommand, free_port
from farsight.services.bench.report import markdown_table
from farsight.services.launch.launch import VISION_MODEL, VISION_NAME
from lab.embedded_vision.evaluate import asked_pictures
from lab.embedded_vision.model import prompt_ids
from lab.embedded_vision.words import TASKS

READY_S = 300.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A question about a picture, as the bytes of a PNG file."""

    png: bytes
    question: str


@dataclass(frozen=True, slots=True)
class Turn:
    """What one system did in one turn."""

    seconds: float
    texts: list[str]


def drawn(count: int, seed: int) -> list[Asked]:
    """Pictures of all tasks by turns."""
    names = list(TASKS)
    each = -(-count // len(names))
    found = [asked for name in names for asked in asked_pictures(name, each, seed, "training")]
    random.Random(seed).shuffle(found)
    return [Asked(_png(picture), question.text) for picture, question in found[:count]]


def _png(picture: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    return file.getvalue()


class Transformers:
    """The model in ``transformers``.

    Args:
        num_tokens: Length of each answer.
    """

    def __init__(self, num_tokens: int) -> None:
        self._model = LlavaForConditionalGeneration.from_pretrained(VISION_MODEL, dtype=torch.float32).eval()
        self._processor = AutoImageProcessor.from_pretrained(VISION_MODEL)
        self._tokenizer = AutoTokenizer.from_pretrained(VISION_MODEL)
        self._num_tokens = num_tokens

    @torch.inference_mode()
    def run(self, asked: Sequence[Asked], batch: int) -> Turn:
        """Answers in batches of that size, one after the other."""
        began, texts = time.perf_counter(), list[str]()
        for start in range(0, len(asked), batch):
            texts += self._answers(asked[start : start + batch])
        return Turn(time.perf_counter() - began, texts)

    def _answers(self, asked: Sequence[Asked]) -> list[str]:
        pictures = [Image.open(io.BytesIO(each.png)) for each in asked]
        prompts = [{"input_ids": prompt_ids(each.question)} for each in asked]
        padded = self._tokenizer.pad(prompts, return_tensors="pt")
        length = padded["input_ids"].shape[1]
        pixels = self._processor(images=pictures, return_tensors="pt")["pixel_values"]
        tokens = self._num_tokens
        out = self._model.generate(
            **padded, pixel_values=pixels, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False
        )
        found: list[str] = self._tokenizer.batch_decode(out[:, length:], skip_special_tokens=True)
        return found


async def ask_all(url: str, asked: Sequence[Asked], num_tokens: int, clients: int) -> Turn:
    """Answers of our server, of which ``clients`` are asked for at a time."""
    waiting = iter(enumerate(asked))
    texts = [""] * len(asked)

    async def client(session: aiohttp.ClientSession) -> None:
        for index, each in waiting:
            async with session.post("/v1/chat/completions", json=_body(each, num_tokens)) as reply:
                found = await reply.json()
                if reply.status != 200:
                    raise RuntimeError(f"{reply.status}: {found}")
            texts[index] = found["choices"][0]["message"]["content"]

    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(600)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as session:
        began = time.perf_counter()
        await asyncio.gather(*(client(session) for _ in range(clients)))
        return Turn(time.perf_counter() - began, texts)


def _body(asked: Asked, num_tokens: int) -> dict[str, object]:
    picture = {"url": "data:image/png;base64," + base64.b64encode(asked.png).decode()}
    content = [{"type": "image_url", "image_url": picture}, {"type": "text", "text": asked.question}]
    # min_tokens, as transformers has it: EOS is not chosen before, so the tokens of both are the same.
    fields = {"max_tokens": num_tokens, "min_tokens": num_tokens, "temperature": 0}
    return {"model": VISION_NAME, "messages": [{"role": "user", "content": content}], **fields}


def measure(url: str, args: argparse.Namespace) -> dict[str, list[Turn]]:
    """Turns of every system; the first round warms up and is dropped."""
    reference = Transformers(args.tokens)
    systems: dict[str, Callable[[list[Asked]], Turn]] = {
        "farsight": lambda asked: asyncio.run(ask_all(url, asked, args.tokens, args.clients)),
        "transformers, one by one": lambda asked: reference.run(asked, 1),
        f"transformers, batches of {args.batch}": lambda asked: reference.run(asked, args.batch),
    }
    turns: dict[str, list[Turn]] = {name: [] for name in systems}
    for round_number in range(args.rounds + 1):
        asked = drawn(args.pictures, args.seed + round_number)
        for name, run in systems.items():
            turn = run(asked)
            if round_number:
                turns[name].append(turn)
    return turns


def report(turns: dict[str, list[Turn]], num_tokens: int) -> str:
    """A table: pictures and tokens a second (medians of the rounds), the ratio, and how many answers are equal."""
    ours = turns["farsight"]
    rows = []
    for name, own in turns.items():
        rate = statistics.median(len(turn.texts) / turn.seconds for turn in own)
        ratio = statistics.median(turn.seconds / first.seconds for turn, first in zip(own, ours, strict=True))
        pairs = [
            pair for turn, first in zip(own, ours, strict=True) for pair in zip(turn.texts, first.texts, strict=True)
        ]
        equal = sum(left == right for left, right in pairs)
        rows.append([name, f"{rate:.1f}", f"{rate * num_tokens:.0f}", f"{ratio:.2f}", f"{equal} of {len(pairs)}"])
    return markdown_table(["", "pictures/s", "tokens/s", "ours is faster by", "answers equal ours"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=256, help="of each round")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--clients", type=int, default=32, help="of our server, at once")
    parser.add_argument("--batch", type=int, default=32, help="of transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="that each system computes tokens with")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        (folder / "config.toml").write_text(f"[images]\nnum_threads = {args.threads}\n")
        flags = ["--model", "embedded-vision", "--dtype", "float32", "--threads", str(args.threads)]
        flags += ["--config", str(folder / "config.toml"), "--benchmark-mode", "--port", str(port)]
        words = [sys.executable, "-m", "farsight.services.cli", "serve", *flags]
        server = RunningServer(ServerCommand(words, port, VISION_NAME), folder / "server.log")
        try:
            server.wait_until_ready(READY_S)
            turns = measure(server.command.base_url, args)
        finally:
            server.stop()
    print(report(turns, args.tokens))
    print(json.dumps({"load": [round(each, 1) for each in os.getloadavg()], **vars(args)}))


if __name__ == "__main__":
    main()

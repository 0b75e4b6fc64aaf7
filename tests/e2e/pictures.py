"""Chats with pictures, as a client of a server of a small random model that sees sends them."""

from __future__ import annotations

import base64
import io
import re
import urllib.request
from typing import Any

import aiohttp
import numpy as np
from PIL import Image

from tests.unit.engine.vision.models import SeeingReference
from tests.unit.engine.vision.test_tokens import picture

__all__ = ["ask", "chat_body", "data_url", "image_outcomes", "picture", "placeholders_of"]


def data_url(rgb: np.ndarray, kind: str = "PNG", **options: Any) -> str:
    """A picture as clients send it."""
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, kind, **options)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def chat_body(*parts: str | np.ndarray, max_tokens: int = 24, **fields: Any) -> dict[str, Any]:
    """A greedy chat of one message of texts and pictures; the answer has the token ids too."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": max_tokens}
    return body | {"ignore_eos": True, "return_token_ids": True} | fields


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """The answer to a chat."""
    async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as reply:
        found: dict[str, Any] = await reply.json()
        assert reply.status == 200, found
    return found


def placeholders_of(reference: SeeingReference, rgb: np.ndarray) -> int:
    """Tokens of a picture of Qwen2-VL's shape, as transformers' processor has it: four patches are one."""
    return int(reference.inputs([rgb])["image_grid_thw"].prod()) // 4


def image_outcomes(url: str) -> dict[str, int]:
    """How many pictures were encoded, found encoded, and refused so far."""
    with urllib.request.urlopen(f"{url}/metrics") as reply:
        text = reply.read().decode()
    found = re.findall(r'^farsight:images_total\{[^}]*outcome="(\w+)"[^}]*\} ([\d.e+]+)', text, re.MULTILINE)
    counts: dict[str, int] = {}
    for outcome, count in found:
        counts[outcome] = counts.get(outcome, 0) + int(float(count))
    return counts

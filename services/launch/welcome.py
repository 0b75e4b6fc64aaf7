"""What a user can do with a service that has just started."""

from __future__ import annotations

import base64
import json
import shlex
from pathlib import Path
from typing import Any, Literal

Example = Literal["embedded", "vision", "chat", "text", "embeddings", "scores"]
"""Which request fits the model: one of the two embedded models, one that chats, completes, embeds or compares texts."""

_PICTURE = Path(__file__).parents[1] / "embedded_vision" / "example.png"


def welcome(url: str, model: str, example: Example, key: str) -> list[str]:
    """A request that fits the model, and addresses.

    Args:
        model: Its name.
        key: Words of curl that bring an API key; empty where none is needed.
    """
    path = _PATHS.get(example, "/v1/chat/completions")
    generates = example not in ("embeddings", "scores")
    fields = {"model": model, **(_seeing() if example == "vision" else _EXAMPLES[example])}
    post = f"curl{' -N' if generates else ''} {url}{path} -H 'Content-Type: application/json'{key}"
    body = shlex.quote(json.dumps(fields | ({"stream": True} if generates else {})))
    playground = f"   Playground: {url}/play" if generates else ""
    return [
        f"Try:\n  {post} \\\n    -d {body}",
        f"OpenAI API: {url}/v1   First: curl {url}/v1/models{key}   Stop: Ctrl-C",
        f"Dashboard: {url}/dashboard{playground}",
    ]


def _seeing() -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(_PICTURE.read_bytes()).decode()
    picture = {"type": "image_url", "image_url": {"url": url}}
    question = {"type": "text", "text": "Count each kind."}
    return {"messages": [{"role": "user", "content": [picture, question]}], "temperature": 0}


_EXAMPLES: dict[Example, dict[str, Any]] = {
    "embedded": {
        "messages": [
            {"role": "system", "content": "Write in upper case:"},
            {"role": "user", "content": "hello world"},
        ],
        "temperature": 0,
    },
    "chat": {"messages": [{"role": "user", "content": "Say hello in three languages."}], "max_tokens": 64},
    "text": {"prompt": "Once upon a time", "max_tokens": 32},
    "embeddings": {"input": ["a cat on a mat", "a dog in a bog"]},
    "scores": {"text_1": "Where do cats sleep?", "text_2": ["A cat sleeps on a mat.", "Ships sail on the sea."]},
}
_PATHS: dict[Example, str] = {"text": "/v1/completions", "embeddings": "/v1/embeddings", "scores": "/v1/score"}
"""Paths of the examples that are no chats."""

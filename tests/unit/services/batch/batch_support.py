"""Input files and an application over the scripted backend of the HTTP tests."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from farsight.services.api.app import build_app
from farsight.services.api.batches.lines import Batch, LineResult, answered, read_batch
from farsight.services.api.text.prompts import PromptEncoder
from tests.unit.services.api.api_support import MODEL, ScriptedBackend, Step, delta, write_model_dir

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
_BASE = 100  # the tiny model has no token ids for more than 300 numbers


def request(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": MODEL, **prompt, **body}}


def write_batch(path: Path, requests: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests), encoding="utf-8")
    return path


def numbered(path: Path, num_lines: int) -> Batch:
    """Line ``i`` has the id ``id-i`` and a prompt of two token ids that stand for ``i``; see ``number_of``."""
    requests = [request(f"id-{i}", prompt=list(divmod(i, _BASE))) for i in range(num_lines)]
    return read_batch(write_batch(path, requests))


def number_of(prompt: Sequence[int]) -> int:
    return prompt[0] * _BASE + prompt[1]


def result(custom_id: str, text: str = "x", status: int = 200) -> LineResult:
    return answered(custom_id, status, "req_1", json.dumps({"text": text}).encode())


def read_output(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def served(folder: Path, backend: ScriptedBackend) -> ASGIApp:
    app: ASGIApp = build_app(backend, PromptEncoder(write_model_dir(folder)))
    return app


def echo(prompt_ids: tuple[int, ...], wait_s: float = 0.0) -> Sequence[Step]:
    """The script of a backend that answers with the number in the prompt."""
    return (wait_s, delta(str(number_of(prompt_ids)), "stop"))


def answering(
    answer: Callable[[int], Awaitable[tuple[int, dict[str, str], Any]]],
) -> Callable[[Scope, Receive, Send], Awaitable[None]]:
    """An application that hands the number in the prompt to ``answer`` and sends its status, headers and body."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        status, headers, body = await answer(number_of(json.loads(message["body"])["prompt"]))
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})
        await send({"type": "http.response.body", "body": json.dumps(body).encode()})

    return app

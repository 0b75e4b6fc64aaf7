"""The example that resumes streams, over connections that break at each place where one can."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import httpx
import pytest


def example() -> ModuleType:
    """The example by its path: another package may be called ``examples`` as well."""
    path = Path(__file__).parents[5] / "examples" / "resuming.py"
    spec = importlib.util.spec_from_file_location("resuming_example", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


resuming = example()
STREAM_ID = "a" * 32
EVENTS = [f'id: {STREAM_ID}-{number}\ndata: {{"choices": [{{"text": "{number} "}}]}}\n\n' for number in (1, 2, 3)]
EVENTS.append(f"id: {STREAM_ID}-4\ndata: [DONE]\n\n")
BODY = {"model": "m", "prompt": "hello", "stream": True}


class Broken(httpx.SyncByteStream):
    """Sends some bytes, then breaks."""

    def __init__(self, data: str) -> None:
        self._data = data

    def __iter__(self) -> Iterator[bytes]:
        if self._data:
            yield self._data.encode()
        raise httpx.ReadError("connection reset")


class Server(httpx.BaseTransport):
    """Answers with what it is given, one after the other, and notes what was asked."""

    def __init__(self, *answers: int | httpx.SyncByteStream | Exception) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, request.headers.get("Last-Event-ID", "")))
        answer = self._answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, int):
            return httpx.Response(answer, json={"error": {"message": "no"}})
        return httpx.Response(200, headers={"X-Farsight-Stream": STREAM_ID}, stream=answer)


def whole(after: int = 0) -> httpx.ByteStream:
    return httpx.ByteStream("".join(EVENTS[after:]).encode())


def read(server: Server) -> str:
    client = httpx.Client(transport=resuming.ResumingTransport(server))
    with client.stream("POST", "http://test/v1/completions", json=BODY) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "RETRY_S", 0.0)


@pytest.mark.parametrize(
    ("answers", "asked"),
    [
        ([Broken(EVENTS[0] + EVENTS[1][:20]), whole(1)], [("POST", ""), ("GET", f"{STREAM_ID}-1")]),
        ([Broken(""), whole()], [("POST", ""), ("GET", "")]),
        ([Broken(""), 503, Broken(""), whole()], [("POST", ""), ("GET", ""), ("GET", ""), ("GET", "")]),
        ([httpx.ReadError("reset"), whole()], [("POST", ""), ("POST", "")]),
        ([Broken(""), 404, whole()], [("POST", ""), ("GET", ""), ("POST", "")]),
        (
            [Broken(""), 404, Broken(""), 404, whole()],
            [("POST", ""), ("GET", ""), ("POST", ""), ("GET", ""), ("POST", "")],
        ),
    ],
    ids=["an event", "headers", "headers, twice", "before the headers", "unknown", "unknown, twice"],
)
def test_nothing_is_missing_wherever_a_connection_breaks(
    answers: list[int | httpx.SyncByteStream | Exception], asked: list[tuple[str, str]]
) -> None:
    server = Server(*answers)
    assert read(server) == "1 2 3 "
    assert server.asked == asked


def test_a_stream_that_is_lost_after_an_event_is_an_error() -> None:
    with pytest.raises(httpx.ReadError, match="cannot be resumed"):
        read(Server(Broken(EVENTS[0]), 404))

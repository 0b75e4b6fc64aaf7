"""Which of our files run between an HTTP request and its first token.

    python -m tools.request_path                     # the list, and how many files it has
    python -m tools.request_path --preset farsight   # under another preset

A whole service runs in this process, without Ray: the HTTP application, an ingress replica, Router, Scheduler and
worker, real ones. The second of two equal requests is traced, when everything has been imported and looked up once.
A file counts if a function or a method of it ran, in any thread, whether for the request or beside it (reports,
announcements): what runs meanwhile has to be read as well.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import httpx
from fastapi import FastAPI
from starlette.types import Message

from farsight.core.config.engine import EngineConfig, ModelConfig
from farsight.core.config.learning import LogConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.services.api.app import build_app
from farsight.services.api.text.prompts import PromptEncoder
from farsight.services.launch.launch import EMBEDDED_MODEL
from farsight.services.local.system import local_system
from tests.unit.actors.components import until

ROOT = Path(__file__).parents[1]
WITHIN_S = 300.0
BODY = {"model": "m", "prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "stream": True}
_HOUSE = ROOT / "farsight"


class FileTrace:
    """Counts calls by file and function while it is open, in every thread that began after it was made."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()
        self._is_open = False
        threading.setprofile(self._see)

    def open(self) -> None:
        self._is_open = True
        sys.setprofile(self._see)

    def close(self) -> None:
        self._is_open = False
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if self._is_open and event == "call" and code.co_filename.startswith(f"{_HOUSE}/"):
            self._calls[code.co_filename, code.co_qualname] += 1

    def files(self) -> dict[str, Counter[str]]:
        """Calls of each function of each of our files, by the file's path below the root."""
        found: dict[str, Counter[str]] = {}
        for (name, function), count in sorted(self._calls.items()):
            found.setdefault(str(Path(name).relative_to(_HOUSE)), Counter())[function] = count
        return found


async def trace_request(preset: str, directory: Path) -> dict[str, Counter[str]]:
    """The files that ran between a request and its first token, and how often each of their functions was called."""
    config = FarsightConfig(
        model=ModelConfig(name="m", dtype="float32"),
        engine=EngineConfig(kv_memory="16MiB", num_threads=1),
        scheduler=SchedulerConfig(preset=preset),
        log=LogConfig(path=str(directory / "log.sqlite")),
    )
    trace = FileTrace()
    async with asyncio.timeout(WITHIN_S), local_system(config, forecasts=False) as house, house.ingress() as backend:
        app = build_app(backend, PromptEncoder(EMBEDDED_MODEL))
        await until_first_token(app, lambda: None)
        machine = house.machine()
        await until(lambda: machine.num_waiting + machine.num_admitted + backend.num_open == 0)
        trace.open()
        try:
            await until_first_token(app, trace.close)
        finally:
            trace.close()
    return trace.files()


async def until_first_token(app: FastAPI, on_token: Callable[[], None]) -> None:
    """Sends one request, and leaves when its first token has come, as a client that hangs up.

    Without an HTTP client, which would run code of its own meanwhile.

    Args:
        on_token: Called when the event with the first token is to be sent.
    """
    left = asyncio.Event()
    body = httpx.Request("POST", "http://test/v1/completions", json=BODY)
    messages = iter([{"type": "http.request", "body": body.content, "more_body": False}])

    async def receive() -> Message:
        message = next(messages, None)
        if message is None:
            await left.wait()
            return {"type": "http.disconnect"}
        return message

    async def send(message: Message) -> None:
        if b"data:" in message.get("body", b"") and not left.is_set():
            on_token()
            left.set()

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(key.lower(), value) for key, value in body.headers.raw],
        "client": ("127.0.0.1", 1),
        "server": ("test", 80),
    }
    await app(scope, receive, send)


def main(argv: list[str] | None = None) -> int:
    """Prints the list."""
    parser = argparse.ArgumentParser(prog="python -m tools.request_path", description=__doc__)
    parser.add_argument("--preset", default="fcfs", help="the preset that decides (default: fcfs)")
    parser.add_argument("--functions", action="store_true", help="name the functions that ran, not only their files")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        files = asyncio.run(trace_request(args.preset, Path(directory)))
    for name, calls in files.items():
        print(f"{calls.total():7d}  {name}")
        for function, count in calls.items() if args.functions else ():
            print(f"{count:15d}  {function}")
    print(f"{len(files)} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())

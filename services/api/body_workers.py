"""Processes that read large bodies, so that the event loop and the interpreter of the streams never do.

A large body goes to one of a few child processes as it came. The child parses it, checks its fields and tokenises its
prompts (``read_body``), and sends back the ``Generation`` or the error. A child ends with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import operator
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil

from farsight.core.child_process import LENGTH, framed, start_child
from farsight.core.codec import decode, encode
from farsight.core.config.engine import ModelConfig
from farsight.core.errors import CapacityError, InvalidValueError
from farsight.core.request import Request
from farsight.services.api.backend import ModelInfo
from farsight.services.api.bodies import checked, parse_object
from farsight.services.api.errors import ApiError, as_api_error, unavailable
from farsight.services.api.fields import MAX_PROMPTS
from farsight.services.api.generation import Generation
from farsight.services.api.requests import make_generation
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.api.text.prompts import PromptEncoder

NUM_PROCESSES = 2
"""In each ingress replica; each starts when there is a body for it, and stays."""

MAX_WAITING_BYTES = 64 * 1024 * 1024
"""Bodies that wait for a process or are being read; beyond it further ones get 429."""

READ_S = 60.0
"""A process that has been at one body for so long is ended. The body gets 503, as others had the processors."""

READ_CPU_S = 30.0
"""Seconds of processor time that show a body to be the reason: then it gets 400."""

RETRY_AFTER_S = 2.0

_NICE = 5
"""Streams go first where processors are few."""

_TOKEN = re.compile(rb'"(?>[^"\\]+|\\.)*+"|\[[\s\d,-]*+\]|[\[\]{}:,]', re.DOTALL)
"""A string, a list of token ids, or a mark of JSON."""

_MAX_TOKENS = 4096
_MAX_SCANNED = 128 * 1024
"""Bytes; 257 prompts of 500 bytes each are seen, within 4 ms."""


def check_num_prompts(body: bytes) -> None:
    """Refuses a completion of too many prompts before it is parsed, which waits for a process and costs one.

    It looks at no more of the body than the first prompts beyond the limit, and leaves what is unusual to the parser.

    Raises:
        InvalidValueError: It has more prompts than one request may.
    """
    tokens = itertools.islice(map(operator.itemgetter(0), _TOKEN.finditer(body, 0, _MAX_SCANNED)), _MAX_TOKENS)
    depth, last = 0, b""
    for token in tokens:
        if token == b":" and depth == 1 and last == b'"prompt"':
            if _is_longer(tokens, MAX_PROMPTS):
                raise InvalidValueError("prompt", "more prompts", f"at most {MAX_PROMPTS} prompts in a request")
            return
        depth += _step(token)
        last = token


def _is_longer(tokens: Iterator[bytes], most: int) -> bool:
    """Returns whether a list of more than ``most`` prompts follows."""
    if next(tokens, b"") != b"[" or next(tokens, b",")[:1] not in (b'"', b"["):
        return False  # one prompt, or what is none
    depth, count = 1, 1
    for token in tokens:
        depth += _step(token)
        count += token == b"," and depth == 1
        if count > most or depth <= 0:
            break
    return count > most


def _step(token: bytes) -> int:
    return (token in (b"[", b"{")) - (token in (b"]", b"}"))


def read_body(data: bytes, *, chat: bool, model: ModelInfo, encoder: PromptEncoder) -> Generation:
    """Returns what the body of a completion or a chat asks for.

    Raises:
        ApiError, InvalidValueError, RequestValidationError: As for a small body, which FastAPI checks.
    """
    fields = parse_object(data)
    body = checked(ChatCompletionRequest, fields) if chat else checked(CompletionRequest, fields)
    return make_generation(body, model, encoder)


class BodyWorkers:
    """Gives bodies to its processes, first come, first served.

    Args:
        model_dir, settings: As for ``PromptEncoder``.
    """

    def __init__(self, model_dir: str | Path, settings: ModelConfig | None = None) -> None:
        settings = settings or ModelConfig()
        self._arguments = str(model_dir), settings.chat_template, settings.tool_format
        self._free: list[_Worker] = []
        self._turn = asyncio.Semaphore(NUM_PROCESSES)
        self._num_bytes = 0
        self._reading: set[asyncio.Task[Generation]] = set()

    async def read(self, data: bytes, *, chat: bool, model: ModelInfo) -> Generation:
        """As ``read_body``. A caller that is cancelled leaves the process to finish, and its result is dropped.

        Raises:
            CapacityError: Too many bytes wait already.
            InvalidValueError: It has too many prompts, as can be seen without reading it.
            ApiError: The body is wrong, or its process ended.
        """
        if not chat:
            check_num_prompts(data)
        if self._num_bytes and self._num_bytes + len(data) > MAX_WAITING_BYTES:
            message = f"large request bodies in flight: {self._num_bytes} bytes, limit {MAX_WAITING_BYTES}"
            raise CapacityError(message, RETRY_AFTER_S)
        self._num_bytes += len(data)
        try:
            await self._turn.acquire()
        except BaseException:
            self._num_bytes -= len(data)
            raise
        task = asyncio.create_task(self._read(data, chat, model))
        self._reading.add(task)
        task.add_done_callback(functools.partial(self._done, len(data)))
        return await asyncio.shield(task)

    def _done(self, num_bytes: int, task: asyncio.Task[Generation]) -> None:
        self._turn.release()
        self._num_bytes -= num_bytes
        self._reading.discard(task)
        if not task.cancelled():
            task.exception()  # its caller may have left

    async def _read(self, data: bytes, chat: bool, model: ModelInfo) -> Generation:
        worker = self._free.pop() if self._free else await _Worker.start(self._arguments)
        spent_s = worker.cpu_s()
        try:
            async with asyncio.timeout(READ_S):
                reply = await worker.ask(msgpack.packb([chat, encode(model), data]))
        except TimeoutError as error:
            spent_s = worker.cpu_s() - spent_s
            worker.end()
            raise _not_read(spent_s) from error
        except (OSError, EOFError) as error:
            worker.end()
            raise unavailable("The process that read the request body ended.") from error
        except BaseException:
            worker.end()
            raise
        self._free.append(worker)
        return await _generation(reply)

    def close(self) -> None:
        """Ends all processes."""
        for task in self._reading:
            task.cancel()
        for worker in self._free:
            worker.end()
        self._free.clear()


class _Worker:
    """One child process, and this end of its socket."""

    def __init__(self, process: subprocess.Popen[bytes], streams: tuple[asyncio.StreamReader, asyncio.StreamWriter]):
        self._process = process
        self._reader, self._writer = streams

    @classmethod
    async def start(cls, arguments: tuple[str, ...]) -> _Worker:
        process, connection = await asyncio.to_thread(start_child, "farsight.services.api.body_workers", *arguments)
        connection.setblocking(False)
        return cls(process, await asyncio.open_connection(sock=connection))

    async def ask(self, message: bytes) -> bytes:
        """Raises OSError or EOFError if the process has ended."""
        self._writer.write(LENGTH.pack(len(message)))
        self._writer.write(message)
        await self._writer.drain()
        (length,) = LENGTH.unpack(await self._reader.readexactly(LENGTH.size))
        return await self._reader.readexactly(length)

    def cpu_s(self) -> float:
        """Returns the seconds of processor time that it has used."""
        try:
            return float(sum(psutil.Process(self._process.pid).cpu_times()[:2]))
        except psutil.Error:
            return 0.0

    def end(self) -> None:
        self._writer.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()  # its memory takes a moment to be freed


def _not_read(spent_s: float) -> ApiError:
    """Returns what a body gets whose process was ended.

    Args:
        spent_s: Seconds of processor time that it took.
    """
    if spent_s < READ_CPU_S:
        return unavailable(f"This server was too busy to read the request body within {READ_S:g} s.")
    message = f"The request body could not be read with {spent_s:.0f} s of processor time; send a smaller one."
    return ApiError(message, code="too_costly")


def _reply(read: Callable[[], Generation]) -> bytes:
    """Either an error's fields, or the generation and, apart from it, each of its prompts."""
    try:
        generation = read()
    except Exception as error:
        found = as_api_error(error)
        fields = [found.message, found.status, found.kind, found.param, found.code, found.headers]
        return _packed([fields, b"", []])
    prompts = [encode(prompt) for prompt in generation.prompts]
    return _packed([None, encode(dataclasses.replace(generation, prompts=())), prompts])


def _packed(value: Any) -> bytes:
    """Text that has no UTF-8 form may stand in an error: it quotes its client."""
    data: bytes = msgpack.packb(value, unicode_errors="replace")
    return data


async def _generation(reply: bytes) -> Generation:
    """Decodes one prompt in each turn of the event loop: each has as many tokens as fit the model at most."""
    failure, head, prompts = msgpack.unpackb(reply)
    if failure is not None:
        message, status, kind, param, code, headers = failure
        raise ApiError(message, status=status, kind=kind, param=param, code=code, headers=headers)
    decoded = []
    for prompt in prompts:
        decoded.append(decode(prompt, Request))
        await asyncio.sleep(0)
    return dataclasses.replace(decode(head, Generation), prompts=tuple(decoded))


def main() -> None:
    """Reads bodies until the end: ``python -m farsight.services.api.body_workers MODEL TEMPLATE FORMAT SOCKET``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    model_dir, template, tool_format, number = sys.argv[1:]
    encoder = PromptEncoder(model_dir, ModelConfig(chat_template=template, tool_format=tool_format))
    with socket.socket(fileno=int(number)) as connection, connection.makefile("rwb") as stream:
        while head := stream.read(LENGTH.size):
            chat, model, data = msgpack.unpackb(stream.read(LENGTH.unpack(head)[0]))
            info = decode(model, ModelInfo)
            reply = _reply(lambda: read_body(data, chat=chat, model=info, encoder=encoder))  # noqa: B023
            stream.write(framed(reply))
            stream.flush()


if __name__ == "__main__":
    main()

"""Renders chat templates in a process of its own, which may be ended.

A chat template is a program by the model's author. It may loop for ever, multiply texts until the memory is full, or
compute a power that no signal interrupts; parts of it run while it is compiled. So a child process compiles and renders
it. The kernel ends that process when a rendering has taken ``RENDER_CPU_S`` of processor time, and refuses it memory
beyond ``MAX_BYTES``. It can write no file, and its environment holds no keys. The next chat gets a new process.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from io import BufferedRWPair
from typing import Any

import msgpack

from services.api.child_process import LENGTH, framed, start_child

RENDER_CPU_S = 1.0
"""Processor time of one rendering, or of compiling the template: a busy machine stops no template that is well."""

ANSWER_S = 60.0
"""A process that does not answer for so long is ended, whatever it has computed."""

MAX_BYTES = 1 << 29
"""Memory that a template may take, beside what its process has before it knows it."""

MAX_CHARS = 1 << 26
"""Longest text of a conversation."""

_MAX_REASON = 1000
"""Characters of a template's own words that a client is told."""

_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TZ", "PYTHONDONTWRITEBYTECODE")
"""What the process has of its parent's environment: no keys, no tokens."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


class TemplateRefused(Exception):
    """The template does not render this conversation, or cannot be compiled; its text says why."""


class TemplateStopped(TemplateRefused):
    """It took too much time or memory, or brought its process down."""


class TemplateProcess:
    """One template, rendered by a child process. May be used by several threads, one after the other.

    Args:
        source: Jinja.
        variables: What the template sees beside the conversation, such as ``bos_token``.

    Raises:
        TemplateRefused: It cannot be compiled.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self._start = _packed([source, dict(variables)])
        self._turn = threading.Lock()
        self._child: _Child | None = None
        with self._turn:
            self._ready()

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        arguments: Mapping[str, Any] | None = None,
        image_text: str = "",
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text of a conversation, and the places in it that clients wrote (``ClientText.spans``).

        Args:
            add_generation_prompt: Whether it ends where the assistant's turn begins.
            tools: Functions that the model may call.
            arguments: Further values that the template may know.
            image_text: What stands for a picture where the template takes no parts.

        Raises:
            TemplateRefused: The template does not render it.
            TemplateStopped: It took too much time or memory.
        """
        data = _packed([messages, add_generation_prompt, tools, dict(arguments or {}), image_text])
        with self._turn:
            try:
                text, spans = self._ready().ask(data)
            except _Lost:  # another process has ended it, so the conversation is not at fault
                self._child = None
                text, spans = self._ready().ask(data)
        return text, tuple((begin, end) for begin, end in spans)

    def close(self) -> None:
        """Ends the process."""
        with self._turn:
            if self._child is not None:
                self._child.end()

    def _ready(self) -> _Child:
        if self._child is None or self._child.has_ended:
            self._child = _Child()
            try:
                self._child.ask(self._start)
            except _Lost as error:
                raise TemplateStopped(str(error)) from error
        return self._child


class _Lost(Exception):
    """The process was ended by something that is no fault of the template."""


class _Child:
    """One process and this end of its socket; both end with this object."""

    def __init__(self) -> None:
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        self._process, self._socket = start_child(__spec__.name, environment=environment)
        self._socket.settimeout(ANSWER_S)
        self._stream = self._socket.makefile("rwb")
        self.end = weakref.finalize(self, _end, self._process, self._socket, self._stream)

    @property
    def has_ended(self) -> bool:
        return not self.end.alive

    def ask(self, data: bytes) -> Any:
        """What the process answers.

        Raises:
            TemplateRefused, TemplateStopped: As ``TemplateProcess.render``.
            _Lost: The process has been ended.
        """
        try:
            self._stream.write(framed(data))
            self._stream.flush()
            reply = _receive(self._stream)
        except TimeoutError as error:
            self.end()
            raise TemplateStopped(f"it did not end within {ANSWER_S:g} s") from error
        except OSError as error:
            raise self._ended() from error
        if reply is None:
            raise self._ended()
        outcome, value = reply
        if outcome == "done":
            return value
        raise TemplateStopped(value) if outcome == "too much" else TemplateRefused(value)

    def _ended(self) -> Exception:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ANSWER_S)
        code = self._process.poll()
        self.end()
        if code == -signal.SIGPROF:
            return TemplateStopped(f"it was stopped after {RENDER_CPU_S:g} s of processor time")
        if code in (-signal.SIGKILL, -signal.SIGTERM, 0):
            return _Lost("the process that renders it was ended")
        return TemplateStopped(f"its process ended with status {code}")


def _end(process: subprocess.Popen[bytes], connection: socket.socket, stream: BufferedRWPair[Any, Any]) -> None:
    with contextlib.suppress(OSError):  # what was not sent is lost
        stream.close()
    connection.close()
    process.kill()
    process.wait()


def _packed(value: Any) -> bytes:
    """Text that has no UTF-8 form may stand in a message."""
    data: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return data


def _receive(stream: BufferedRWPair[Any, Any]) -> Any:
    """The next frame; None at the end of the connection."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return None if len(data) < length else msgpack.unpackb(data, unicode_errors="surrogatepass")


def _limit() -> None:
    """No core dump, no file, and no more memory than now and ``MAX_BYTES``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # other systems have neither the file nor the limit
        with open("/proc/self/statm", encoding="ascii") as file:
            most = int(file.read().split()[0]) * resource.getpagesize() + MAX_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _answer(work: Callable[[], Any]) -> bytes:
    """What it returns, or why it does not, within its processor time; the kernel ends the process after that."""
    try:
        signal.setitimer(signal.ITIMER_PROF, RENDER_CPU_S)
        answer = ("done", work())
    except MemoryError as error:
        answer = ("too much", str(error) or f"it needs more than {MAX_BYTES >> 20} MiB")
    except Exception as error:  # the template is a program of the model's author
        answer = ("refused", _reason(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
    return _packed(answer)


def _reason(error: Exception) -> str:
    from jinja2 import TemplateError

    if isinstance(error, TemplateError):
        return (error.message or type(error).__name__)[:_MAX_REASON]
    return f"{type(error).__name__}: {error}"[:_MAX_REASON]


def main() -> None:
    """``python -m services.api.text.template_process SOCKET``"""
    from services.api.text.client_text import client_value, client_value_of, compile_template, spans_of
    from services.api.text.content_forms import ContentForms

    with socket.socket(fileno=int(sys.argv[1])) as connection, connection.makefile("rwb") as stream:
        source, variables = _receive(stream)
        _limit()
        compiled: list[Any] = []
        forms = ContentForms(
            lambda messages: str(
                compiled[0].render(
                    messages=messages, tools=None, documents=None, add_generation_prompt=True, **variables
                )
            )
        )
        stream.write(framed(_answer(lambda: compiled.append(compile_template(source)))))
        stream.flush()

        def render(
            messages: Messages,
            add_generation_prompt: bool,
            tools: Tools | None,
            arguments: Mapping[str, Any],
            image_text: str,
        ) -> tuple[str, tuple[tuple[int, int], ...]]:
            """The role is one of a few words; all else is the client's own."""
            text = compiled[0].render(
                messages=forms.fitting(messages, image_text),
                tools=client_value(tools),
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**client_value_of(arguments), **variables},
            )
            if len(text) > MAX_CHARS:
                raise MemoryError(f"it writes {len(text)} characters, at most {MAX_CHARS} are taken")
            return str.__str__(text), spans_of(text)

        while (asked := _receive(stream)) is not None:
            stream.write(framed(_answer(lambda: render(*asked))))
            stream.flush()


if __name__ == "__main__":
    main()

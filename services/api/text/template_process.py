"""Renders chat templates in a process of its own, which may be ended.

A chat template is a program by the model's author. It may loop for ever, multiply texts until the memory is full, or
compute a power that no signal interrupts; parts of it run while it is compiled. So a child process compiles and renders
it. The kernel ends that process when a rendering has taken ``RENDER_CPU_S`` of processor time, and refuses it memory
beyond ``MAX_BYTES``. It can write no file, and its environment holds no keys. The next chat gets a new process.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2 import TemplateError

from farsight.core.child_process import (
    ChildLost,
    ChildStopped,
    LimitedChild,
    framed,
    limit_process,
    parent_stream,
    processor_time,
    receive,
)
from farsight.services.api.text.client_text import client_value, compile_template, joined, spans_of

RENDER_CPU_S = 1.0
"""Processor time of one rendering, or of compiling the template: a busy machine stops no template that is well."""

MAX_BYTES = 1 << 29
"""Memory that a template may take, beside what its process has before it knows it."""

MAX_CHARS = 1 << 26
"""Longest text of a conversation."""

_MAX_REASON = 1000
"""Characters of a template's own words that a client is told."""

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

_TEXT = "Hello"

_IMAGE = {"type": "image"}


class ContentForms:
    """The forms of content that one template takes: a string, or a list of parts that are texts and pictures.

    Nothing in a model's files says so. It shows when the template renders a message of either form.

    Args:
        render: Renders messages.
    """

    def __init__(self, render: Callable[[Messages], str]) -> None:
        self._render = render

    @cached_property
    def takes_parts(self) -> bool:
        """Whether a list of parts becomes its texts, with something that stands for each picture."""
        text = {"type": "text", "text": _TEXT}
        alone, both = self._try([text]), self._try([_IMAGE, text])
        return _TEXT in alone and _TEXT in both and "'type'" not in both and len(both) > len(alone)

    @cached_property
    def takes_strings(self) -> bool:
        """Whether a string becomes itself."""
        return _TEXT in self._try(_TEXT)

    def _try(self, content: Any) -> str:
        try:
            return self._render([{"role": "user", "content": content}])
        except Exception:  # it may want another conversation, or another form
            return ""

    def fitting(self, messages: Messages, image_text: str) -> list[dict[str, Any]]:
        """Puts messages of the client, whose texts it wrote, into a form that the template takes.

        Args:
            image_text: What stands for a picture in a string. No client wrote it.
        """
        return [
            {
                name: self._content(value, image_text)
                if name == "content"
                else value
                if name == "role"
                else client_value(value)
                for name, value in message.items()
            }
            for message in messages
        ]

    def _content(self, content: Any, image_text: str) -> Any:
        if isinstance(content, str):
            if self.takes_strings or not self.takes_parts:
                return client_value(content)
            return [{"type": "text", "text": client_value(content)}]
        if self.takes_parts:
            return [
                {name: value if name == "type" else client_value(value) for name, value in part.items()}
                for part in content
            ]
        parts = [client_value(part["text"]) if part["type"] == "text" else image_text for part in content]
        return joined(text for part in parts for text in ("\n", part))[1:]


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
        self._child: LimitedChild | None = None
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
            ChildLost: Its process was ended twice, or got no processor time.
        """
        data = _packed([messages, add_generation_prompt, tools, dict(arguments or {}), image_text])
        with self._turn:
            try:
                text, spans = _asked(self._ready(), data)
            except ChildLost:  # the conversation is not at fault
                text, spans = _asked(self._ready(), data)
        return text, tuple((begin, end) for begin, end in spans)

    def close(self) -> None:
        """Ends the process."""
        with self._turn:
            if self._child is not None:
                self._child.end()

    def _ready(self) -> LimitedChild:
        if self._child is None or self._child.has_ended:
            self._child = LimitedChild(__spec__.name, cpu_s=RENDER_CPU_S)
            try:
                _asked(self._child, self._start)
            except ChildLost as error:
                raise TemplateStopped(str(error)) from error
        return self._child


def _asked(child: LimitedChild, data: bytes) -> Any:
    """Returns what the process answers.

    Raises:
        TemplateRefused, TemplateStopped: As ``TemplateProcess.render``.
        ChildLost: The process has been ended.
    """
    try:
        outcome, value = json.loads(child.ask(data))
    except ChildStopped as error:
        raise TemplateStopped(str(error)) from error
    if outcome == "done":
        return value
    raise TemplateStopped(value) if outcome == "too much" else TemplateRefused(value)


def _packed(value: Any) -> bytes:
    """As JSON, which holds what clients may send: integers of any size, text that has no UTF-8 form."""
    return json.dumps(value).encode()


def _answer(work: Callable[[], Any]) -> bytes:
    """What it returns, or why it does not, within its processor time; the kernel ends the process after that."""
    try:
        with processor_time(RENDER_CPU_S):
            answer = ("done", work())
    except MemoryError as error:
        answer = ("too much", str(error) or f"it needs more than {MAX_BYTES >> 20} MiB")
    except Exception as error:  # the template is a program of the model's author
        answer = ("refused", _reason(error))
    return _packed(answer)


def _reason(error: Exception) -> str:
    if isinstance(error, TemplateError):
        return (error.message or type(error).__name__)[:_MAX_REASON]
    return f"{type(error).__name__}: {error}"[:_MAX_REASON]


def main() -> None:
    """``python -m farsight.services.api.text.template_process SOCKET``"""
    with parent_stream() as stream:
        source, variables = json.loads(receive(stream) or b"")
        limit_process(MAX_BYTES)
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
                **{name: client_value(value) for name, value in arguments.items()} | variables,
            )
            if len(text) > MAX_CHARS:
                raise MemoryError(f"it writes {len(text)} characters, at most {MAX_CHARS} are taken")
            return str.__str__(text), spans_of(text)

        while (asked := receive(stream)) is not None:
            stream.write(framed(_answer(lambda: render(*json.loads(asked)))))
            stream.flush()


if __name__ == "__main__":
    main()

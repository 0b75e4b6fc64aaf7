"""Which form of content a chat template takes: a string, or a list of parts that are texts and pictures.

Nothing in a model's files says so. It shows when the template renders a message of either form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from services.api.text.client_text import client_value, joined

_TEXT = "Hello"
_IMAGE = {"type": "image"}

Messages = Sequence[Mapping[str, Any]]


class ContentForms:
    """The forms that one template takes.

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
        """Messages of the client, whose texts it wrote, in a form that the template takes.

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

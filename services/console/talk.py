"""A conversation with a model: in this process, or with a server."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from farsight.core.errors import FarsightError
from farsight.services.commands.ask import ask, open_answer

TIMEOUT_S = 600.0
"""Seconds without a byte of an answer; a full server lets requests wait."""

LOOK_S = 5.0

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Piece:
    """What comes of an answer.

    Attributes:
        text: What the user is told.
        reasoning: What the model thinks before.
        eta_s: Seconds from the question by which all of it is there with probability 0.5 and 0.9; None for unknown.
    """

    text: str = ""
    reasoning: str = ""
    eta_s: tuple[float, float] | None = None


@dataclass(slots=True)
class Told:
    """The last answer.

    Attributes:
        response_id: Its id, empty before there is one.
        num_tokens: Tokens of its output.
    """

    response_id: str = ""
    num_tokens: int = 0
    finish_reason: str = ""


class Talk(Protocol):
    """Answers one question after the other."""

    model: str
    where: str
    last: Told

    def say(self, messages: Messages, fields: Mapping[str, Any]) -> Iterator[Piece]:
        """Yields the answer as it comes; a reader that leaves ends it.

        Args:
            fields: Further fields of a body of ``/v1/chat/completions``.

        Raises:
            FarsightError: The model cannot answer this.
        """
        ...

    def explain(self) -> dict[str, Any]:
        """Returns the explanation of the last answer, as ``GET /v1/requests/{id}`` writes it."""
        ...

    def close(self) -> None:
        """Ends the conversation."""
        ...


class ServerTalk:
    """A conversation with a running server."""

    def __init__(self, url: str, key: str) -> None:
        self.where = url
        self._key = key
        self.model = str(ask(url, "/v1/models", LOOK_S, key)["data"][0]["id"])
        self.last = Told()

    def say(self, messages: Messages, fields: Mapping[str, Any]) -> Iterator[Piece]:
        more = {"stream": True, "stream_options": {"include_usage": True}}
        body = {"model": self.model, "messages": list(messages), **fields, **more}
        self.last = told = Told()
        try:
            with open_answer(self.where, "/v1/chat/completions", TIMEOUT_S, self._key, body) as reply:
                etas = [reply.headers.get(f"farsight-eta-{name}") for name in ("p50", "p90")]
                if all(etas):
                    yield Piece(eta_s=(float(etas[0]), float(etas[1])))
                for line in reply:
                    if line.startswith(b"data: {"):
                        yield from self._pieces(json.loads(line[len(b"data: ") :]), told)
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise FarsightError(f"the answer of {self.where} has broken off: {error}") from error

    @staticmethod
    def _pieces(event: dict[str, Any], told: Told) -> Iterator[Piece]:
        if "error" in event:
            raise FarsightError(str(event["error"]["message"]))
        told.response_id = event["id"]
        if event.get("usage"):
            told.num_tokens = event["usage"]["completion_tokens"]
        for choice in event["choices"]:
            delta = choice["delta"]
            told.finish_reason = choice["finish_reason"] or told.finish_reason
            yield Piece(delta.get("content") or "", delta.get("reasoning_content") or "")

    def explain(self) -> dict[str, Any]:
        path = f"/v1/requests/{urllib.parse.quote(self.last.response_id, safe='')}"
        found: dict[str, Any] = ask(self.where, path, LOOK_S, self._key)
        return found

    def close(self) -> None:
        """Leaves the server as it is."""

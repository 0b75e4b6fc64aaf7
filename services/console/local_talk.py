"""A conversation with a model in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from farsight.core.config.load import FarsightConfig
from farsight.core.messages.tokens import TokenDelta
from farsight.services.api.answers.parts import ChoiceParts
from farsight.services.api.answers.served import AnswerPromise
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.console.talk import Messages, Piece, Told
from farsight.services.local.threads import ServiceThread
from farsight.tokenization.tool_formats.parts import ReasoningPart, TextPart


class LocalTalk:
    """Loads the model; returns when it can be asked.

    A model without a chat template goes on with the last message as it is.

    Raises:
        FarsightError: The model cannot be loaded.
    """

    where = "this process"

    def __init__(self, config: FarsightConfig) -> None:
        # That quantised weights round activations too, a server says in its log; here it would stand between answers.
        logging.getLogger("farsight.engine.models.quantize").setLevel(logging.ERROR)
        self._thread = ServiceThread(config)
        self.model = self._thread.service.model.name
        self.last = Told()

    def say(self, messages: Messages, fields: Mapping[str, Any]) -> Iterator[Piece]:
        service = self._thread.service
        if service.encoder.chats:
            reading = service.read(ChatCompletionRequest, {"messages": list(messages), **fields})
        else:
            given = {"prompt": messages[-1]["content"], "max_tokens": 256, **fields}
            reading = service.read(CompletionRequest, given)
        generation = self._thread.call(reading)
        self.last = Told(generation.response_id)
        form, promise = generation.form, AnswerPromise(1)
        parts = None if form is None else ChoiceParts(form, generation.response_id, 0, stream=True)
        eta_s = None
        for _, delta in self._thread.iterate(service.run(generation, promise)):
            self.last.num_tokens += delta.num_tokens
            self.last.finish_reason = delta.finish_reason or ""
            if eta_s is None and (headers := promise.headers()):
                eta_s = float(headers["farsight-eta-p50"]), float(headers["farsight-eta-p90"])
                yield Piece(eta_s=eta_s)
            yield from _pieces(parts, delta)

    def explain(self) -> dict[str, Any]:
        found: dict[str, Any] = self._thread.call(self._thread.service.explain(self.last.response_id)).model_dump()
        return found

    def close(self) -> None:
        self._thread.close()


def _pieces(parts: ChoiceParts | None, delta: TokenDelta) -> Iterator[Piece]:
    if parts is None:
        yield Piece(delta.text)
        return
    for part in parts.read(delta.text, ended=delta.finish_reason is not None):
        match part:
            case TextPart():
                yield Piece(part.text)
            case ReasoningPart():
                yield Piece(reasoning=part.text)

"""The ingress's side of forecasts: asks the length predictors, several requests at a time."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import ValidationError

from farsight.actors.runtime.names import initial_counts, length_predictor_name
from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerBook, PeerLost, current_counts
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError
from farsight.core.forecast import Forecast, ForecastQuestion, ForecastQuestions, StateQuestion
from farsight.core.messages.status import FORECASTS_SHED, SHED_SHOWN_S, Degraded
from farsight.core.request import Request
from farsight.policies.compose import is_batch_mode
from farsight.services.api.batches.lines import BatchLine
from farsight.services.api.batches.sender import ForecastLines
from farsight.services.api.errors import ApiError
from farsight.services.api.generation import PromptText
from farsight.services.api.requests import generation_of
from farsight.services.api.schemas import ChatCompletionRequest, CompletionRequest
from farsight.services.api.text.prompts import PromptEncoder

if TYPE_CHECKING:
    from farsight.services.ingress.engine_client import EngineClient


MAX_QUESTIONS = 64
"""Most questions in one message."""

MAX_WAITING = 1024
"""Most questions that wait for a predictor; further requests get no forecast, as while there is no predictor."""

GATHER_S = 0.02
"""Seconds whose questions are asked together where batches are made of forecasts."""

GATHER_QUEUED_S = 0.5
"""Seconds whose questions are asked together where a forecast matters only to requests that queue: each message of few
questions takes a millisecond of processors that compute the model."""

COUNTS_S = 5.0
"""Seconds between two lookups of the number of predictors."""

ASK_S = 5.0
"""Seconds that ``forecasts`` waits for its answers."""

logger = logging.getLogger(__name__)


def question_of(request: Request, text: PromptText) -> ForecastQuestion:
    """Makes the question to a predictor about a request whose prompt came as text."""
    image_tokens = tuple(image.length for image in request.images)
    return ForecastQuestion(
        request.request_id,
        text.instruction,
        text.user_input,
        text.user_input_len(request.prompt_len - sum(image_tokens)),
        request.prompt_len,
        request.sampling.max_new_tokens,
        request.tenant,
        image_tokens,
        text.call,
    )


class PredictorClient:
    """Passes answers to ``answered`` as they come; a question without an answer is forgotten.

    Args:
        degraded: Notes that a request goes without a forecast.
        answered: Called with the request's id and its forecast, on the event loop.
    """

    def __init__(
        self,
        peers: PeerBook,
        config: FarsightConfig,
        degraded: Degraded,
        answered: Callable[[list[tuple[str, Forecast]]], None],
    ) -> None:
        self._degraded = degraded
        self._peers = peers
        self._counts = initial_counts(config)
        self._answered = answered
        gather_s = GATHER_S if is_batch_mode(config.scheduler.preset) else GATHER_QUEUED_S
        self._gather_s = 0.0 if config.predictor.wait_s else gather_s
        self._waiting: asyncio.Queue[ForecastQuestion | StateQuestion] = asyncio.Queue(MAX_WAITING)

    def ask(self, question: ForecastQuestion | StateQuestion) -> bool:
        """Queues a question; returns False if the queue is full."""
        try:
            self._waiting.put_nowait(question)
        except asyncio.QueueFull:
            reason = f"requests go without a forecast: {MAX_WAITING} wait for one already"
            self._degraded.note(FORECASTS_SHED, reason, time.monotonic(), SHED_SHOWN_S)
            return False
        return True

    async def forecasts(self, questions: Sequence[ForecastQuestion]) -> list[Forecast] | None:
        """Asks at once, for prompts that are not requests yet; returns None if no predictor answers in time."""
        made: list[Forecast] = []
        try:
            async with asyncio.timeout(ASK_S):
                for first in range(0, len(questions), MAX_QUESTIONS):
                    group = tuple(questions[first : first + MAX_QUESTIONS])
                    reply = await self._peers.length_predictor(0).predict(ForecastQuestions(group))
                    made.extend(reply.forecasts)
        except (TimeoutError, FarsightError) as error:
            logger.warning("lines of a batch keep their order: no forecast (%s)", error or "no answer in time")
            return None
        return made

    async def run(self) -> None:
        """Asks each predictor that is free; at most one message is under way for each."""
        pumps: list[asyncio.Task[None]] = []
        try:
            while True:
                self._counts = await current_counts(self._peers, self._counts)
                while len(pumps) < self._counts.length_predictors:
                    pumps.append(asyncio.create_task(self._pump(len(pumps))))
                while len(pumps) > self._counts.length_predictors:
                    pumps.pop().cancel()
                await asyncio.sleep(COUNTS_S)
        finally:
            for pump in pumps:
                pump.cancel()

    async def _pump(self, index: int) -> None:
        predictor = self._peers.length_predictor(index)
        while True:
            questions = [await self._waiting.get()]
            await asyncio.sleep(self._gather_s)
            while len(questions) < MAX_QUESTIONS and not self._waiting.empty():
                questions.append(self._waiting.get_nowait())
            new = tuple(each for each in questions if isinstance(each, ForecastQuestion))
            prefilled = tuple(each for each in questions if isinstance(each, StateQuestion))
            try:
                made = await predictor.predict(ForecastQuestions(new, prefilled))
            except PeerLost:
                await asyncio.sleep(LOOK_AGAIN_S)
                continue
            except FarsightError:
                logger.exception("%s gave no forecast", length_predictor_name(index))
                continue
            answers = [(q.request_id, f) for q, f in zip(new, made.forecasts, strict=True)]
            if made.prefilled:
                answers += [(q.request_id, f) for q, f in zip(prefilled, made.prefilled, strict=True)]
            self._answered(answers)


_BODIES: dict[str, type[ChatCompletionRequest] | type[CompletionRequest]] = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
}
"""The endpoints whose answers have a length."""


def line_forecasts(client: EngineClient, encoder: PromptEncoder) -> ForecastLines | None:
    """Returns a function that forecasts lines of this client's batches; None if its requests get no forecasts."""
    forecaster = client.forecaster
    if forecaster is None:
        return None

    async def forecast_lines(lines: Sequence[BatchLine]) -> list[Forecast | None]:
        questions = []
        for line in lines:
            questions.append(await _question(line, client, encoder))
            await asyncio.sleep(0)  # streams of other requests have their turns
        asked = [each for each in questions if each is not None]
        made: Sequence[Forecast | None] = await forecaster.forecasts(asked) or [None] * len(asked)
        forecasts = iter(made)
        return [None if each is None else next(forecasts) for each in questions]

    return forecast_lines


async def _question(line: BatchLine, client: EngineClient, encoder: PromptEncoder) -> ForecastQuestion | None:
    """Asks about a line's first prompt; None if that is not text or the line is invalid, as its own answer says."""
    schema = _BODIES.get(line.url)
    if schema is None:
        return None
    try:
        generation = await generation_of(schema.model_validate(json.loads(line.body)), client.model, encoder)
    except (ValidationError, ApiError, FarsightError):
        return None
    text = generation.texts[0]
    return None if text is None else question_of(generation.prompts[0], text)

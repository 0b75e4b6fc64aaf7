"""Forecasts of the lines of a batch, before they are requests: the longest begin first."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from pydantic import ValidationError

from core.errors import FarsightError
from core.forecast import Forecast, ForecastQuestion
from services.api.batches.lines import BatchLine
from services.api.batches.order import ForecastLines
from services.api.errors import ApiError
from services.api.requests import generation_of
from services.api.schemas import ChatCompletionRequest, CompletionRequest
from services.api.text.prompts import PromptEncoder
from services.ingress.engine_client import EngineClient
from services.ingress.predictor_client import question_of

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

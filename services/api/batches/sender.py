"""Sends lines of a batch to the application of this process, and repeats those that are refused for a while."""

from __future__ import annotations

import asyncio
import json
import logging
import math
from dataclasses import dataclass

from starlette.types import ASGIApp

from core.errors import FarsightError
from services.api.batches.asgi import Reply, post_json
from services.api.batches.lines import BatchLine, LineResult, answered, unsent

_RETRIED = (429, 503)

logger = logging.getLogger(__name__)


class ServiceStalled(FarsightError):
    """The service has refused every request for the whole retry time, so the service is at fault, not a request."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How a request that was refused with 429 or 503 is retried. All times in seconds.

    Attributes:
        give_up_s: Time after which a request is no longer retried.
        first_delay_s: Delay before the second try; it doubles with each try and is never shorter than Retry-After.
        max_delay_s: Limit of the doubling.
    """

    give_up_s: float = 600.0
    first_delay_s: float = 0.5
    max_delay_s: float = 30.0


class LineSender:
    """Sends one line after another and retries refused ones."""

    def __init__(self, app: ASGIApp, retry: RetryPolicy) -> None:
        self._app = app
        self._retry = retry
        self._last_answer = -math.inf

    async def send(self, line: BatchLine) -> LineResult:
        clock = asyncio.get_running_loop().time
        began, delay = clock(), self._retry.first_delay_s
        while True:
            try:
                reply = await post_json(self._app, line.url, line.body)
            except Exception as error:  # A defect of the application fails this line, not the batch.
                logger.exception("line %d could not be run", line.number)
                return unsent(line.custom_id, "internal_error", f"{type(error).__name__}: {error}")
            if reply.status not in _RETRIED:
                self._last_answer = clock()
                return answered(line.custom_id, reply.status, reply.headers.get("x-request-id"), reply.body)
            pause = max(delay, _retry_after_s(reply))
            if clock() - began + pause > self._retry.give_up_s:
                return self._give_up(line, reply, began)
            await asyncio.sleep(pause)
            delay = min(2 * delay, self._retry.max_delay_s)

    def _give_up(self, line: BatchLine, reply: Reply, began: float) -> LineResult:
        """The final error of a line that stays refused, if the service answered other lines meanwhile."""
        told = f"{reply.status} ({_message(reply)})"
        if self._last_answer < began:
            message = f"the service answered no request for {self._retry.give_up_s:g} s; the last refusal was {told}"
            raise ServiceStalled(f"{message}. Finished results are kept; run the same command again to resume")
        message = f"Refused for {self._retry.give_up_s:g} s, the last time with {told}."
        return unsent(line.custom_id, "retries_exhausted", message)


def _retry_after_s(reply: Reply) -> float:
    """Retry-After in seconds; 0 if the header is missing or is a date, which this service does not send."""
    value = reply.headers.get("retry-after", "")
    return float(value) if value.isdecimal() else 0.0


def _message(reply: Reply) -> str:
    try:
        return str(json.loads(reply.body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return "no reason given"

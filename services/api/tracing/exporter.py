"""Sends spans to a collector, beside the requests: what a collector is slow with or refuses is dropped and counted."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque

import aiohttp
from prometheus_client import CollectorRegistry, Counter

from core.config.server import TracesConfig
from core.errors import ConfigError, FarsightError
from services.api.backend import Operator
from services.api.pages.explain import Explanation, explanation
from services.api.tracing.spans import EndedAnswer, export_request

MAX_WAITING = 2048
"""Spans that wait to be sent; later ones are dropped."""

MAX_BATCH = 128
SETTLE_S = 1.5
"""After the end of an answer all decisions about it have reached the log."""

SEND_S = 10.0

logger = logging.getLogger(__name__)


class SpanExporter:
    """Holds ended requests until their decisions are in the log, then sends them.

    Args:
        operator: Is asked for the decisions.

    Raises:
        ConfigError: The extra ``otel`` is not installed.
    """

    def __init__(self, config: TracesConfig, operator: Operator, registry: CollectorRegistry) -> None:
        try:
            import opentelemetry.proto  # noqa: F401 (only whether it is there)
        except ImportError as error:
            expected = "nothing, or an installation with the extra otel: pip install 'farsight[otel]'"
            raise ConfigError("traces.endpoint", config.endpoint, expected) from error
        self.config = config
        self._operator = operator
        self._waiting: deque[EndedAnswer] = deque()
        self._sent = Counter("farsight:spans_sent", "Spans that the collector took.", registry=registry)
        self._dropped = Counter("farsight:spans_dropped", "Spans that were not sent.", registry=registry)
        self._failing = False

    def add(self, answer: EndedAnswer) -> None:
        """Takes a span; never waits."""
        if len(self._waiting) >= MAX_WAITING:
            self._dropped.inc()
        else:
            self._waiting.append(answer)

    async def run(self) -> None:
        """Sends until cancelled."""
        timeout = aiohttp.ClientTimeout(total=SEND_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
                await asyncio.sleep(SETTLE_S)
                if batch:
                    await self.send(session, batch)

    async def send(self, session: aiohttp.ClientSession, batch: list[EndedAnswer]) -> None:
        """Sends one message with these spans."""
        explained = [dataclasses.replace(each, explanation=await self._explain(each)) for each in batch]
        body = export_request({"service.name": self.config.service_name}, explained).SerializeToString()
        headers = {"Content-Type": "application/x-protobuf"}
        try:
            async with session.post(self.config.endpoint, data=body, headers=headers, allow_redirects=False) as reply:
                reply.raise_for_status()
                if reply.status >= 300:
                    raise aiohttp.ClientError(f"status {reply.status}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._dropped.inc(len(batch))
            if not self._failing:  # logged once, not for every batch
                logger.warning("spans cannot be sent to %s: %s", self.config.endpoint, error or type(error).__name__)
            self._failing = True
        else:
            self._sent.inc(len(batch))
            self._failing = False

    async def _explain(self, answer: EndedAnswer) -> Explanation | None:
        if answer.generation is None:
            return None
        try:
            traces = await self._operator.explain(answer.generation.response_id)
        except FarsightError:
            return None  # the span goes without decisions
        return explanation(answer.generation.response_id, traces) if traces else None

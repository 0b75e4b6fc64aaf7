"""Sends spans to a collector, beside the requests: what a collector is slow with or refuses is dropped and counted.

Importing this module loads OpenTelemetry's SDK: only an ingress with ``[traces] endpoint`` does. The SDK reads trace
contexts, samples and draws ids. Its batches and its exporter are not used: spans wait here for their decisions anyway,
and its exporter takes 2.6 times the processor time for a message, a twentieth of a short request.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque

import aiohttp
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, TracerProvider
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter

from farsight.core.config.server import TracesConfig
from farsight.core.errors import FarsightError
from farsight.services.api.answers.served import TracedAnswer
from farsight.services.api.backend import Operator
from farsight.services.api.pages.explain import Explanation, explanation
from farsight.services.api.tracing.spans import export_request, span_fields

MAX_WAITING = 2048
"""Spans that wait to be sent; later ones are dropped."""

MAX_BATCH = 128
SETTLE_S = 1.5
"""After the end of an answer all decisions about it have reached the log."""

SEND_S = 10.0
MAX_HEADER = 512
"""Characters of a ``traceparent`` that are read; the library would log longer ones."""

_PROPAGATOR = TraceContextTextMapPropagator()

logger = logging.getLogger(__name__)


class SpanExporter:
    """Opens spans, holds ended ones until their decisions are in the log, then sends them.

    Args:
        operator: Is asked for the decisions.
    """

    def __init__(self, config: TracesConfig, operator: Operator, registry: CollectorRegistry) -> None:
        self._config = config
        self._operator = operator
        sampler, resource = ParentBased(TraceIdRatioBased(config.sample)), Resource.get_empty()
        self._tracer = TracerProvider(sampler, resource, shutdown_on_exit=False).get_tracer(__name__)
        self._waiting: deque[TracedAnswer] = deque()
        self._sent = Counter("farsight:spans_sent", "Spans that the collector took.", registry=registry)
        self._dropped = Counter("farsight:spans_dropped", "Spans that were not sent.", registry=registry)
        self._failing = False

    def start(self, path: str, traceparent: str) -> TracedAnswer | None:
        """Opens the span of a request; None if it gets none. A client's decision to sample or not stands.

        Args:
            traceparent: The client's header; one that breaks the rules counts as none, as the standard asks.
        """
        nobody = Context()  # without it the library takes a span that Ray may have opened for the task
        parent = _PROPAGATOR.extract({"traceparent": traceparent[:MAX_HEADER]}, nobody)
        span = self._tracer.start_span(f"POST {path}", parent)
        if not isinstance(span, Span):
            return None
        passed_on: dict[str, str] = {}
        _PROPAGATOR.inject(passed_on, set_span_in_context(span, nobody))
        return TracedAnswer(span, passed_on["traceparent"], path)

    def finish(self, answer: TracedAnswer) -> None:
        """Takes a span whose answer has been sent; never waits."""
        answer.ended_ns = time.time_ns()
        if len(self._waiting) >= MAX_WAITING:
            self._dropped.inc()
        else:
            self._waiting.append(answer)

    async def run(self) -> None:
        """Sends until cancelled."""
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SEND_S)) as session:
            while True:
                batch = [self._waiting.popleft() for _ in range(min(MAX_BATCH, len(self._waiting)))]
                await asyncio.sleep(SETTLE_S)
                if batch:
                    await self._send(session, batch)

    async def _send(self, session: aiohttp.ClientSession, batch: list[TracedAnswer]) -> None:
        """Sends one message with these spans."""
        spans = [span_fields(answer, await self._explain(answer)) for answer in batch]
        body = export_request(self._config.service_name, spans)
        headers = {"Content-Type": "application/x-protobuf"}
        try:
            async with session.post(self._config.endpoint, data=body, headers=headers, allow_redirects=False) as reply:
                if not 200 <= reply.status < 300:
                    raise aiohttp.ClientError(f"status {reply.status}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self._dropped.inc(len(batch))
            if not self._failing:  # logged once, not for every batch
                logger.warning("spans cannot be sent to %s: %s", self._config.endpoint, error or type(error).__name__)
            self._failing = True
        else:
            self._sent.inc(len(batch))
            self._failing = False

    async def _explain(self, answer: TracedAnswer) -> Explanation | None:
        if answer.generation is None:
            return None
        try:
            traces = await self._operator.explain(answer.generation.response_id)
        except FarsightError:
            return None  # the span goes without decisions
        return explanation(answer.generation.response_id, traces) if traces else None

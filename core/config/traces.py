"""``[traces]``: OpenTelemetry spans of requests."""

from __future__ import annotations

from dataclasses import dataclass

from core.config.checks import require


@dataclass(frozen=True, slots=True)
class TracesConfig:
    """Where spans go, and of which requests. A span holds names, numbers and decisions, never prompts or answers.

    Attributes:
        endpoint: URL that takes OTLP over HTTP, as ``http://127.0.0.1:4318/v1/traces``; empty for no spans.
        sample: Share of the requests that get a span, from 0 to 1, where the client's ``traceparent`` does not decide.
        service_name: ``service.name`` of the spans.
    """

    endpoint: str = ""
    sample: float = 1.0
    service_name: str = "farsight"

    def __post_init__(self) -> None:
        is_url = self.endpoint.startswith(("http://", "https://"))
        expected = "a URL of http:// or https://, or nothing"
        require(not self.endpoint or is_url, "traces.endpoint", self.endpoint, expected)
        require(0.0 <= self.sample <= 1.0, "traces.sample", self.sample, "a share from 0 to 1")

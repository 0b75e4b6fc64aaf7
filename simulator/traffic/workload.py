"""Arriving requests with their true output lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from core.forecast import Forecast
from core.request import NO_SLO, Request, SamplingParams, Slo


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request, with facts that only the simulator knows.

    Attributes:
        arrived_at: Seconds from the start.
        output_len: Its true output length in tokens; at most ``max_new_tokens``.
        prefix: Names of the prompt's shareable blocks, from the first token on.
        app: The kind of request, for tables.
        forecast: The predictor's forecast.
        tenant, weight, slo: As in ``Request``.
        generated: Output tokens that it comes with: what it had before the run began.
    """

    request_id: str
    arrived_at: float
    prompt_len: int
    output_len: int
    max_new_tokens: int
    prefix: tuple[int, ...] = ()
    app: str = ""
    priority: int = 0
    deadline_s: float | None = None
    forecast: Forecast | None = None
    tenant: str = ""
    weight: float = 1.0
    slo: Slo = NO_SLO
    generated: int = 0


Workload = Sequence[SimRequest]
"""In order of arrival."""


def as_request(arrival: SimRequest, prefix_hashes: tuple[int, ...] = ()) -> Request:
    """The request as the policies see it, without its output length. Token values have no effect.

    Args:
        prefix_hashes: Names of all its full blocks, including unshared ones.
    """
    return Request(
        arrival.request_id,
        attempt=0,
        ingress_id="simulator",
        prompt_ids=_tokens(arrival.prompt_len),
        sampling=_sampling(arrival.max_new_tokens),
        priority=arrival.priority,
        deadline_s=arrival.deadline_s,
        forecast=arrival.forecast,
        prefix_hashes=prefix_hashes,
        tenant=arrival.tenant,
        weight=arrival.weight,
        slo=arrival.slo,
        output_ids=_tokens(arrival.generated),
    )


@lru_cache(maxsize=4096)
def _tokens(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


@lru_cache(maxsize=4096)
def _sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens)

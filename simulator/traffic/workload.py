"""Arriving requests with their true output lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from core.forecast import Forecast
from core.images import ImageSpan
from core.request import NO_SLO, Request, SamplingParams, Slo
from simulator.traffic.pictures import SimImage, image_spans


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request, with facts that only the simulator knows.

    Attributes:
        arrived_at: Seconds from the start.
        prompt_len: Its prompt in tokens, those of its pictures included.
        output_len: Its true output length in tokens; at most ``max_new_tokens``.
        prefix: Names of the prompt's shareable blocks, from the first token on.
        app: The kind of request, for tables.
        forecast: The predictor's forecast.
        tenant, weight, slo: As in ``Request``.
        images: The pictures of its prompt, in their order.
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
    images: tuple[SimImage, ...] = ()
    generated: int = 0

    def spans(self, block_size: int) -> tuple[ImageSpan, ...]:
        """Where its pictures lie, with KV blocks of so many tokens.

        Raises:
            InvalidValueError: They have more tokens than the prompt.
        """
        return image_spans(self.request_id, self.images, self.prompt_len, len(self.prefix), block_size)


Workload = Sequence[SimRequest]
"""In order of arrival."""


def as_request(arrival: SimRequest, prefix_hashes: tuple[int, ...] = (), images: tuple[ImageSpan, ...] = ()) -> Request:
    """The request as the policies see it, without its output length. Token values have no effect.

    Args:
        prefix_hashes: Names of all its full blocks, including unshared ones.
        images: Where its pictures lie, from ``SimRequest.spans``.
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
        images=images,
        output_ids=_tokens(arrival.generated),
    )


@lru_cache(maxsize=4096)
def _tokens(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


@lru_cache(maxsize=4096)
def _sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens)

"""What comes in: requests with their true output lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from core.forecast import Forecast
from core.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and what only the simulator knows of it.

    Attributes:
        arrived_at: Seconds from the start.
        output_len: Tokens that it will have generated when it ends by itself; at most ``max_new_tokens``.
        prefix: Names of the blocks of its prompt that others may share, from the first token on.
        app: What kind of request it is, for tables.
        forecast: What a predictor would say of it.
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


Workload = Sequence[Arrival]
"""In order of arrival."""


def as_request(arrival: Arrival, prefix_hashes: tuple[int, ...] = ()) -> Request:
    """The request as the policies see it: without its output length. Token values do not matter here.

    Args:
        prefix_hashes: Names of all its full blocks, those that nobody shares included.
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
    )


@lru_cache(maxsize=4096)
def _tokens(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


@lru_cache(maxsize=4096)
def _sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens)

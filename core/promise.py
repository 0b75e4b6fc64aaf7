"""When a request will end, as told to its client."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Promise:
    """A statement about the end of one attempt, made when the attempt reached its replica or while it was there.

    Attributes:
        p50_s: Seconds from the statement to the end, which half of the ends do not exceed.
        p90_s: Seconds that nine in ten ends do not exceed.
        coarse: The queue was too long to be rolled forward request by request.
    """

    request_id: str
    attempt: int
    p50_s: float
    p90_s: float
    coarse: bool = False


def last_end(promises: Iterable[Promise]) -> Promise | None:
    """Returns the promise of an answer of several requests: the latest end at each quantile; None without promises."""
    made = list(promises)
    if not made:
        return None
    last = max(made, key=lambda each: each.p90_s)
    p50_s = max(each.p50_s for each in made)
    return Promise(last.request_id, last.attempt, p50_s, last.p90_s, any(each.coarse for each in made))

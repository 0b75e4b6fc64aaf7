"""How many requests of a replica execute at once.

A step takes ``base_s`` whatever it computes, and a price for each row. Its rows share ``base_s``, so that few rows
waste it. Beyond the number at which ``base_s`` is a small share of the step, more rows yield next to no more tokens a
second: they only make all others slower. On a processor that is a dozen rows, on a GPU more than a thousand.
"""

from __future__ import annotations

from collections.abc import Collection

from farsight.core.costs import StepCost, priced_rows
from farsight.policies.interfaces import Job

UNKNOWN_CONTEXT = 256.0
"""Tokens of context of a row, where none runs."""


class PlaceLimit:
    """Bounds the requests that execute at once.

    Args:
        most: The engine's limit.
        by_price: Whether the measured price of a step bounds them; else the engine's limit alone.

    Attributes:
        cost: Price of steps; None before any step has been measured, and then nothing but ``most`` is a bound.
        num: The bound of the latest decision.
    """

    def __init__(self, most: int, *, by_price: bool = False) -> None:
        self.most, self.by_price = most, by_price
        self.cost: StepCost | None = None
        self.num = most

    def decide(self, running: Collection[Job], num_urgent: int) -> int:
        """Returns how many requests may execute now. O(running).

        Args:
            running: Requests with a place.
            num_urgent: As ``Order.num_urgent``. They take all the places that they need, and a quarter of those by
                price stays for the others.
        """
        self.num = self.most
        if self.by_price and self.cost is not None:
            lengths = [job.prompt_len + job.output_len for job in running]
            context_len = sum(lengths) / len(lengths) if lengths else UNKNOWN_CONTEXT
            by_price = priced_rows(self.cost, context_len, self.most)
            self.num = min(self.most, max(by_price, num_urgent + by_price // 4))
        return self.num

"""How many requests of a replica execute at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class PlaceLimit:
    """Places of a replica.

    Attributes:
        most: The engine's limit.
        num: As the order decided last (``Order.num_places``).
    """

    most: int
    num: int

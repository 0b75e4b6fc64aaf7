"""What the ranks of one replica say to each other before they have connections of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankTicket:
    """ModelWorker -> Rank: where rank 0 waits, and the key that lets the others in."""

    host: str
    port: int
    key: str

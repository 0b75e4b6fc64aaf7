"""Messages to the ranks of one replica before they have connections of their own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankTicket:
    """ModelWorker -> Rank: rank 0's address, and the key that the other ranks need to connect."""

    host: str
    port: int
    key: str

"""What every placement policy sees and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from core.request import Request


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica as placement sees it.

    Attributes:
        work_tokens: Tokens of prompt and expected output of the requests placed there and not ended.
    """

    name: str
    num_requests: int
    work_tokens: float


class Placement(Protocol):
    """Picks a replica for a request."""

    def choose(self, request: Request, loads: Sequence[ReplicaLoad]) -> str:
        """The name of one of ``loads``, which is never empty."""
        ...

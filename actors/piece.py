"""What every logical piece is: a plain object with a name, messages in, a state that can be looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from prometheus_client import CollectorRegistry

from actors.peer import PeerBook
from core.config import FarsightConfig


@dataclass(frozen=True, slots=True)
class PieceContext:
    """What a piece is given.

    Attributes:
        name: Such as ``scheduler-0``.
        model_dir: Where config, weights and tokenizer lie.
        restarts: How often the supervisor has started it again.
        peers: Finds the other pieces, in this process or elsewhere.
        registry: Where its metrics go; served by its process under /metrics.
    """

    name: str
    config: FarsightConfig
    model_dir: str
    restarts: int
    peers: PeerBook
    registry: CollectorRegistry

    @property
    def index(self) -> str:
        """What follows the last dash of the name: the replica, or the number among several of a kind."""
        return self.name.rpartition("-")[2]


class Piece:
    """A piece answers messages: its public ``async`` methods that take and return msgpack ``bytes``."""

    kind: ClassVar[str]

    def __init__(self, context: PieceContext) -> None:
        self.context = context

    @property
    def name(self) -> str:
        return self.context.name

    async def start(self) -> None:
        """Begins its work; raises FarsightError if it cannot."""

    async def stop(self) -> None:
        """Ends its tasks and closes what it has open."""

    @property
    def state(self) -> str:
        """As in ``PieceStatus.state``."""
        return "ready"

    @property
    def queue(self) -> int:
        """Requests or records that it holds."""
        return 0

    @property
    def last_step_age_s(self) -> float | None:
        """Seconds since it last did what it exists for; None if never."""
        return None

"""A request as the policies of one replica see it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.forecast import Forecast


@dataclass(slots=True, eq=False)
class Job:
    """A request as a replica's policies see it. Its scheduler keeps it up to date; policies only read it.

    Lengths are in tokens, instants in seconds of the caller's clock.

    Attributes:
        arrived_at: Arrival of the request; unchanged by preemptions and requeues.
        priority: Lower goes first (as in vLLM); the first sort key of every order.
        deadline_at: At equal priority the earlier deadline goes first; infinity for none.
        forecast: Prediction of the whole output length; None without one.
        cached_len: Prompt tokens known or believed to be in the replica's prefix cache.
        output_len: Tokens generated so far.
        computed_len: Known tokens whose KV is on the device; 0 before the start and after a drop.
        host_len: Known tokens whose KV is on the host.
        last_ran_at: Instant of its latest step; its arrival before the first.
    """

    request_id: str
    arrived_at: float
    prompt_len: int
    max_new_tokens: int
    priority: int = 0
    deadline_at: float = math.inf
    forecast: Forecast | None = None
    cached_len: int = 0
    output_len: int = 0
    computed_len: int = 0
    host_len: int = 0
    last_ran_at: float = -math.inf

    def __post_init__(self) -> None:
        self.last_ran_at = max(self.last_ran_at, self.arrived_at)

    @property
    def urgency(self) -> tuple[int, float]:
        """(priority, deadline): the keys that every order sorts by before its own."""
        return self.priority, self.deadline_at

    @property
    def known_len(self) -> int:
        """Tokens of prompt and output so far (l_p + l_t): the KV it needs to continue."""
        return self.prompt_len + self.output_len

    @property
    def is_resident(self) -> bool:
        """Whether it has KV on the device."""
        return self.computed_len > 0

    @property
    def is_offloaded(self) -> bool:
        return self.host_len > 0 and self.computed_len == 0

    @property
    def missing_len(self) -> int:
        """Known tokens still to be computed before it decodes; KV on the host is uploaded, not computed."""
        known_len = self.prompt_len + self.output_len
        if self.computed_len > 0 or self.host_len:
            there_len = self.computed_len if self.computed_len > self.host_len else self.host_len
            return known_len - there_len if there_len < known_len else 0
        return known_len - (self.cached_len if self.cached_len < self.prompt_len else self.prompt_len)

    @property
    def decodes(self) -> bool:
        """Whether its next step only adds one token: all known tokens but the last are computed."""
        return self.output_len > 0 and self.prompt_len + self.output_len - self.computed_len <= 1

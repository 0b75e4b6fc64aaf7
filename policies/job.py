"""A request as a replica's scheduler keeps it, and the part of it that policies read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Self

from core.forecast import Forecast
from core.messages.cache import StartedRequest
from core.messages.plans import Slot, SlotProgress
from core.request import Request, Residency


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

    @classmethod
    def of(cls, request: Request, now: float, /, **own: Any) -> Self:
        """A request that has just come, with nothing computed; ``own``: fields that ``Job`` does not have."""
        return cls(
            request.request_id,
            arrived_at=now,
            prompt_len=request.prompt_len,
            max_new_tokens=request.sampling.max_new_tokens,
            priority=request.priority,
            deadline_at=math.inf if request.deadline_s is None else now + request.deadline_s,
            forecast=request.forecast,
            cached_len=request.expected_cached_len,
            output_len=len(request.output_ids),
            **own,
        )

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


@dataclass(slots=True, eq=False, kw_only=True)
class ScheduledRequest(Job):
    """The scheduler's one record of a request: what policies read of it, and its state in the worker as last reported.

    A mirror: the worker is the truth.

    Attributes:
        number: Its place among those that came to this scheduler.
        max_total_len: As ``Request.max_total_len``, which adds it up again each time.
        num_blocks: Device blocks that it holds; 0 from the moment its KV is ordered dropped.
        shipped_in: First plan of this lease that carried the payload.
        delivered: The worker has the payload.
        stalled: Its client does not read.
        started: It has run, and that has been told.
        granted_len: Total length it may reach by the latest plan.
        ran_s: Seconds of the steps that it took part in, in this life of the worker.
        waits_since: When it came, lost its place, or had to let others go first.
        waits_for: What it has been noted to wait for since; empty before that, and while it runs.
        waited_s: All of its waits that are over, together.
        told: The worker's last word on it, if nothing has been booked here since: said again it changes nothing.
        slot: As the last plan had it.
        counted_on_host: ``blocks_on_host`` as the mirror's sum has it.
    """

    request: Request
    number: int
    max_total_len: int
    num_blocks: int = 0
    num_host_blocks: int = 0
    num_preemptions: int = 0
    num_moves: int = 0
    residency: Residency = Residency.DEVICE
    shipped_in: int | None = None
    delivered: bool = False
    stalled: bool = False
    started: bool = False
    granted_len: int = 0
    ran_s: float = 0.0
    waits_since: float = 0.0
    waits_for: str = ""
    waited_s: float = 0.0
    told: SlotProgress | None = None
    slot: Slot | None = None
    counted_on_host: int = 0

    @property
    def blocks_on_host(self) -> int:
        """Blocks of the host pool that it holds or is about to hold."""
        if self.residency is Residency.HOST and self.num_blocks > self.num_host_blocks:
            return self.num_blocks
        return self.num_host_blocks

    @property
    def is_leaving(self) -> bool:
        """Ordered to the host, and its blocks are not free yet."""
        return self.residency is Residency.HOST and self.num_blocks > 0

    def update(self, progress: SlotProgress, block_size: int) -> float:
        """Takes over what the worker says, but for what orders on their way make untrue.

        Returns:
            Seconds that it has run since it was last reported.
        """
        self.told = progress
        ran_s, self.ran_s = progress.ran_s - self.ran_s, progress.ran_s
        self.output_len = progress.output_len
        self.stalled = progress.stalled
        if progress.num_preemptions < self.num_preemptions:
            return ran_s  # the worker has not dropped its KV yet, but will
        self.num_blocks, self.num_host_blocks = progress.num_blocks, progress.num_host_blocks
        self.cached_len = max(self.cached_len, progress.cached_len)
        self.computed_len = progress.computed_len if progress.num_blocks else 0
        self.host_len = min(progress.computed_len, progress.num_host_blocks * block_size)
        return ran_s

    def first_run(self, cached_len: int, ran_s: float, now: float) -> StartedRequest:
        """It has run for the first time, for ``ran_s`` seconds by now."""
        self.started = True
        queue_s = max(0.0, now - self.arrived_at - ran_s)
        return StartedRequest(self.request_id, self.request.attempt, cached_len, queue_s)

    def decode(self, num_steps: int, duration_s: float, block_size: int) -> None:
        """It has decoded so many tokens, as the next report will say too."""
        self.told = None
        self.output_len += num_steps
        self.computed_len += num_steps
        self.num_blocks = max(self.num_blocks, -(-self.computed_len // block_size))
        self.ran_s += duration_s

    def drop_kv(self) -> None:
        """Its KV is ordered dropped."""
        self.told = None
        self.num_preemptions += 1
        self.num_blocks = self.num_host_blocks = 0
        self.computed_len = self.host_len = 0


def make_scheduled(request: Request, now: float, number: int = 0) -> ScheduledRequest:
    """The record of a request that has just come."""
    return ScheduledRequest.of(
        request, now, request=request, number=number, max_total_len=request.max_total_len, waits_since=now
    )

"""What a replica's scheduler knows of one request in the worker: a shadow, the worker is the truth."""

from __future__ import annotations

from dataclasses import dataclass

from core.messages.cache import StartedRequest
from core.messages.plans import Slot, SlotProgress
from core.request import Request, Residency
from policies.job import Job


@dataclass(slots=True)
class Tracked:
    """A request and its state in the worker as last reported.

    Attributes:
        job: The same as the policies see it.
        number: Of those that came to this scheduler, in order.
        max_total_len: As ``Request.max_total_len``, which adds it up anew each time.
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
    job: Job
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

    def take(self, progress: SlotProgress, block_size: int) -> float:
        """Takes over what the worker says, but for what orders on their way make untrue.

        Returns:
            Seconds that it has run since it was last reported.
        """
        job = self.job
        self.told = progress
        ran_s, self.ran_s = progress.ran_s - self.ran_s, progress.ran_s
        job.output_len = progress.output_len
        self.stalled = progress.stalled
        if progress.num_preemptions < self.num_preemptions:
            return ran_s  # the worker has not dropped its KV yet, but will
        self.num_blocks, self.num_host_blocks = progress.num_blocks, progress.num_host_blocks
        job.cached_len = max(job.cached_len, progress.cached_len)
        job.computed_len = progress.computed_len if progress.num_blocks else 0
        job.host_len = min(progress.computed_len, progress.num_host_blocks * block_size)
        return ran_s

    def start(self, cached_len: int, ran_s: float, now: float) -> StartedRequest:
        """It has run for the first time, for ``ran_s`` seconds by now."""
        self.started = True
        queue_s = max(0.0, now - self.job.arrived_at - ran_s)
        return StartedRequest(self.request.request_id, self.request.attempt, cached_len, queue_s)

    def decode(self, num_steps: int, duration_s: float, block_size: int) -> None:
        """It has decoded so many tokens, as the next report will say too."""
        job = self.job
        self.told = None
        job.output_len += num_steps
        job.computed_len += num_steps
        self.num_blocks = max(self.num_blocks, -(-job.computed_len // block_size))
        self.ran_s += duration_s

    def drop_kv(self) -> None:
        """Its KV is ordered dropped."""
        self.told = None
        self.num_preemptions += 1
        self.num_blocks = self.num_host_blocks = 0
        self.job.computed_len = self.job.host_len = 0


def make_tracked(request: Request, now: float, number: int = 0) -> Tracked:
    """A request that has just come, with nothing computed."""
    return Tracked(request, make_job(request, now), number, request.max_total_len, waits_since=now)


def make_job(request: Request, now: float) -> Job:
    """As policies see a request that has just come."""
    deadline_at = float("inf") if request.deadline_s is None else now + request.deadline_s
    return Job(
        request.request_id,
        arrived_at=now,
        prompt_len=request.prompt_len,
        max_new_tokens=request.sampling.max_new_tokens,
        priority=request.priority,
        deadline_at=deadline_at,
        forecast=request.forecast,
        cached_len=request.expected_cached_len,
        output_len=len(request.output_ids),
    )

"""What waits in batch mode: for its forecast, for company, for a worker, or for the rest of a batch that broke off."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from core.errors import IntegrityError
from core.forecast import Forecast
from core.messages.requests import Key
from core.request import Request
from policies.batching.base import Batcher, FormedBatch
from policies.job import Job


@dataclass(frozen=True, slots=True)
class Member:
    """An attempt that ran in a batch when that broke off."""

    request_id: str
    attempt: int
    ingress_id: str


@dataclass(slots=True)
class _Broken:
    """A batch that broke off. Its requests come back from their ingress replicas, with the tokens they have by then.

    Attributes:
        num_jobs: When it broke off.
        arrived_at: Of each, when it first came.
        awaited: Those that have not come back.
        back: Those that have.
    """

    num_jobs: int
    created_at: float
    sealed_at: float
    arrived_at: dict[str, float]
    awaited: dict[str, Member]
    back: dict[str, Job] = field(default_factory=dict)


class CentralQueue:
    """One for all workers of batch mode, in front of the ``Batcher`` that forms the batches.

    Args:
        forecast_wait_s: A request without a forecast waits so long for one before it is put into a batch.
    """

    def __init__(self, batcher: Batcher, forecast_wait_s: float = 0.0) -> None:
        self._batcher = batcher
        self._forecast_wait_s = forecast_wait_s
        self._jobs: dict[str, Job] = {}  # all that waits, wherever
        self._unforeseen: dict[str, float] = {}  # until when its forecast is waited for, in that order
        self._broken: dict[str, _Broken] = {}  # by each request of theirs, awaited or back
        self._failed: list[Job] = []
        self._usual: Forecast | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    def next_due_at(self, *, any_idle: bool) -> float | None:
        """When something is to be done without anybody coming or going; ``any_idle``: whether a worker could pull."""
        due = [next(iter(self._unforeseen.values()))] if self._unforeseen else []
        company_at = self._batcher.next_due_at() if any_idle else None
        if company_at is not None:
            due.append(company_at)
        return min(due, default=None)

    def add(self, request: Request, now: float) -> None:
        """A request has arrived, or has come back; it is not here yet."""
        request_id = request.request_id
        job = self._jobs[request_id] = Job.of(request, now)
        broken = self._broken.get(request_id)
        if broken is not None:
            del broken.awaited[request_id]
            job.arrived_at = broken.arrived_at[request_id]
            broken.back[request_id] = job
            self._settle(broken, now)
        elif job.forecast is None and self._forecast_wait_s and not request.attempt:
            self._unforeseen[request_id] = now + self._forecast_wait_s
        else:
            self._form(job, now)

    def foresee(self, request_id: str, forecast: Forecast, now: float) -> None:
        """The forecast of a request that waits. One that is in a batch already stays there."""
        self._jobs[request_id].forecast = forecast
        if self._unforeseen.pop(request_id, None) is not None:
            self._form(self._jobs[request_id], now)

    def foresee_usually(self, forecast: Forecast) -> None:
        """What is expected of a request that nobody has looked at: the lengths of outputs that have ended."""
        self._usual = forecast

    def hold(self, memory_tokens: float, now: float) -> None:
        """Every worker holds so many KV tokens at least."""
        self._batcher.hold(memory_tokens, now)

    def remove(self, request_id: str, now: float) -> None:
        """A request is gone, waiting here or awaited; unknown ones are fine."""
        job = self._jobs.pop(request_id, None)
        broken = self._broken.pop(request_id, None)
        if broken is not None:
            broken.awaited.pop(request_id, None)
            broken.back.pop(request_id, None)
            self._settle(broken, now)
        elif self._unforeseen.pop(request_id, None) is None and job is not None:
            self._batcher.remove(request_id)

    def pass_time(self, now: float) -> None:
        """What has waited long enough for its forecast goes on without."""
        while self._unforeseen:
            request_id, until = next(iter(self._unforeseen.items()))
            if until > now:
                return
            del self._unforeseen[request_id]
            self._form(self._jobs[request_id], now)

    def pull(self, fits: Callable[[Job], bool], now: float) -> FormedBatch | None:
        """The batch that an idle worker runs next; jobs that do not fit this worker stay here."""
        unfit: list[Job] = []
        batch = self._batcher.pull(now)
        while batch is not None:
            unfit += _drop_unfit(batch, fits)
            if batch.jobs:
                break
            batch = self._batcher.pull(now)
        for job in unfit:
            self._batcher.add(job, now)
        if batch is not None:
            for job in batch.jobs:
                del self._jobs[job.request_id]
        return batch

    def break_off(self, members: list[Member], num_jobs: int, batch: FormedBatch | None, now: float) -> None:
        """Those of a pulled batch that had not ended will come back, to be halved once all are back or gone.

        Args:
            members: One at least; none of them waits here.
            num_jobs: Of the batch when it broke off, those among them of whom nothing is to be heard any more.
            batch: As it was pulled; None if another life of this queue did that.
        """
        awaited = {member.request_id: member for member in members}
        jobs = [] if batch is None else [job for job in batch.jobs if job.request_id in awaited]
        in_order = {job.request_id: job.arrived_at for job in jobs}
        arrived_at = in_order | {each: now for each in awaited if each not in in_order}
        sealed_at = now if batch is None or batch.sealed_at is None else batch.sealed_at
        created_at = now if batch is None else batch.created_at
        broken = _Broken(num_jobs, created_at, sealed_at, arrived_at, awaited)
        self._broken |= {member.request_id: broken for member in members}

    def is_awaited(self, key: Key) -> bool:
        """Whether this attempt, or a later one of its request, ran in a batch that broke off, and has not come back."""
        broken = self._broken.get(key[0])
        member = None if broken is None else broken.awaited.get(key[0])
        return member is not None and member.attempt >= key[1]

    def is_awaited_up_to(self, request_id: str, attempt: int) -> bool:
        """Whether this attempt, or an earlier one of its request, is awaited."""
        broken = self._broken.get(request_id)
        member = None if broken is None else broken.awaited.get(request_id)
        return member is not None and member.attempt <= attempt

    def awaited(self) -> list[Member]:
        """All that have not come back."""
        return [broken.awaited[rid] for rid, broken in self._broken.items() if rid in broken.awaited]

    def take_failed(self) -> list[Job]:
        """Those that ran out of memory alone; they are not here any more."""
        failed, self._failed = self._failed, []
        return failed

    def _form(self, job: Job, now: float) -> None:
        if job.forecast is None:
            job.forecast = self._usual
        self._batcher.add(job, now)

    def _settle(self, broken: _Broken, now: float) -> None:
        """Once nobody is awaited any more, what has come back waits again in halves."""
        if broken.awaited or not broken.back:
            return
        batch = FormedBatch(0, broken.created_at, broken.sealed_at)
        for request_id in broken.arrived_at:
            if request_id in broken.back:
                batch.insert(broken.back[request_id])
                del self._broken[request_id]
        if len(batch) == 1 < broken.num_jobs:
            self._batcher.restore(batch)
            return
        failed = self._batcher.split(batch, now)
        if failed is not None:
            del self._jobs[failed.request_id]
            self._failed.append(failed)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless everybody waits in one place."""
        self._batcher.check_integrity()
        groups = {id(broken): broken for broken in self._broken.values()}.values()
        back = [request_id for broken in groups for request_id in broken.back]
        if self._batcher.num_waiting + len(self._unforeseen) + len(back) != len(self._jobs):
            raise IntegrityError(f"{len(self._jobs)} requests wait, but not as many in all places together")
        for broken in groups:
            if not broken.awaited:
                raise IntegrityError("a broken batch waits for nobody")
            if broken.awaited.keys() & self._jobs.keys() or not broken.back.keys() <= self._jobs.keys():
                raise IntegrityError("a request of a broken batch is awaited and waits, or is back and does not")
        if not self._unforeseen.keys() <= self._jobs.keys():
            raise IntegrityError("a forecast is waited for that nobody needs")


def _drop_unfit(batch: FormedBatch, fits: Callable[[Job], bool]) -> list[Job]:
    unfit = [job for job in batch.jobs if not fits(job)]
    for job in unfit:
        batch.drop(job.request_id)
    return unfit

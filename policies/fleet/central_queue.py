"""Requests that wait in batch mode: for a forecast, for company, for a worker, or for the rest of a broken batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from farsight.core.decisions import Facts
from farsight.core.errors import IntegrityError
from farsight.core.forecast import Forecast, ForecastMade
from farsight.core.messages.requests import Key
from farsight.core.request import Request
from farsight.policies.batching.base import BatchPolicy, FormedBatch
from farsight.policies.fleet.batch_turns import BatchTurns
from farsight.policies.interfaces import Job


@dataclass(frozen=True, slots=True)
class Member:
    """An attempt that ran in a batch when the batch broke off."""

    request_id: str
    attempt: int
    ingress_id: str


@dataclass(slots=True)
class _Broken:
    """A batch that broke off. Its requests come back from their ingress replicas, with the tokens they have by then.

    Attributes:
        num_jobs: Size of the batch when it broke off.
        arrived_at: First arrival of each request, by id.
        awaited: Requests that have not come back.
        back: Requests that have come back.
    """

    num_jobs: int
    created_at: float
    sealed_at: float
    arrived_at: dict[str, float]
    awaited: dict[str, Member]
    back: dict[str, Job] = field(default_factory=dict)


class CentralQueue:
    """The one queue for all workers of batch mode, in front of the ``BatchPolicy`` that forms the batches.

    Args:
        forecast_wait_s: Seconds that a request waits for a forecast before it is put into a batch by the lengths of
            the past; a later forecast still moves the request, as long as no worker has pulled its batch.
    """

    def __init__(self, batcher: BatchPolicy, forecast_wait_s: float = 0.0) -> None:
        self._batcher = batcher
        self._turns = BatchTurns(batcher)
        self._forecast_wait_s = forecast_wait_s
        self._jobs: dict[str, Job] = {}  # all waiting requests
        self._unpredicted: dict[str, float] = {}  # deadline of each forecast that is waited for, earliest first
        self._broken: dict[str, _Broken] = {}  # by the id of each of its requests, awaited or back
        self._failed: list[Job] = []
        self._usual: Forecast | None = None

    @property
    def num_waiting(self) -> int:
        return len(self._jobs)

    def next_due_at(self, any_idle: Callable[[], bool]) -> float | None:
        """Returns the instant at which something is due although no request comes or goes; None if nothing is.

        Args:
            any_idle: Whether a worker could pull; asked only where a batch becomes ready by waiting.
        """
        due = [next(iter(self._unpredicted.values()))] if self._unpredicted else []
        company_at = self._batcher.next_due_at()
        if company_at is not None and any_idle():
            due.append(company_at)
        return min(due, default=None)

    def add(self, request: Request, now: float) -> None:
        """Takes a request that has arrived or come back; it must not be here yet."""
        request_id = request.request_id
        job = self._jobs[request_id] = Job.of(request, now)
        broken = self._broken.get(request_id)
        if broken is not None:
            del broken.awaited[request_id]
            job.arrived_at = broken.arrived_at[request_id]
            broken.back[request_id] = job
            self._settle(broken, now)
        elif job.forecast is None and self._forecast_wait_s and not request.attempt:
            self._unpredicted[request_id] = now + self._forecast_wait_s
        else:
            self._form(job, now)

    def foresee(self, made: Iterable[ForecastMade], now: float) -> None:
        """Takes the forecasts of waiting requests; batches that no worker has pulled change with them."""
        late: list[tuple[Job, Forecast]] = []
        for each in made:
            job = self._jobs[each.request_id]
            if self._unpredicted.pop(each.request_id, None) is not None:
                job.forecast = each.forecast
                self._form(job, now)
            elif each.request_id in self._broken:
                job.forecast = each.forecast
            else:
                late.append((job, each.forecast))
        if late:
            self._turns.foresee(late, now)

    def set_usual_forecast(self, forecast: Forecast) -> None:
        """Sets the forecast of requests that have none of their own: the law of the lengths of ended outputs."""
        self._usual = forecast

    def story(self, batch: FormedBatch, now: float) -> Facts:
        """Returns the facts of ``BatchPolicy.story``."""
        return self._batcher.story(batch, now)

    def timed(self) -> Iterable[FormedBatch]:
        """Returns the batches of ``BatchPolicy.timed``."""
        return self._batcher.timed()

    def hold(self, memory_tokens: float, now: float) -> None:
        """Sets the KV tokens that every worker holds at least."""
        self._batcher.hold(memory_tokens, now)

    def remove(self, request_id: str, now: float) -> None:
        """Forgets a request that waits here, is awaited, or was pulled; unknown ids are ignored."""
        job = self._jobs.pop(request_id, None)
        broken = self._broken.pop(request_id, None)
        if broken is not None:
            broken.awaited.pop(request_id, None)
            broken.back.pop(request_id, None)
            self._settle(broken, now)
        elif self._unpredicted.pop(request_id, None) is None and job is not None:
            self._batcher.remove(request_id)
        self._turns.remove(request_id, now)

    def pass_time(self, now: float) -> None:
        """Puts requests into batches without a forecast when the wait for one is over."""
        while self._unpredicted:
            request_id, until = next(iter(self._unpredicted.items()))
            if until > now:
                return
            del self._unpredicted[request_id]
            self._form(self._jobs[request_id], now)

    def pull(self, fits: Callable[[Job], bool], now: float) -> FormedBatch | None:
        """Returns the batch that an idle worker runs next; jobs that do not fit this worker stay here.

        Args:
            fits: Whether this worker can hold a job.
        """
        unfit: list[Job] = []
        batch = self._turns.pull(now)
        while batch is not None:
            unfit += _drop_unfit(batch, fits)
            if batch.jobs:
                break
            batch = self._turns.pull(now)
        for job in unfit:
            self._batcher.add(job, now)
        if batch is not None:
            for job in batch.jobs:
                del self._jobs[job.request_id]
            self._turns.begin(batch, now)
        return batch

    def break_off(self, members: list[Member], num_jobs: int, batch: FormedBatch | None, now: float) -> None:
        """Awaits the unfinished requests of a broken batch, which is halved once all are back or gone.

        Args:
            members: At least one; none of them waits here.
            num_jobs: Size of the batch when it broke off, requests that will not come back included.
            batch: The batch as it was pulled; None if an earlier life of this queue pulled it.
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
        """Returns whether this attempt, or a later one of its request, ran in a broken batch and has not come back."""
        broken = self._broken.get(key[0])
        member = None if broken is None else broken.awaited.get(key[0])
        return member is not None and member.attempt >= key[1]

    def is_awaited_up_to(self, request_id: str, attempt: int) -> bool:
        """Returns whether this attempt, or an earlier one of its request, is awaited."""
        broken = self._broken.get(request_id)
        member = None if broken is None else broken.awaited.get(request_id)
        return member is not None and member.attempt <= attempt

    def awaited(self) -> list[Member]:
        """Returns all requests of broken batches that have not come back."""
        return [broken.awaited[rid] for rid, broken in self._broken.items() if rid in broken.awaited]

    def take_failed(self) -> list[Job]:
        """Removes and returns the requests that ran out of memory alone."""
        failed, self._failed = self._failed, []
        return failed

    def _form(self, job: Job, now: float) -> None:
        if job.forecast is None:
            job.forecast = self._usual
        self._turns.add(job, now)

    def _settle(self, broken: _Broken, now: float) -> None:
        """Splits a broken batch once none of its requests is awaited; the halves wait again."""
        if broken.awaited or not broken.back:
            return
        batch = FormedBatch(0, broken.created_at, broken.sealed_at)
        for request_id in broken.arrived_at:
            if request_id in broken.back:
                batch.insert(broken.back[request_id])
                self._turns.add_formed(broken.back[request_id])
                del self._broken[request_id]
        if len(batch) == 1 < broken.num_jobs:
            self._batcher.restore(batch)
            return
        failed = self._batcher.split(batch, now)
        if failed is not None:
            del self._jobs[failed.request_id]
            self._turns.remove(failed.request_id, now)
            self._failed.append(failed)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every request waits in exactly one place."""
        self._batcher.check_integrity()
        self._turns.check_integrity()
        groups = {id(broken): broken for broken in self._broken.values()}.values()
        back = [request_id for broken in groups for request_id in broken.back]
        if self._turns.num_waiting + len(self._unpredicted) + len(back) != len(self._jobs):
            raise IntegrityError(f"{len(self._jobs)} requests wait, but their places hold another number")
        for broken in groups:
            if not broken.awaited:
                raise IntegrityError("a broken batch awaits no request")
            if broken.awaited.keys() & self._jobs.keys() or not broken.back.keys() <= self._jobs.keys():
                raise IntegrityError("a request of a broken batch is awaited and waits, or is back and does not wait")
        if not self._unpredicted.keys() <= self._jobs.keys():
            raise IntegrityError("a forecast is awaited for a request that does not wait")


def _drop_unfit(batch: FormedBatch, fits: Callable[[Job], bool]) -> list[Job]:
    unfit = [job for job in batch.jobs if not fits(job)]
    for job in unfit:
        batch.drop(job.request_id)
    return unfit

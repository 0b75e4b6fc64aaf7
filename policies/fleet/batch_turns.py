"""Tenants' turns in batch mode: which tenant's requests may compete for a place in the next batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from farsight.core.errors import IntegrityError
from farsight.core.forecast import Forecast
from farsight.policies.batching.base import BatchPolicy, FormedBatch
from farsight.policies.interfaces import Job
from farsight.policies.order.fcfs import Fcfs
from farsight.policies.tenancy.fair_shares import FairShares

WINDOW = 4
"""While several tenants wait: most requests that the batcher has at once, and most that it is given after a request
that is in no pulled batch yet, unless a whole batch takes more. Few, so that each batch belongs to the tenant whose
turn it is; room left in such a batch is filled with other waiting requests."""

FILL_LOOK = 8192
"""Most waiting requests that are looked at to fill a batch; takes some 10 ms. The more of them, the better they fit."""


class _Run(NamedTuple):
    """A request in a batch that a worker has pulled.

    Attributes:
        size: Requests of the batch, among which its time is divided.
    """

    job: Job
    began_at: float
    size: int


class _Given(NamedTuple):
    """A request that the batcher has, and the number of requests given to the batcher before."""

    job: Job
    number: int


class BatchTurns:
    """Hands requests to a batcher: all at once while one tenant waits, else in turns, as many as the batcher needs.

    The batcher forms and chooses batches among the requests that it has, by its own rule. While requests wait here, the
    batcher is never left without a batch for an idle worker.

    Args:
        batcher: Its owner may add and remove requests as well, as long as this object is told of them.
    """

    def __init__(self, batcher: BatchPolicy) -> None:
        self._batcher = batcher
        self._shares = FairShares(WINDOW)
        self._order = Fcfs()
        self._kept: dict[str, Job] = {}  # requests that the order ranks
        self._given: dict[str, _Given] = {}  # given to the batcher, and not by ``add_formed``; in order
        self._num_given = 0
        self._formed: dict[str, Job] = {}
        self._running: dict[str, _Run] = {}

    @property
    def num_waiting(self) -> int:
        """Requests here and in the batcher."""
        return len(self._kept) + self._batcher.num_waiting

    def add(self, job: Job, now: float) -> None:
        """Adds a request that waits for a batch."""
        was_shared = self._shares.is_shared
        self._shares.add(job)
        if self._shares.is_shared and not was_shared:
            self._take_back(now)
        self._keep(job, now)
        self._give(now)

    def foresee(self, made: Sequence[tuple[Job, Forecast]], now: float) -> None:
        """Gives waiting requests their forecasts; the batcher moves its own requests to where they now belong."""
        for job, forecast in made:
            if job.request_id in self._kept:
                job.forecast = forecast
        self._batcher.foresee([each for each in made if each[0].request_id not in self._kept], now)

    def add_formed(self, job: Job) -> None:
        """Adds a request that waits again, in a batch that the batcher is given as it is."""
        self._shares.add(job)
        self._formed[job.request_id] = job

    def pull(self, now: float) -> FormedBatch | None:
        """Returns the batcher's next batch; gives the batcher more requests until it has one."""
        self._give(now)
        batch = self._batcher.pull(now)
        while batch is None and self._kept:
            self._give_next(now)
            batch = self._batcher.pull(now)
        if batch is not None and self._kept and self._shares.is_shared:
            self._fill(batch, now)
        return batch

    def _fill(self, batch: FormedBatch, now: float) -> None:
        """Fills the room left in a batch with requests that wait for their tenant's turn; the batch takes no longer."""
        waiting = itertools.islice(self._ranked_kept(now), FILL_LOOK)
        for job in self._batcher.company(batch, list(waiting)):
            self._take(job)
            batch.insert(job)

    def begin(self, batch: FormedBatch, now: float) -> None:
        """Books that a worker runs the batch."""
        size, running = len(batch), self._running
        for job in batch.jobs:
            request_id = job.request_id
            if self._given.pop(request_id, None) is None:
                del self._formed[request_id]
            running[request_id] = _Run(job, now, size)

    def remove(self, request_id: str, now: float) -> None:
        """Forgets a request that left the batcher; if it ran, its tenant is charged for a part of its batch's time."""
        run = self._running.pop(request_id, None)
        if run is not None:
            self._shares.charge(run.job.tenant, (now - run.began_at) / run.size)
            self._shares.remove(run.job)
            return
        given = self._given.pop(request_id, None)
        if given is not None:
            self._shares.remove(given.job)
        elif request_id in self._formed:
            self._shares.remove(self._formed.pop(request_id))
        elif request_id in self._kept:
            job = self._kept.pop(request_id)
            self._order.remove(job)
            self._shares.remove(job)

    def _keep(self, job: Job, now: float) -> None:
        self._order.add(job, now)
        self._kept[job.request_id] = job

    def _take_back(self, now: float) -> None:
        """Takes the given requests back from the batcher, because a second tenant has come and they must take turns."""
        for request_id, given in self._given.items():
            self._batcher.remove(request_id)
            self._keep(given.job, now)
        self._given.clear()

    def _give(self, now: float) -> None:
        while self._kept and (not self._shares.is_shared or self._may_compete()):
            self._give_next(now)

    def _may_compete(self) -> bool:
        """Returns whether the batcher may get one more request; beyond ``WINDOW`` its first one would be overtaken."""
        first = next(iter(self._given.values()), None)
        return first is None or (len(self._given) < WINDOW and self._num_given - first.number <= WINDOW)

    def _give_next(self, now: float) -> None:
        job = next(self._ranked_kept(now))
        self._take(job)
        self._num_given += 1
        self._batcher.add(job, now)

    def _ranked_kept(self, now: float) -> Iterator[Job]:
        """Yields the requests that wait here, by their tenants' turns."""
        competing: list[Job] = []
        if self._shares.is_shared:
            competing = [each.job for table in (self._running, self._given) for each in table.values()]
        return self._shares.ranked(self._order, now, lambda job: job.request_id in self._kept, competing)

    def _take(self, job: Job) -> None:
        self._order.remove(job)
        del self._kept[job.request_id]
        self._given[job.request_id] = _Given(job, self._num_given)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every request that waits is in one place, and the tenants' counts agree."""
        self._shares.check_integrity()
        if len(self._given) + len(self._formed) != self._batcher.num_waiting:
            raise IntegrityError(
                f"{len(self._given)} requests were given and {len(self._formed)} are in formed batches, the batcher "
                f"has {self._batcher.num_waiting}"
            )

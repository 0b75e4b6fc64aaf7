"""One scheduling point of continuous batching: who executes next, and who of them is new."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field

from policies.interfaces import Admission
from policies.job import Job


@dataclass(slots=True)
class Selection:
    """Jobs to execute next, best first, and those of them that were not admitted before.

    Attributes:
        refused: Whom admission has said no to.
    """

    running: list[Job] = field(default_factory=list)
    newcomers: list[Job] = field(default_factory=list)
    refused: list[Job] = field(default_factory=list)


@dataclass(slots=True)
class Selector:
    """Walks jobs in rank order and takes those that have room; tokens.

    An admitted job goes on while what is taken fits the pool as it is now. Any other needs the admission's consent;
    after more than ``admission.max_skips`` refusals the walk ends, so that nobody is overtaken by all others.

    Attributes:
        max_num_seqs: Jobs that may execute.
        capacity: KV tokens that they may hold.
        may_start: Whether a job without KV may start at all.
    """

    admission: Admission
    max_num_seqs: int
    capacity: int
    may_start: Callable[[], bool]
    _used: int = 0
    _untold: list[Job] | None = None
    _starts_allowed: bool | None = None

    def select(
        self,
        ranked: Iterable[Job],
        admitted: Collection[str],
        fixed: Collection[Job] | None = None,
        holders: Callable[[], Iterable[Job]] = tuple,
    ) -> Selection:
        """Walks the jobs.

        Args:
            ranked: Those that want to execute, best first, read as far as needed.
            admitted: Ids of those that have their place already.
            fixed: Jobs whose memory nobody can have, whether they are taken or not; None if everybody's can be taken.
            holders: Those of ``ranked`` that are admitted or have KV, best first: where no job without KV may start,
                the walk goes on with these alone, so that it does not pass by all that wait.
        """
        selection = Selection()
        self._untold = []
        if fixed is not None:
            self.admission.begin(list(fixed), self.capacity)
            self._untold = None
        may_move = fixed is None
        walk = iter(ranked)
        passed = set()
        for job in walk:
            if len(selection.running) >= self.max_num_seqs:
                return selection
            if job.request_id in admitted:  # most of those that the walk reads
                passed.add(job.request_id)
                if not may_move or self._keeps(job):
                    selection.running.append(job)
                continue
            if self._is_barred(job, admitted):
                break
            passed.add(job.request_id)
            if not self._take(job, selection, admitted, may_move):
                return selection
        else:
            return selection
        last = self._take_holders(holders(), passed, selection, admitted, may_move)
        if not selection.running:  # those that the host holds do not want to run
            barred = [job, *self._barred_before(last, walk, admitted)]
            selection.newcomers = [each for each in barred if self._admits(each)]
            selection.running = list(selection.newcomers)
        return selection

    def _is_barred(self, job: Job, admitted: Collection[str]) -> bool:
        """Those that the host holds come before those without KV, or it stays full for ever."""
        return not (job.computed_len or job.host_len or job.request_id in admitted or self._may_start())

    def _take(self, job: Job, selection: Selection, admitted: Collection[str], may_move: bool) -> bool:
        """Takes the job if it has room; False if the walk ends with it."""
        if job.request_id in admitted:
            if not may_move or self._keeps(job):
                selection.running.append(job)
        elif self._admits(job):
            selection.running.append(job)
            selection.newcomers.append(job)
        else:
            selection.refused.append(job)
            return len(selection.refused) <= self.admission.max_skips
        return True

    def _take_holders(
        self, holders: Iterable[Job], passed: set[str], selection: Selection, admitted: Collection[str], may_move: bool
    ) -> Job | None:
        """Goes on with those that have KV; the job that the walk ends with, if it does."""
        for job in holders:
            if job.request_id in passed or self._is_barred(job, admitted):
                continue
            if len(selection.running) >= self.max_num_seqs:
                break
            if not self._take(job, selection, admitted, may_move):
                return job
        return None

    def _barred_before(self, last: Job | None, walk: Iterator[Job], admitted: Collection[str]) -> Iterator[Job]:
        """Those that the walk has left out, but for the first of them, as many as there are places."""
        before = itertools.takewhile(lambda job: job is not last, walk)
        barred = (job for job in before if self._is_barred(job, admitted))
        return itertools.islice(barred, self.max_num_seqs - 1)

    def _may_start(self) -> bool:
        if self._starts_allowed is None:
            self._starts_allowed = self.may_start()
        return self._starts_allowed

    def _keeps(self, job: Job) -> bool:
        """Of admitted jobs that may be moved out, those stay that fit with one token more each."""
        used = self._used + job.prompt_len + job.output_len + 1
        if used > self.capacity and self._used:
            return False
        self._used = used
        if self._untold is None:
            self.admission.add(job)
        else:
            self._untold.append(job)
        return True

    def _admits(self, job: Job) -> bool:
        if self._untold is not None:
            self.admission.begin(self._untold, self.capacity)
            self._untold = None
        if not self.admission.admits(job):
            return False
        self.admission.add(job)
        self._used += job.known_len + 1
        return True

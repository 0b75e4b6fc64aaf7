"""One scheduling point of continuous batching: who executes next, and who of them is new."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
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
        self, ranked: Iterable[Job], admitted: Collection[str], fixed: Collection[Job] | None = None
    ) -> Selection:
        """Walks the jobs.

        Args:
            ranked: Those that want to execute, best first, read as far as needed.
            admitted: Ids of those that have their place already.
            fixed: Jobs whose memory nobody can have, whether they are taken or not; None if everybody's can be taken.
        """
        selection = Selection()
        self._untold = []
        if fixed is not None:
            self.admission.begin(list(fixed), self.capacity)
            self._untold = None
        barred = []
        for job in ranked:
            if len(selection.running) >= self.max_num_seqs:
                break
            if job.request_id in admitted:
                if fixed is not None or self._keeps(job):
                    selection.running.append(job)
            elif job.computed_len == job.host_len == 0 and not self._may_start():
                barred.append(job)  # those that the host holds come first, or it stays full for ever
            elif self._admits(job):
                selection.running.append(job)
                selection.newcomers.append(job)
            else:
                selection.refused.append(job)
                if len(selection.refused) > self.admission.max_skips:
                    break
        if not selection.running:  # those that the host holds do not want to run
            selection.newcomers = [job for job in barred[: self.max_num_seqs] if self._admits(job)]
            selection.running = list(selection.newcomers)
        return selection

    def _may_start(self) -> bool:
        if self._starts_allowed is None:
            self._starts_allowed = self.may_start()
        return self._starts_allowed

    def _keeps(self, job: Job) -> bool:
        """Of admitted jobs that may be moved out, those stay that fit with one token more each."""
        if self._used + job.known_len + 1 > self.capacity and self._used:
            return False
        self._used += job.known_len + 1
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

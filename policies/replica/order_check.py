"""The KVOffloadManager's decisions at a replica: whether they come in time, and whether they still fit then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from farsight.core.messages.kv import OffloadOrders, OffloadQuestion
from farsight.core.request import Residency
from farsight.policies.interfaces import Job, KvMoves, KvView, ScheduledRequest


@dataclass(slots=True)
class OffloadTally:
    """Counts of scheduling points with KV to move, and of orders that came to nothing; the numbers only rise.

    Attributes:
        answered: Points decided by the KVOffloadManager; ``alone``: by the Scheduler.
        late: Questions without an answer by the deadline.
        refused: Orders that no longer fitted the state when they came.
    """

    answered: int = 0
    alone: int = 0
    late: int = 0
    refused: int = 0


class OffloadClient:
    """Asks the KVOffloadManager one question at a time. A manager that has missed a deadline is still asked, but not
    waited for until it answers within the deadline again.

    Args:
        deadline_s: Seconds that an answer may take; with 0 nothing is asked.
    """

    def __init__(self, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self.tally = OffloadTally()
        self._asked: OffloadQuestion | None = None
        self._asked_at = 0.0
        self._is_silent = False
        self._seq = 0
        self._unsent: OffloadQuestion | None = None

    @property
    def is_asked(self) -> bool:
        """A question is open."""
        return self._asked is not None

    @property
    def waits(self) -> bool:
        """A question is open, and its answer is worth waiting for."""
        return self.is_asked and not self._is_silent

    @property
    def decides_alone(self) -> bool:
        """The Scheduler decides now, whether it asks as well or not."""
        return not self.deadline_s or self._is_silent

    @property
    def asks(self) -> bool:
        """A question may be put now."""
        return bool(self.deadline_s) and not self.is_asked

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def put(self, question: OffloadQuestion, now: float) -> None:
        """Opens a question, which is still to be sent."""
        self._asked = self._unsent = question
        self._asked_at = now

    def take_question(self) -> OffloadQuestion | None:
        """Returns the question that is still to be sent, once; None if there is none."""
        question, self._unsent = self._unsent, None
        return question

    def look(self, now: float) -> None:
        """Stops waiting for the open question if its deadline has passed."""
        if self.waits and now - self._asked_at >= self.deadline_s:
            self._fall_silent()

    def late(self, seq: int) -> None:
        """Stops waiting for this question, which was not answered by the deadline."""
        if self.waits and self._is_open(seq):
            self._fall_silent()

    def answer(self, orders: OffloadOrders, now: float) -> OffloadQuestion | None:
        """Closes the question that these orders answer; returns it if they are waited for and in time, else None."""
        question = self._asked
        if question is None or orders.seq != question.seq:
            return None
        in_time, waited = now - self._asked_at < self.deadline_s, self.waits
        self._asked = None
        self._is_silent = not in_time
        return question if waited and in_time else None

    def unanswered(self, seq: int) -> None:
        """Closes this question and stops waiting: its answer will not come, since the manager is gone."""
        if self._is_open(seq):
            if self.waits:
                self._fall_silent()
            self._asked = self._unsent = None

    def forget(self) -> None:
        """Drops an open question, which was about an earlier worker."""
        self._asked = self._unsent = None

    def _is_open(self, seq: int) -> bool:
        return self._asked is not None and self._asked.seq == seq

    def _fall_silent(self) -> None:
        self._is_silent = True
        self.tally.late += 1


def standing_orders(
    question: OffloadQuestion, orders: OffloadOrders, view: KvView, requests: Mapping[str, ScheduledRequest]
) -> tuple[KvMoves, int]:
    """Returns the orders that stand, and the number of those that do not. O(jobs in the question and in the view).

    A request that was called to execute since the question stays on the device, and so does a request whose room is no
    longer needed. No request comes back into room that was promised since. If nothing has changed, all orders stand.

    Args:
        question: The state when the orders were made; ``view``: the state now.
        requests: All requests here, by id.
    """
    check = _Check(question, view, requests)
    offload, drop = check.victims(orders)
    upload = list(check.returns(orders, view.free - view.needed - orders.idle_target))
    num_stand = len(offload) + len(drop) + len(upload)
    num_orders = len(orders.offload) + len(orders.drop) + len(orders.upload)
    return KvMoves(tuple(offload), tuple(drop), tuple(upload)), num_orders - num_stand


class _Check:
    def __init__(self, question: OffloadQuestion, view: KvView, requests: Mapping[str, ScheduledRequest]) -> None:
        self._view, self._requests = view, requests
        self._were_running = {each.request_id for each in question.running}
        self._are_running = {job.request_id for job in view.running}
        self._holding = self._are_running | {job.request_id for job in view.idle}
        self._hosted = {job.request_id for job in view.offloaded}
        self._surplus = (view.free - view.needed) - (question.free - question.needed)

    def victims(self, orders: OffloadOrders) -> tuple[list[Job], list[Job]]:
        """Returns the jobs to be moved to the host and those to be dropped. Room that became free since the question
        spares the last of them, and first of all jobs to be dropped, which would have to compute their KV again.
        """
        host_free = self._view.host_free
        offload: list[Job] = []
        for job in self._leavers(orders.offload):
            if job.computed_len <= host_free:
                offload.append(job)
                host_free -= job.computed_len
        drop = self._still_needed(list(self._leavers(orders.drop)))
        return self._still_needed(offload), drop

    def _leavers(self, request_ids: tuple[str, ...]) -> Iterator[Job]:
        first = self._view.running[0].request_id if self._view.running else ""
        for request_id in dict.fromkeys(request_ids):
            if request_id not in self._holding or request_id == first:
                continue
            job = self._requests[request_id]
            was_called = request_id in self._are_running and request_id not in self._were_running
            if job.is_resident and job.residency is Residency.DEVICE and not was_called:
                yield job

    def _still_needed(self, jobs: list[Job]) -> list[Job]:
        needed = []
        for job in reversed(jobs):
            if job.computed_len <= self._surplus:
                self._surplus -= job.computed_len
            else:
                needed.append(job)
        return needed[::-1]

    def returns(self, orders: OffloadOrders, spare: int) -> Iterator[Job]:
        """Yields the jobs on the host that are called back, while they fit into ``spare`` tokens."""
        size = self._view.block_size
        for request_id in dict.fromkeys(orders.upload):
            if request_id not in self._hosted:
                continue
            job = self._requests[request_id]
            spare -= -(-job.known_len // size) * size
            if spare < 0:
                return
            yield job

"""Finds the KVOffloadManager's orders that still fit when they come: the Scheduler's books may have changed by then."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from core.messages.kv import OffloadOrders, OffloadQuestion
from core.request import Residency
from policies.interfaces import Job, KvMoves, KvView, ScheduledRequest


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

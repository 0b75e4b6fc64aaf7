"""Writes the plans for a replica's worker, and decides how far each plan lets a request go.

A step carries as many prompt tokens beside streams as keep the streams' gaps below a target. A stream gets one token a
step, so its gap is the step's duration. The budget follows from the measured price of steps and from the streams that
run, where other servers take a constant (Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with
Sarathi-Serve", OSDI 2024: chosen offline for a model and a device).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from farsight.core.costs import StepCost
from farsight.core.errors import InvalidValueError
from farsight.core.messages.plans import Plan, Slot
from farsight.core.request import Residency
from farsight.policies.interfaces import Job, Order, ScheduledRequest
from farsight.policies.replica.mirror import WorkerMirror
from farsight.policies.replica.places import PlaceLimit

UNBOUNDED = 0
"""No bound but the step's own."""

LEAST_TOKENS = 16
"""Least prompt tokens of a step, so that a prompt always goes on; fewer only where the step itself has no room."""


@dataclass(frozen=True, slots=True)
class StepBudget:
    """Prompt tokens of a step in which sequences decode.

    Prompts lengthen a step to ``max_gap_s`` at most. Where streams alone take more than half of ``max_gap_s``, prompts
    get as much time as the streams take, so that prompts never stand still.

    Attributes:
        max_gap_s: Longest gap between two tokens of a stream that prompts may make; infinity for no budget.

    Raises:
        InvalidValueError: The gap is not positive.
    """

    max_gap_s: float = math.inf

    def __post_init__(self) -> None:
        if not self.max_gap_s > 0:
            raise InvalidValueError("max_gap_s", self.max_gap_s, "seconds > 0 or infinity")

    def prompt_tokens(self, running: Sequence[Job], cost: StepCost | None) -> int:
        """Returns the most prompt tokens of a step of these jobs; ``UNBOUNDED`` without target, streams or price. O(n).

        Args:
            running: Jobs that execute next.
            cost: As measured; None before a measurement.
        """
        if self.max_gap_s == math.inf or cost is None or cost.prefill_token_s <= 0:
            return UNBOUNDED
        num_streams = context_len = start = 0
        for job in running:
            if job.decodes:
                num_streams += 1
                context_len += job.prompt_len + job.output_len
            else:
                start = max(start, job.computed_len)
        if not num_streams:
            return UNBOUNDED
        streams_s = cost.step_s(0, num_streams, context_len)
        left_s = max(self.max_gap_s - streams_s, streams_s)
        return max(LEAST_TOKENS, _tokens_in(left_s, start, cost))


NO_BUDGET = StepBudget()
"""A step carries as many prompt tokens as fit."""


def _tokens_in(seconds: float, start: int, cost: StepCost) -> int:
    """Returns the prompt tokens from position ``start`` on that take ``seconds`` of a step."""
    pair_s = cost.prefill_pair_s
    linear_s = cost.prefill_token_s + pair_s * (start + 0.5)
    # linear n + pair n^2 / 2 = seconds, in the form that also holds for pair = 0
    return math.floor(2 * seconds / (linear_s + math.sqrt(linear_s * linear_s + 2 * pair_s * seconds)))


class ReplicaPlans:
    """Writes a plan when there is something new to say.

    Each plan is a full snapshot: the admitted requests in rank order, then the standbys that may take the place of a
    request that ends before the next plan comes (design section 3, rules 1-5).

    Args:
        order: Sets how long a job may run before the order looks at it again.
        budget: Sets how many prompt tokens may go beside streams.
        grant_lead_s: As in ``SchedulerLimits``.
        places: Says how many sequences a step may have.

    Attributes:
        cost: Cost of steps; None before any step has been measured.
    """

    def __init__(
        self, order: Order, budget: StepBudget, grant_lead_s: float, mirror: WorkerMirror, places: PlaceLimit
    ) -> None:
        self.cost: StepCost | None = None
        self._order, self._budget = order, budget
        self._grant_lead_s = grant_lead_s
        self._places = places
        self._least_slice_s = 2 * grant_lead_s  # part of a slice passes until a plan comes
        self._mirror = mirror
        self._standby: list[str] = []
        self._sent: list[str] = []  # requests that the latest plan lets execute
        self._contended = False  # whether other requests wanted to execute then

    def begin_anew(self) -> None:
        """Forgets the latest plan, since no worker has one."""
        self._standby, self._sent = [], []

    def said(self) -> list[str]:
        """Returns the requests that the latest plan lets execute and that still have their places."""
        return [request_id for request_id in self._sent if request_id in self._mirror.admitted]

    def is_due(self, running: list[Job], standby: list[str]) -> bool:
        """Returns whether a plan of these requests would say anything new."""
        mirror = self._mirror
        return (
            mirror.stale
            or standby != self._standby
            or [job.request_id for job in running] != self.said()
            or self._is_contended(running) > self._contended
            or self._grants_are_used_up(running)
            or self._is_cut_off()
        )

    def write(self, running: list[Job], standby: list[str], reserve_blocks: int) -> Plan:
        """Writes the next plan.

        Args:
            running: Jobs that are to execute, best first.
            standby: Requests that may start when there is room, best first.
            reserve_blocks: As in ``Plan``.
        """
        mirror = self._mirror
        assert mirror.worker is not None
        self._standby, self._sent = standby, [job.request_id for job in running]
        self._contended = self._is_contended(running)
        mirror.stale = False
        mirror.plan_seq += 1
        return Plan(
            worker_incarnation=mirror.worker.worker_incarnation,
            lease=mirror.lease,
            plan_seq=mirror.plan_seq,
            as_of_report_seq=mirror.report_seq,
            reserve_blocks=reserve_blocks,
            slots=tuple(self._slots(running)),
            prompt_tokens=self._budget.prompt_tokens(running, self.cost),
            places=0 if self._places.num == self._places.most else self._places.num,
        )

    def _slots(self, running: list[Job]) -> list[Slot]:
        scheduled, admitted = self._mirror.requests, self._mirror.admitted
        decode_s = self._decode_s(running)
        # All of them take part in the next step, so no prefill may use up its tokens before the decodes have theirs.
        executing = [scheduled[job.request_id] for job in running]
        executing.sort(key=_prefills)
        taken = set(self._sent)
        slots = [self._slot(each, decode_s, standby=False) for each in executing]
        slots += [self._slot(each, decode_s, standby=False) for rid, each in admitted.items() if rid not in taken]
        slots += [self._slot(scheduled[rid], decode_s, standby=True) for rid in self._standby]
        named = {slot.request_id for slot in slots}
        # Shipped earlier and pushed out of the standby window by preempted requests: the worker still keeps them.
        kept = [each for rid, each in self._mirror.shipped.items() if rid not in named]
        kept.sort(key=_number)
        return slots + [self._slot(each, decode_s, standby=True) for each in kept]

    def _slot(self, scheduled: ScheduledRequest, decode_s: float | None, *, standby: bool) -> Slot:
        if scheduled.shipped_in is None:
            self._mirror.ship(scheduled)
        if scheduled.residency is Residency.HOST and self._is_away(scheduled):
            assert scheduled.slot is not None
            return scheduled.slot  # no request runs there, whatever its grant
        scheduled.granted_len = self._grant(scheduled, decode_s)
        cut_off_at_s = self._cut_off_at_s(scheduled)
        last = scheduled.slot
        if last is None or not _says(last, scheduled, cut_off_at_s, standby=standby):
            scheduled.slot = Slot(
                request_id=scheduled.request_id,
                attempt=scheduled.request.attempt,
                prefill_to=scheduled.max_total_len,
                length_to=scheduled.granted_len,
                standby=standby,
                num_preemptions=scheduled.num_preemptions,
                request=None if scheduled.delivered else scheduled.request,
                residency=scheduled.residency,
                num_moves=scheduled.num_moves,
                rests=scheduled.rests,
                cut_off_at_s=cut_off_at_s,
            )
        assert scheduled.slot is not None
        return scheduled.slot

    @staticmethod
    def _is_away(scheduled: ScheduledRequest) -> bool:
        """Returns whether, as when the last slot was written, the KV is on the host and the worker has the payload."""
        last = scheduled.slot
        if last is None or last.residency is not Residency.HOST or last.num_moves != scheduled.num_moves:
            return False
        return last.standby and last.request is None and last.num_preemptions == scheduled.num_preemptions

    def _is_contended(self, running: list[Job]) -> bool:
        """Returns whether other requests want to execute."""
        return len(running) < len(self._mirror.requests)

    def _grants_are_used_up(self, running: list[Job]) -> bool:
        """Returns whether a job that is to execute has come near the end of its grant in the latest plan."""
        scheduled = self._mirror.requests
        lead = self._lead(self._decode_s(running))
        for job in running:
            each = scheduled[job.request_id]
            if job.prompt_len + job.output_len + lead >= each.granted_len < each.max_total_len:
                return True
        return False

    def _is_cut_off(self) -> bool:
        """Returns whether a request with a place has used up its slot's seconds: it stands still until a new plan."""
        if not self._order.cuts_off:
            return False
        admitted = [(each.slot, each.ran_s) for each in self._mirror.admitted.values()]
        return any(slot is not None and 0 < slot.cut_off_at_s <= ran_s for slot, ran_s in admitted)

    def _cut_off_at_s(self, scheduled: ScheduledRequest) -> float:
        """Returns ``Slot.cut_off_at_s``; 0, for no cut-off, where no other request wants the place."""
        if not self._order.cuts_off or not self._contended:
            return 0.0
        return scheduled.ran_s + max(self._order.slice_s(scheduled), self._least_slice_s)

    def _lead(self, decode_s: float | None) -> int:
        """Returns the tokens that a job may generate before the next plan comes."""
        return 0 if decode_s is None else math.ceil(self._grant_lead_s / decode_s)

    def _decode_s(self, running: list[Job]) -> float | None:
        """Returns the seconds of a step of all jobs that are to execute; None before any step has been measured."""
        if self.cost is None:
            return None
        context_len = sum([job.prompt_len + job.output_len for job in running])
        return self.cost.step_s(0, max(1, len(running)), max(1, context_len))  # other prices may be 0

    def _grant(self, scheduled: ScheduledRequest, decode_s: float | None) -> int:
        """Returns the total length that the request may reach, at least its next step, before the order looks again.

        Where no other request wants the place, the order need not look: a newcomer brings a new plan.
        """
        most, job = scheduled.max_total_len, scheduled
        if decode_s is None or self.cost is None or not self._contended:
            return most
        slice_s = self._order.slice_s(job)
        if slice_s == math.inf:
            return most
        slice_s = max(slice_s, self._least_slice_s)
        missing, known_len = job.missing_len, job.prompt_len + job.output_len
        first_s = 0.0 if missing <= 1 else self.cost.prefill_s(missing, known_len - missing) - decode_s
        num_tokens = max(1, math.ceil((slice_s - first_s) / decode_s))
        return min(most, known_len + num_tokens)


def _says(slot: Slot, scheduled: ScheduledRequest, cut_off_at_s: float, *, standby: bool) -> bool:
    """Returns whether the slot says what a new slot would say: most of a plan is as in the plan before."""
    return (
        slot.length_to == scheduled.granted_len
        and slot.standby == standby
        and slot.request is (None if scheduled.delivered else scheduled.request)
        and slot.rests == scheduled.rests
        and slot.num_preemptions == scheduled.num_preemptions
        and slot.num_moves == scheduled.num_moves
        and slot.residency is scheduled.residency
        and slot.cut_off_at_s == cut_off_at_s
    )


def _prefills(job: Job) -> bool:
    return not job.decodes


def _number(scheduled: ScheduledRequest) -> int:
    return scheduled.number

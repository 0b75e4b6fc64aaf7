"""What no schedule can beat: lower bounds of mean and 99th percentile of completion times, with hindsight.

The replica is relaxed to one resource of which every second gives one second. A request uses it up by its prompt and by
each output token: that token's own time, and of the step's fixed time the largest share that is certain, slots (1 / B),
KV memory (y / M) and tokens of a step (1 / T) weighted by numbers that add up to 1. Every step of a real schedule keeps
this account, since its requests hold at most B slots, M tokens of memory and T tokens of the step together; so a bound
for the resource is a bound for the replica. What a schedule must do besides (swap, whole blocks, whole steps, not
knowing the future) is left out: the gap between bound and policy is an upper limit of what is still to be gained.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from farsight.core.costs import StepCost, attention_pairs
from farsight.core.errors import InvalidValueError
from farsight.simulator.traffic.workload import SimRequest

FloatArray = NDArray[np.float64]

_NEVER = 1e9
"""Seconds; the price of work that has no instant left."""


_PATIENCE = 4
"""Rounds without a better bound, after which steps are halved."""


@dataclass(frozen=True, slots=True)
class ReplicaBounds:
    """What a replica can do at most.

    Attributes:
        max_num_seqs: B, sequences of a step.
        kv_tokens: M, tokens of KV.
        max_batch_tokens: T, tokens computed in a step.
    """

    cost: StepCost
    max_num_seqs: int
    kv_tokens: int
    max_batch_tokens: int


@dataclass(frozen=True, slots=True)
class PhaseWork:
    """What one phase (the prompts, or the outputs) of each request takes; seconds, shape (n,).

    Attributes:
        work_s: Seconds of the resource.
        alone_s: Shortest time in which it can be used up, whatever else runs.
        release_s: No work before this instant ...
        tail_s: ... and after its end the request takes so much longer at least.
    """

    work_s: FloatArray
    alone_s: FloatArray
    release_s: FloatArray
    tail_s: FloatArray


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests as work, in order of arrival."""

    arrived_s: FloatArray
    alone_s: FloatArray
    prompts: PhaseWork
    outputs: PhaseWork

    @property
    def work_s(self) -> FloatArray:
        total: FloatArray = self.prompts.work_s + self.outputs.work_s
        return total


def workload(arrivals: Sequence[SimRequest], bounds: ReplicaBounds, shares: tuple[float, float, float]) -> Workload:
    """The work of these requests.

    Args:
        shares: Weights of slots, memory and tokens of a step in the fixed time of a step; they add up to 1.

    Raises:
        InvalidValueError: The weights are negative or do not add up to 1.
    """
    if min(shares) < 0 or not math.isclose(sum(shares), 1.0):
        raise InvalidValueError("shares", shares, "three weights >= 0 that add up to 1")
    arrivals = sorted(arrivals, key=lambda each: each.arrived_at)
    arrived_s = np.array([each.arrived_at for each in arrivals])
    prompt = np.array([each.prompt_len for each in arrivals], float)
    steps = np.array([each.output_len for each in arrivals], float) - 1  # the prompt's last step gives the first token
    cost, base = bounds.cost, bounds.cost.base_s
    slot_s, token_s = base * shares[0] / bounds.max_num_seqs, base * shares[2] / bounds.max_batch_tokens
    memory_s = base * shares[1] / bounds.kv_tokens
    pairs = np.array([attention_pairs(each.prompt_len, 0) for each in arrivals], float)
    num_chunks = np.ceil(prompt / bounds.max_batch_tokens)
    prompt_s = cost.prefill_token_s * prompt + cost.prefill_pair_s * pairs
    prompt_work = prompt_s + token_s * prompt + slot_s * num_chunks + memory_s * prompt
    prompt_alone = prompt_s + base * num_chunks
    # The most of the resource that a second can take of a prompt: one step of as many of its tokens as there may be.
    largest = np.minimum(prompt, bounds.max_batch_tokens)
    step_s = cost.prefill_token_s * largest
    rate = (step_s + token_s * largest + slot_s + memory_s * prompt) / (base + step_s)
    context = steps * prompt + steps * (steps + 1) / 2
    output_work = (slot_s + token_s + cost.decode_seq_s) * steps + (memory_s + cost.context_token_s) * context
    output_alone = (base + cost.decode_seq_s) * steps + cost.context_token_s * context
    last = prompt + steps
    fixed_s = slot_s + token_s + cost.decode_seq_s
    last_rate = (fixed_s + (memory_s + cost.context_token_s) * last) / (
        base + cost.decode_seq_s + cost.context_token_s * last
    )
    alone_s = prompt_alone + output_alone
    return Workload(
        arrived_s,
        alone_s,
        PhaseWork(prompt_work, np.minimum(prompt_work / rate, prompt_alone), arrived_s, output_alone),
        PhaseWork(
            output_work,
            np.minimum(output_work / last_rate, output_alone),
            arrived_s + prompt_alone,
            np.zeros(len(steps)),
        ),
    )


def shares() -> Iterator[tuple[float, float, float]]:
    """Weights to try, a quarter apart: each gives a valid bound, the largest counts."""
    for slots in range(5):
        for memory in range(5 - slots):
            yield slots / 4, memory / 4, (4 - slots - memory) / 4


def tail_bound(load: Workload, share: float) -> float:
    """Seconds that this share of the requests (0.99) cannot all stay within.

    Requests that arrive between two instants and end within D use the resource between the first
    instant and D after the last one. All but the latest 1 - share of all do; the largest are the cheapest to leave out.
    """
    num_late = math.ceil((1 - share) * len(load.arrived_s))
    alone = np.sort(load.alone_s)
    bound = float(alone[len(alone) - 1 - num_late])
    work, arrived = load.work_s.tolist(), load.arrived_s.tolist()
    for first in range(0, len(work), max(1, len(work) // 100)):
        largest: list[float] = []
        needed = 0.0
        for each_s, at in zip(work[first:], arrived[first:], strict=True):
            needed += each_s
            heapq.heappush(largest, each_s)
            if len(largest) <= num_late:
                needed -= each_s
            else:
                needed += heapq.heappop(largest) - each_s
            bound = max(bound, needed - (at - arrived[first]))
    return bound


class MeanBound:
    """Lower bound of the mean completion time by a Lagrangian dual: any prices of the resource give one.

    Time is cut into slots of equal length. What is done in a slot counts with the slot's beginning; a request ends half
    of ``alone_s`` later than the mean instant of its work, since it cannot go faster. The prices, one a slot, rise
    where more is asked for than there is (Polyak's subgradient steps).

    With ``within_s`` the bound is one for schedules in which ``share`` of the requests end within so many seconds:
    the frontier between mean and tail.

    Args:
        ends_at: Slots reach up to here; behind there is room for everything, at that instant's price.
        num_slots: More of them make the bound sharper.
    """

    def __init__(
        self, load: Workload, ends_at: float, num_slots: int = 400, within_s: float = math.inf, share: float = 0.99
    ) -> None:
        self._load, self._num_slots, self._within_s = load, num_slots, within_s
        self._slot_s = ends_at / num_slots
        self._num = len(load.arrived_s)
        self._num_late = math.ceil((1 - share) * self._num)
        self._parts = [(part, part.work_s / load.work_s) for part in (load.prompts, load.outputs)]
        after_s = sum((weight * (part.alone_s / 2 + part.tail_s)).sum() for part, weight in self._parts)
        self._fixed_s = float(after_s - load.arrived_s.sum())

    def solve(self, target_s: float, num_rounds: int = 120) -> float:
        """The best bound found, seconds.

        Args:
            target_s: A mean that some schedule reaches; it sets the steps, not the validity.
        """
        goal = target_s * self._num
        first = self._first_prices()
        starts = [(share * first, 0.0) for share in (0.25, 0.5, 0.75, 1.0)]
        values = [self._evaluate(*start)[0] for start in starts]
        prices, late_price = kept = starts[int(np.argmax(values))]
        best, scale, num_stuck = max(values), 1.0, 0
        for _ in range(num_rounds):
            value, excess, too_late = self._evaluate(prices, late_price)
            if value > best:
                best, kept, num_stuck = value, (prices, late_price), 0
            else:
                num_stuck += 1
            if num_stuck > _PATIENCE:
                scale, num_stuck = scale / 2, 0
                prices, late_price = kept
                continue
            norm = float(excess @ excess) + too_late * too_late
            if norm == 0:
                break
            step = scale * max(goal - value, 0.01 * goal) / norm
            prices = np.maximum(prices + step * excess, 0.0)
            late_price = max(0.0, late_price + step * too_late)
        return max(best / self._num, float(self._load.alone_s.mean()))  # no request is faster than alone

    def _first_prices(self) -> FloatArray:
        """Prices that are right where a request may be worked on by the whole resource at once: the smallest first.

        While a request of so much work runs, the price falls by 1 / work a second, down to 0 where nothing waits.
        """
        prices = np.zeros(self._num_slots + 1)
        at, height = math.inf, 0.0
        slot = self._num_slots - 1
        for begins, ends, work_s in reversed(_smallest_first(self._load)):
            while slot >= 0 and slot * self._slot_s >= ends:
                slot -= 1
            if ends < at - 1e-9:
                height = 0.0  # nothing ran in between
            while slot >= 0 and slot * self._slot_s >= begins:
                prices[slot] = height + (ends - slot * self._slot_s) / work_s
                slot -= 1
            height += (ends - begins) / work_s
            at = begins
        return prices

    def _evaluate(self, prices: FloatArray, late_price: float) -> tuple[float, FloatArray, float]:
        """The dual's value, work asked for beyond what each slot has, and how many are late beyond what may be."""
        free = [self._cheapest(part, weight, prices, math.inf) for part, weight in self._parts]
        value = self._fixed_s - float(prices[:-1].sum()) * self._slot_s
        excess = np.zeros(self._num_slots + 1)
        is_late = np.zeros(self._num, bool)
        if self._within_s < math.inf:
            timely = [self._cheapest(part, weight, prices, self._within_s) for part, weight in self._parts]
            timely_s = sum(costs for costs, _ in timely)
            free_s = sum(costs for costs, _ in free) + late_price
            is_late = np.asarray(free_s < timely_s)
            value += float(np.minimum(free_s, timely_s).sum()) - late_price * self._num_late
            both = zip(free, timely, strict=True)
            uses = [np.where(is_late[:, None], late, in_time) for (_, late), (_, in_time) in both]
        else:
            value += float(sum(costs.sum() for costs, _ in free))
            uses = [used for _, used in free]
        for used in uses:
            excess += used.sum(axis=0)
        excess[:-1] -= self._slot_s
        excess[-1] = 0.0
        too_late = float(is_late.sum() - self._num_late) if self._within_s < math.inf else 0.0
        return value, excess, too_late

    def _cheapest(
        self, part: PhaseWork, weight: FloatArray, prices: FloatArray, within_s: float
    ) -> tuple[FloatArray, FloatArray]:
        """Each request's least cost, shape (n,), and its work by slots, shape (n, slots + 1)."""
        begins = np.arange(self._num_slots + 1) * self._slot_s
        at = np.maximum(begins[None, :], part.release_s[:, None])
        costs = weight[:, None] * at + part.work_s[:, None] * prices[None, :]
        costs[:, :-1][begins[None, 1:] <= part.release_s[:, None]] = _NEVER
        if within_s < math.inf:
            due = self._load.arrived_s + within_s - part.tail_s
            costs[begins[None, :] > due[:, None]] = _NEVER
        last = costs[:, -1].copy()  # behind the last slot there is room for everything at once
        costs[:, -1] = _NEVER
        most = self._slot_s / np.maximum(part.alone_s, 1e-9)
        num = min(self._num_slots, math.ceil(1 / most.min()) + 1)
        by_cost = np.argsort(costs, axis=1)[:, :num]
        ordered = np.take_along_axis(costs, by_cost, axis=1)
        taken = np.clip(1.0 - most[:, None] * np.arange(num), 0.0, most[:, None])
        taken[ordered >= last[:, None]] = 0.0
        left = np.maximum(1.0 - taken.sum(axis=1), 0.0)
        least = (taken * ordered).sum(axis=1) + left * last
        used = np.zeros(costs.shape)
        np.put_along_axis(used, by_cost, taken * part.work_s[:, None], axis=1)
        return least, used


def _smallest_first(load: Workload) -> list[tuple[float, float, float]]:
    """(begin, end, work of the request) of a resource that is given to the smallest request there; in order."""
    arrived, work = load.arrived_s.tolist(), load.work_s.tolist()
    spans: list[tuple[float, float, float]] = []
    waiting: list[list[float]] = []
    now = 0.0
    for index in range(len(work) + 1):
        until = arrived[index] if index < len(work) else math.inf
        while waiting and now < until:
            whole, left = waiting[0]
            ran = min(left, until - now)
            spans.append((now, now + ran, whole))
            now += ran
            if ran == left:
                heapq.heappop(waiting)
            else:
                waiting[0][1] = left - ran
        now = max(now, until)
        if index < len(work):
            heapq.heappush(waiting, [work[index], work[index]])
    return spans

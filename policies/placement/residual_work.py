"""The remaining work of the requests on each replica, from their forecasts and the time that they have run.

The router is not told how many tokens a request has produced. So it keeps a token clock for each replica, which
advances by one for each estimated step of the batch that decodes there; a request has produced as many tokens as the
clock advanced since its start. Its remaining output is the predicted length minus that.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from farsight.core.costs import StepCost
from farsight.core.errors import IntegrityError
from farsight.policies.admission.past_future import future_memory
from farsight.policies.lengths.law import MIN_REMAINING
from farsight.policies.placement.replica_slots import Floats

_TABLES = ("_held", "_running", "_begun_at", "_lengths", "_own_lens", "_context_lens", "_produced", "_left")

MORE_SEATS = 8
"""Initial number of seats (requests) for each replica, and how many more are added when they do not suffice."""


@dataclass(frozen=True, slots=True)
class RequestLengths:
    """The lengths of a request that are known before it is placed, in tokens.

    Attributes:
        prompt_len: Known tokens: the prompt and the output of earlier attempts.
        had_len: Tokens of that output of earlier attempts.
        most: Most output tokens that may still come.
    """

    prompt_len: int
    had_len: int
    most: int

    def left_of(self, output_len: float) -> float:
        """Returns the tokens still to come, at least 1, of a whole output with this predicted length."""
        return max(1.0, min(output_len - self.had_len, float(self.most)))


@dataclass(slots=True)
class _Seat:
    """The place of a request in the arrays.

    Attributes:
        prefill_s: Seconds to compute the part of its prompt that is not cached.
    """

    slot: int
    seat: int
    demand: RequestLengths
    prefill_s: float
    has_started: bool = False


class ResidualWork:
    """Requests in flight by replica, as arrays of shape (slots, seats).

    Produced and remaining tokens are computed at most once for each instant, on the first question, in O(slots * seats)
    numpy work; a request that is placed, starts or ends at that instant changes one element. ``meetings`` takes three
    numpy operations over the arrays, ``memory_wait_s`` a few over one row.

    Args:
        cost: Cost of steps, the same on all replicas.

    Attributes:
        queued_s: By slot, prefill seconds of the requests that have not started.
        num_requests: By slot, number of requests; floats, because they are factors of float arrays.
    """

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._seats: dict[str, _Seat] = {}
        self._free: list[list[int]] = []
        shape = (0, MORE_SEATS)
        self._held = np.zeros(shape, np.bool_)
        self._running: Floats = np.zeros(shape)  # 1 for requests that have started, else 0; used as a factor
        self._begun_at: Floats = np.zeros(shape)  # reading of the replica's token clock at the start
        self._lengths: Floats = np.zeros(shape)  # predicted output lengths from the placement on; 0 for free seats
        self._own_lens: Floats = np.zeros(shape)  # prompt tokens that no other request holds; 0 for free seats
        self._context_lens: Floats = np.zeros(shape)
        self._produced: Floats = np.zeros(shape)  # this and ``_left`` as of ``_now`` if ``_is_current``
        self._left: Floats = np.zeros(shape)
        self._is_current = True
        self._ones: Floats = np.ones(MORE_SEATS)  # ``vecdot`` with it takes a fifth of the time of ``sum(axis=1)``
        self._clocks: Floats = np.zeros(0)
        self._steps_s: Floats = np.zeros(0)
        self._contexts: list[int] = []
        self._num_running: list[int] = []
        self._now = 0.0
        self.queued_s: Floats = np.zeros(0)
        self.num_requests: Floats = np.zeros(0)

    def add_replica(self) -> None:
        for name in _TABLES:
            table = getattr(self, name)
            setattr(self, name, np.concatenate([table, np.zeros((1, table.shape[1]), table.dtype)]))
        for name in ("_clocks", "queued_s", "num_requests"):
            row = getattr(self, name)
            setattr(self, name, np.append(row, np.zeros(1, row.dtype)))
        self._contexts.append(0)
        self._num_running.append(0)
        self._steps_s = np.append(self._steps_s, self._cost.step_s(0, 1, 0))
        self._free.append(list(range(self._held.shape[1]))[::-1])

    def clear(self, slot: int) -> None:
        """Forgets all requests of the replica."""
        for request_id in [each for each, seat in self._seats.items() if seat.slot == slot]:
            self.remove(request_id)

    def advance(self, now: float) -> None:
        """Advances the token clocks to ``now``. O(slots)."""
        if now > self._now:
            self._clocks += (now - self._now) / self._steps_s
            self._now = now
            self._is_current = False

    def add(
        self, request_id: str, slot: int, demand: RequestLengths, left: float, own_len: int, prefill_s: float
    ) -> None:
        """Adds a placed request.

        Args:
            left: Predicted output tokens that are still to come.
            own_len: Prompt tokens that it computes itself; no other request holds their KV.
            prefill_s: Seconds to compute them.
        """
        if not self._free[slot]:
            self._widen()
        seat = self._free[slot].pop()
        self._seats[request_id] = _Seat(slot, seat, demand, prefill_s)
        self._held[slot, seat] = True
        self._lengths[slot, seat] = left
        self._own_lens[slot, seat] = own_len
        self._context_lens[slot, seat] = demand.prompt_len
        self._left[slot, seat] = left
        self.num_requests[slot] += 1
        self._queue(slot, prefill_s)

    def start(self, request_id: str, own_len: int) -> None:
        """Books the first token of a request, which computed ``own_len`` prompt tokens itself."""
        seat = self._seats[request_id]
        if seat.has_started:
            return
        seat.has_started = True
        slot = seat.slot
        self._running[slot, seat.seat] = 1.0
        self._begun_at[slot, seat.seat] = self._clocks[slot]
        self._own_lens[slot, seat.seat] = own_len
        self._run(slot, 1, seat.demand.prompt_len)
        self._queue(slot, -seat.prefill_s)

    def predict(self, request_id: str, output_len: float) -> None:
        """Sets the predicted length of its whole output; unknown requests are ignored."""
        seat = self._seats.get(request_id)
        if seat is not None:
            self._lengths[seat.slot, seat.seat] = seat.demand.left_of(output_len)
            self._is_current = False

    def remove(self, request_id: str) -> None:
        """Removes a request that is no longer in flight."""
        seat = self._seats.pop(request_id)
        at = seat.slot, seat.seat
        self._held[at] = False
        for table in (self._running, self._lengths, self._own_lens, self._produced, self._left):
            table[at] = 0.0
        self._free[seat.slot].append(seat.seat)
        self.num_requests[seat.slot] -= 1
        if seat.has_started:
            self._run(seat.slot, -1, -seat.demand.prompt_len)
        else:
            self._queue(seat.slot, -seat.prefill_s)

    def remaining(self) -> Floats:
        """Returns the expected remaining output tokens of each request, 0 on free seats; shape (slots, seats).

        A request that has outlived its forecast is expected to produce a quarter of its output so far again, at least
        ``MIN_REMAINING`` tokens (as in ``policies.lengths.law.remaining``).
        """
        if not self._is_current:
            self._work_out()
        return self._left

    def _work_out(self) -> None:
        """Computes produced and remaining tokens as of now."""
        np.subtract(self._clocks[:, None], self._begun_at, out=self._produced)
        self._produced *= self._running
        np.subtract(self._lengths, self._produced, out=self._left)
        late = self._held & (self._left <= 0)
        if late.any():
            self._left[late] = np.maximum(self._produced[late] / 4, MIN_REMAINING)
        self._is_current = True

    def meetings(self, length: float) -> tuple[Floats, Floats]:
        """Returns, by slot, the steps that its requests share with a request of ``length`` output tokens, summed over
        the requests, and the same sum weighted with the context of each."""
        shared = np.minimum(self.remaining(), length)
        return np.vecdot(shared, self._ones), np.vecdot(shared, self._context_lens)

    def memory_wait_s(self, slot: int, own_len: int, length: float, capacity: int) -> float:
        """Returns the seconds until the request fits into the replica's memory; 0 if it fits now. O(n log n).

        The request fits once those that end first have freed as many tokens as the predicted peak of all requests
        (Past-Future, section 3.3) exceeds ``capacity``.
        """
        all_left, held = self.remaining()[slot], self._held[slot]
        holding = self._own_lens[slot] + self._produced[slot]
        at_their_ends = np.vecdot(holding + all_left, self._ones) + self.num_requests[slot]
        if at_their_ends + own_len + length + 1 <= capacity or not held.any():
            return 0.0
        base, left = holding[held], np.ceil(all_left[held])
        peak = future_memory(
            np.append(base, own_len).astype(np.int64), np.append(left, np.ceil(length)).astype(np.int64)
        )
        excess = int(peak) - capacity
        if excess <= 0:
            return 0.0
        order = left.argsort()
        freed = (base + left)[order].cumsum()
        last = min(int(np.searchsorted(freed, excess)), len(order) - 1)
        return float(left[order[last]] * self._steps_s[slot])

    def _queue(self, slot: int, more_s: float) -> None:
        """Adds to ``queued_s``; with an empty queue it is set to 0, which removes rounding errors."""
        waiting = self.num_requests[slot] > self._num_running[slot]
        self.queued_s[slot] = max(0.0, self.queued_s[slot] + more_s) if waiting else 0.0

    def price(self, cost: StepCost) -> None:
        """Sets the step cost; prompts that wait keep the price that they were added with. O(slots)."""
        self._cost = cost
        for slot in range(len(self._free)):
            self._run(slot, 0, 0)

    def _run(self, slot: int, more: int, more_context: int) -> None:
        self._num_running[slot] += more
        self._contexts[slot] += more_context
        self._steps_s[slot] = self._cost.step_s(0, max(1, self._num_running[slot]), self._contexts[slot])

    def _widen(self) -> None:
        width = self._held.shape[1]
        for name in _TABLES:
            table = getattr(self, name)
            setattr(self, name, np.concatenate([table, np.zeros((len(table), MORE_SEATS), table.dtype)], axis=1))
        self._ones = np.ones(width + MORE_SEATS)
        for free in self._free:
            free.extend(range(width + MORE_SEATS - 1, width - 1, -1))

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the arrays agree with the requests of every replica."""
        if self._is_current:
            before = self._produced.copy(), self._left.copy()
            self._work_out()
            if not (np.array_equal(before[0], self._produced) and np.array_equal(before[1], self._left)):
                raise IntegrityError("produced or remaining tokens are not those of the present instant")
        for slot, free in enumerate(self._free):
            seats = [seat for seat in self._seats.values() if seat.slot == slot]
            running = [seat for seat in seats if seat.has_started]
            if sorted([*free, *(seat.seat for seat in seats)]) != list(range(self._held.shape[1])):
                raise IntegrityError(f"replica {slot}: a seat is taken twice or lost")
            counted = self._held[slot].sum(), self._running[slot].sum()
            if (*counted, self.num_requests[slot], self._num_running[slot]) != (len(seats), len(running)) * 2:
                raise IntegrityError(f"replica {slot}: {len(seats)} requests, {len(running)} running, are miscounted")
            empty = ~self._held[slot]
            if self._lengths[slot, empty].any() or self._own_lens[slot, empty].any():
                raise IntegrityError(f"replica {slot}: a seat that is free has tokens")
            if self._contexts[slot] != sum(seat.demand.prompt_len for seat in running):
                raise IntegrityError(f"replica {slot}: the context of its requests does not add up")
            queued_s = sum(seat.prefill_s for seat in seats if not seat.has_started)
            if abs(queued_s - self.queued_s[slot]) > 1e-6 * max(1.0, queued_s):
                raise IntegrityError(f"replica {slot}: {self.queued_s[slot]} is not the prefill that waits there")

"""E2 priced with forecasts: a request goes where it and those that it meets there lose the least time.

Preble prices a replica by what was placed there within a window. Here the requests that are there now count, with what
their forecasts leave of them; the tree, hits and evictions are those of E2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.costs import StepCost
from core.errors import InvalidValueError
from core.forecast import Forecast
from core.messages.cache import KVCacheEvent
from core.messages.placement import PrefixView, ReplicaView
from core.request import Request
from policies.placement.base import PLACEMENTS, Choice, Placement, ReplicaLoad
from policies.placement.e2_profiles import from_step_cost
from policies.placement.load_cost import Query
from policies.placement.prefix_loads import PrefixLoads
from policies.placement.prefix_tree import Path
from policies.placement.replica_slots import Floats
from policies.placement.residual_work import Demand, ResidualWork
from policies.settings import MAX_TREE_BYTES, PolicySettings

WINDOW_S = 180.0
"""Over which uses of a prefix count when it is to be evicted, and outputs where nothing is foreseen; H of Preble."""

INITIAL_OUTPUT_LEN = 200.0
"""Output tokens assumed without a forecast and before any request has ended."""


@dataclass(frozen=True, slots=True)
class ForecastChoice(Choice):
    """``reason`` is hit or miss; seconds that the request costs itself and those it meets, by cause.

    Attributes:
        queue_s: Of prompts that are computed there before.
        prefill_s: Of its own prompt, for it and for all that are there.
        decode_s: Of steps that it shares with others, for it and for them.
        evict_s: Of computing again what has to make room.
        memory_s: Until its predicted peak fits.
        predicted_len: Of its output.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    evict_s: float = 0.0
    memory_s: float = 0.0
    predicted_len: float = 0.0

    @property
    def cost_s(self) -> float:
        return self.queue_s + self.prefill_s + self.decode_s + self.evict_s + self.memory_s


class E2Forecast(Placement):
    """Places a request where the sum of its own delay and of the delay that it brings to others is least.

    Cost of a placement: O(length of its path + nodes evicted) and some numpy operations over all requests in flight.

    Args:
        cost: What steps cost, the same on all replicas.
        block_size: Tokens an element of a path stands for.
        max_tree_bytes: As ``PrefixLoads`` takes it.
    """

    def __init__(self, cost: StepCost, block_size: int, max_tree_bytes: int = MAX_TREE_BYTES) -> None:
        if block_size < 1:
            raise InvalidValueError("block_size", block_size, "an integer >= 1")
        self.block_size = block_size
        regressions = from_step_cost(cost)
        self.prefixes = PrefixLoads(
            regressions, block_size, WINDOW_S, INITIAL_OUTPUT_LEN, max_tree_bytes=max_tree_bytes
        )
        self.work = ResidualWork(cost)
        self._cost = cost

    def choose(
        self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float
    ) -> ForecastChoice:
        """A replica for this request, of those given (never empty)."""
        had_len = len(request.output_ids)
        demand = Demand(request.known_len, had_len, request.sampling.max_new_tokens - had_len)
        forecast = request.forecast
        output_len = self.prefixes.load.overall_output_len if forecast is None else forecast.mean
        return self.place(request.request_id, tuple(prefix), demand, output_len, loads, now)

    def place(
        self,
        request_id: str,
        prefix: Path,
        demand: Demand,
        output_len: float,
        loads: tuple[ReplicaLoad, ...],
        now: float,
    ) -> ForecastChoice:
        """``choose`` by what it needs to know of the request, which is not in flight yet.

        Args:
            output_len: The predicted output length.
        """
        query = self.prefixes.match(request_id, prefix, demand.prompt_len, loads, now)
        self.work.advance(now)
        left = demand.left_of(output_len)
        slot, price = self._cheapest(query, left)
        reason = "hit" if query.hit_end(slot) else "miss"
        placed = self.prefixes.enter(request_id, query, slot, now)
        self.work.add(request_id, slot, demand, left, demand.prompt_len - placed.hit_len, placed.prefill_s)
        return ForecastChoice(
            self.prefixes.slots.names[slot], reason, placed.hit_len, placed.pending_len, *price, predicted_len=left
        )

    def replica_up(self, name: str, capacity: int) -> None:
        """A worker life begins that holds ``capacity`` KV tokens: nothing is cached there."""
        slot = self.prefixes.replica_up(name, capacity)
        if slot < len(self.work.queued_s):
            self.work.clear(slot)
        else:
            self.work.add_replica()

    def replica_gone(self, name: str) -> None:
        """The replica will not come back; unknown ones are fine."""
        slot = self.prefixes.replica_gone(name)
        if slot is not None:
            self.work.clear(slot)

    def started(self, request_id: str, cached_len: int, queue_s: float, now: float) -> None:
        """A request has first run: from now on it produces tokens."""
        placed = self.prefixes.started(request_id, cached_len, now)
        if placed is not None:
            self.work.advance(now)
            self.work.start(request_id, placed.prompt_len - cached_len)

    def foreseen(self, request_id: str, forecast: Forecast, now: float) -> None:
        """A forecast of a request that was placed without one."""
        self.work.foresee(request_id, forecast.mean)

    def ended(self, request_id: str, output_len: int | None, now: float) -> None:
        """A request is not in flight any more; None where its output did not come to its end."""
        if self.prefixes.ended(request_id, output_len, now) is not None:
            self.work.advance(now)
            self.work.remove(request_id)

    def noticed(self, replica: str, notice: KVCacheEvent) -> None:
        """The replica tells what it caches."""
        self.prefixes.noticed(replica, notice)

    def priced(self, replica: str, cost: StepCost) -> None:
        """Steps of this replica cost so much: what holds is the mean over the replicas that have said so."""
        mean = self.prefixes.priced(replica, cost)
        if mean is not None:
            self._cost = mean
            self.work.price(mean)

    def show(self, view: ReplicaView) -> ReplicaView:
        """A replica with what was placed there within the window and what it is believed to cache."""
        return self.prefixes.show(view)

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        """By the requests placed within the window."""
        return self.prefixes.busiest(limit)

    def _cheapest(self, query: Query, length: float) -> tuple[int, tuple[float, float, float, float, float]]:
        """And the parts of its price there, in the order of ``ForecastChoice``.

        Evictions and memory are priced only where the rest alone could still win: they are never below 0.
        """
        work, prefixes = self.work, self.prefixes
        delayed = 1 + work.num_requests  # by what is computed there: those that wait now will run beside it
        prefill_s = prefixes.cost.prefill_by_slot(query) * delayed
        decode_s = self._meeting_s(query.prompt_len, length)
        costs_s = work.queued_s + prefill_s + decode_s + prefixes.slots.closed
        best_s, best = np.inf, (0, 0.0, 0.0)
        for slot in map(int, costs_s.argsort(kind="stable")):
            if costs_s[slot] >= best_s:
                break
            evict_s = prefixes.cost.evict_s(slot, query) * float(delayed[slot])
            own_len = query.prompt_len - query.hit_end(slot) * self.block_size
            capacity = prefixes.cost.capacity[slot] * self.block_size
            memory_s = work.memory_wait_s(slot, own_len, length, capacity)
            if costs_s[slot] + evict_s + memory_s < best_s:
                best_s, best = costs_s[slot] + evict_s + memory_s, (slot, evict_s, memory_s)
        slot, evict_s, memory_s = best
        return slot, (float(work.queued_s[slot]), float(prefill_s[slot]), float(decode_s[slot]), evict_s, memory_s)

    def _meeting_s(self, prompt_len: int, length: float) -> Floats:
        """By slot: a step that two requests share takes each of them longer by what the other adds to it."""
        cost = self._cost
        steps, context_steps = self.work.meetings(length)
        step_s = 2 * cost.decode_seq_s + cost.context_token_s * prompt_len
        return steps * step_s + context_steps * cost.context_token_s

    def check_integrity(self) -> None:
        """Raises IntegrityError unless everything agrees."""
        self.prefixes.check_integrity()
        self.work.check_integrity()


@PLACEMENTS.register("e2-forecast", uses_prefixes=True)
def build_e2_forecast(settings: PolicySettings) -> E2Forecast:
    """E2 priced with predicted work."""
    return E2Forecast(settings.cost, settings.block_size, settings.e2.max_tree_bytes)

"""E2 priced with forecasts: a request goes to the replica where it and the requests there lose the least time.

Preble prices a replica by the requests placed on it within a window. This policy counts the requests that are on the
replica now, with their predicted remaining work; the tree, hits and evictions are those of E2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farsight.core.costs import StepCost
from farsight.core.forecast import Forecast
from farsight.core.request import Request
from farsight.policies.placement.base import PLACEMENTS, Choice, ReplicaLoad
from farsight.policies.placement.load_cost import Query, from_step_cost
from farsight.policies.placement.prefix_loads import MAX_TREE_BYTES, PrefixLoads, PrefixPlacement
from farsight.policies.placement.prefix_tree import Path
from farsight.policies.placement.replica_slots import Floats
from farsight.policies.placement.residual_work import RequestLengths, ResidualWork
from farsight.policies.settings import PolicySettings

WINDOW_S = 180.0
"""Seconds for which uses of a prefix weigh against its eviction (H of Preble), and over which the mean output length is
taken that replaces a missing forecast."""

INITIAL_OUTPUT_LEN = 200.0
"""Output tokens assumed without a forecast and before any request has ended."""


@dataclass(frozen=True, slots=True)
class ForecastChoice(Choice):
    """``reason`` is hit or miss. The seconds are delays, by cause, of this request and the others on the replica.

    Attributes:
        queue_s: Prefill of earlier prompts on the replica, which the request waits for.
        prefill_s: Prefill of its own prompt, counted for itself and for each request that it delays.
        decode_s: Steps shared with other requests, counted for this one and for the others.
        evict_s: Recomputation of the prefixes that must be evicted to make room, counted as ``prefill_s``.
        memory_s: Wait until the predicted memory peak fits.
        predicted_len: Predicted output tokens that are still to come.
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


class E2Forecast(PrefixPlacement):
    """Places a request where the sum of its own delay and of the delay that it causes to others is least.

    Cost of a placement: O(length of its path + nodes evicted) and some numpy operations over all requests in flight.

    Args:
        cost: What steps cost, the same on all replicas.
        block_size: Tokens that an element of a path stands for.
        max_tree_bytes: As in ``PrefixLoads``.
    """

    def __init__(self, cost: StepCost, block_size: int, max_tree_bytes: int = MAX_TREE_BYTES) -> None:
        regressions = from_step_cost(cost)
        loads = PrefixLoads(regressions, block_size, WINDOW_S, INITIAL_OUTPUT_LEN, max_tree_bytes=max_tree_bytes)
        super().__init__(loads, block_size)
        self.work = ResidualWork(cost)
        self._cost = cost

    def choose(
        self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float
    ) -> ForecastChoice:
        """Chooses one of ``loads`` for this request."""
        had_len = len(request.output_ids)
        demand = RequestLengths(request.known_len, had_len, request.sampling.max_new_tokens - had_len)
        forecast = request.forecast
        output_len = self.prefixes.load.overall_output_len if forecast is None else forecast.mean
        return self.place(request.request_id, tuple(prefix), demand, output_len, loads, now)

    def place(
        self,
        request_id: str,
        prefix: Path,
        demand: RequestLengths,
        output_len: float,
        loads: tuple[ReplicaLoad, ...],
        now: float,
    ) -> ForecastChoice:
        """Does as ``choose``, with only the fields of the request that it uses. The request must not be in flight.

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
        """Begins a worker life with room for ``capacity`` KV tokens and an empty cache."""
        slot = self.prefixes.replica_up(name, capacity)
        if slot < len(self.work.queued_s):
            self.work.clear(slot)
        else:
            self.work.add_replica()

    def replica_gone(self, name: str) -> None:
        """Forgets a replica that will not come back; unknown names are ignored."""
        slot = self.prefixes.replica_gone(name)
        if slot is not None:
            self.work.clear(slot)

    def started(self, request_id: str, cached_len: int, queue_s: float, now: float) -> None:
        """Books the first run of a request: it produces tokens from now on."""
        placed = self.prefixes.started(request_id, cached_len, now)
        if placed is not None:
            self.work.advance(now)
            self.work.start(request_id, placed.prompt_len - cached_len)

    def foreseen(self, request_id: str, forecast: Forecast, now: float) -> None:
        """Books a forecast of a request that was placed without one or with another one."""
        self.work.predict(request_id, forecast.mean)

    def ended(self, request_id: str, output_len: int | None, now: float) -> None:
        """Books that a request is no longer in flight; None if its output is incomplete."""
        if self.prefixes.ended(request_id, output_len, now) is not None:
            self.work.advance(now)
            self.work.remove(request_id)

    def priced(self, replica: str, cost: StepCost) -> None:
        """Sets the replica's step cost. Prices follow the mean cost of all replicas with a measured cost."""
        mean = self.prefixes.priced(replica, cost)
        if mean is not None:
            self._cost = mean
            self.work.price(mean)

    def _cheapest(self, query: Query, length: float) -> tuple[int, tuple[float, float, float, float, float]]:
        """Returns the cheapest slot and the terms of its price, in the order of ``ForecastChoice``.

        Evictions and memory are priced only where the other terms alone could still win: neither is ever below 0.
        """
        work, prefixes = self.work, self.prefixes
        delayed = 1 + work.num_requests  # requests that its prefill delays: those that wait now will run beside it
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
        """Returns, by slot, the delay of shared steps: of two requests each slows the other by its share of a step."""
        cost = self._cost
        steps, context_steps = self.work.meetings(length)
        step_s = 2 * cost.decode_seq_s + cost.context_token_s * prompt_len
        return steps * step_s + context_steps * cost.context_token_s

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the tree, the loads and the residual work agree."""
        super().check_integrity()
        self.work.check_integrity()


@PLACEMENTS.register("e2-forecast", uses_prefixes=True, reads_forecasts=True)
def build_e2_forecast(settings: PolicySettings) -> E2Forecast:
    """Prices replicas as E2 does, but by predicted work."""
    return E2Forecast(settings.cost, settings.block_size, settings.placement.max_tree_bytes)

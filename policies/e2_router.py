"""E2, exploitation and exploration: the placement of Preble (section 4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.errors import IntegrityError, InvalidValueError
from core.request import Request
from policies.e2_profiles import Regressions
from policies.load_cost import LoadCost, Query
from policies.load_window import LoadWindow
from policies.placement import Choice, Placement, ReplicaLoad
from policies.prefix_scaling import PrefixScaling
from policies.radix_tree import Node, Path, RadixTree
from policies.replica_slots import ReplicaSlots, bits, is_single


@dataclass(frozen=True, slots=True)
class E2Config:
    """What of E2 is used, and its constants.

    Attributes:
        window_s: H, seconds over which load, sharing and queueing are counted.
        imbalance_ratio: IMBALR: a replica whose load is decoding to more than this share is sent what is explored ...
        balanced_ratio: ... if another replica with load is below this share.
        rebalance_ratio: T_hbal: a load may be so many times the lightest.
        rebalance_after: Requests of the window that a replica has before its load is compared.
        initial_output_len: Tokens, of replicas where nothing ended within the window.
        balance: Whether prefill and decode loads are balanced at all.
        rebalance: Whether exploiting requests of replicas that are too heavy are redirected.
        autoscale: Whether prefixes whose queueing time doubles on a replica too heavy may go to one more.
    """

    window_s: float = 180.0
    imbalance_ratio: float = 0.8
    balanced_ratio: float = 0.5
    rebalance_ratio: float = 1.5
    rebalance_after: int = 50
    initial_output_len: float = 200.0
    balance: bool = True
    rebalance: bool = True
    autoscale: bool = True

    def __post_init__(self) -> None:
        _require(self.window_s > 0, "window_s", self.window_s, "seconds > 0")
        _require(0 < self.imbalance_ratio <= 1, "imbalance_ratio", self.imbalance_ratio, "a share in (0, 1]")
        _require(0 <= self.balanced_ratio <= 1, "balanced_ratio", self.balanced_ratio, "a share in [0, 1]")
        _require(self.rebalance_ratio >= 1, "rebalance_ratio", self.rebalance_ratio, "a ratio >= 1")
        _require(self.rebalance_after >= 0, "rebalance_after", self.rebalance_after, "an integer >= 0")
        _require(self.initial_output_len >= 0, "initial_output_len", self.initial_output_len, "tokens >= 0")


@dataclass(frozen=True, slots=True)
class E2Choice(Choice):
    """``reason`` is exploit, explore, balance or rebalance; the cost is that of the chosen replica, in GPU-seconds.

    Attributes:
        load_s: L, of the requests placed there within the window.
        evict_s: M, of computing again what has to make room.
        prefill_s: P, of the prompt tokens not cached there.
    """

    load_s: float = 0.0
    evict_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """LOADCOST of Algorithm 2."""
        return self.load_s + self.evict_s + self.prefill_s


@dataclass(slots=True, eq=False)
class _Placed:
    """A request from its placement until it has ended and left the window.

    Attributes:
        end: Last node of its path, by which the tree knows it.
        key: Its key portion, if it was placed where that is cached.
        prefill_s: As it counts in the load of its replica.
        counts: Whether the window still holds it.
    """

    request_id: str
    placed_at: float
    slot: int
    end: Node
    key: Node | None
    prompt_len: int
    hit_len: int
    prefill_s: float
    counts: bool = True


def key_portion(spans: Sequence[int]) -> int:
    """Which node of a path is the key portion: the deepest with more tokens than all before it together (section 3).

    Args:
        spans: Lengths of its nodes from the root on, at least one, each above 0.
    """
    key, before = 0, 0
    for i, span in enumerate(spans):
        if span > before:
            key = i
        before += span
    return key


class E2Router(Placement):
    """Places a request where its prefix is cached if that saves more than it computes, else where it costs least.

    Cost of a placement: O(length of its path + nodes that its replica evicts), and a few numpy operations over all
    replicas.

    Args:
        regressions: PT and DT, the same for all replicas.
        block_size: Tokens an element of a path stands for.
        ties: Draws among replicas of equal cost; without it the one of the lowest number (its slot).
    """

    def __init__(
        self,
        regressions: Regressions,
        block_size: int,
        config: E2Config | None = None,
        ties: np.random.Generator | None = None,
    ) -> None:
        _require(block_size >= 1, "block_size", block_size, "an integer >= 1")
        self.block_size = block_size
        self.config = config or E2Config()
        self.tree = RadixTree()
        self.load = LoadWindow(regressions, self.config.window_s, self.config.initial_output_len)
        self._prefill_s = regressions.prefill_s
        self._slots = ReplicaSlots()
        self._cost = LoadCost(self.tree, self.load, self._slots, regressions.prefill_s, block_size, ties)
        self._scaling = PrefixScaling(self.config.window_s)
        self._in_flight: dict[str, _Placed] = {}
        self._window: deque[_Placed] = deque()

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> E2Choice:
        """A replica for this request, of those given (never empty)."""
        return self.place(request.request_id, tuple(prefix), request.known_len, loads, now)

    def place(
        self, request_id: str, prefix: Path, prompt_len: int, loads: tuple[ReplicaLoad, ...], now: float
    ) -> E2Choice:
        """Algorithm 1; ``choose`` by what it needs to know of the request, which is not in flight yet."""
        _require(request_id not in self._in_flight, "request_id", request_id, "a request that is not in flight")
        self._advance(now)
        self._slots.open(loads)
        query = self._match(prefix, prompt_len)
        cached = query.matched[-1].end * self.block_size if query.matched else 0
        exploits = prompt_len - cached < cached
        slot, reason = self._exploit(query) if exploits else self._explore(query)
        choice = self._price(slot, reason, query)
        end = query.path[-1] if query.path else self.tree.root
        key = _key_of(query.matched) if exploits else None
        placed = _Placed(request_id, now, slot, end, key, prompt_len, choice.hit_len, choice.prefill_s)
        self._enter(placed, query.path)
        return choice

    def replica_up(self, name: str, capacity: int) -> None:
        """A worker life begins that holds ``capacity`` KV tokens: nothing is cached there. O(nodes)."""
        slot = self._slots.find(name)
        if slot is not None:
            self._clear(slot)
        else:
            slot, is_new = self._slots.take(name)
            if is_new:
                self.tree.add_replica()
                self.load.add_replica()
                self._cost.capacity.append(0)
        self._cost.capacity[slot] = capacity // self.block_size

    def replica_gone(self, name: str) -> None:
        """The replica will not come back; unknown ones are fine. O(nodes)."""
        slot = self._slots.find(name)
        if slot is not None:
            self._clear(slot)
            self._slots.give_back(name)

    def started(self, request_id: str, cached_len: int, queue_s: float, now: float) -> None:
        """A request has first run and found so many tokens cached: its load and the tree are set right by that."""
        placed = self._in_flight.get(request_id)
        if placed is None:
            return
        self._advance(now)
        if cached_len < placed.hit_len:
            self.tree.correct(placed.end, placed.slot, cached_len // self.block_size)
        prefill_s = self._prefill_s(placed.prompt_len - cached_len, placed.prompt_len)
        if placed.counts:
            self.load.correct(placed.slot, prefill_s - placed.prefill_s)
        placed.hit_len, placed.prefill_s = cached_len, prefill_s
        if self.config.autoscale and placed.key is not None:
            self._scaling.observe(placed.key, queue_s, now)
            if self._scaling.doubled(placed.key) and self._lighter_than(placed.slot) is not None:
                self._replicate(placed.key)

    def ended(self, request_id: str, output_len: int | None, now: float) -> None:
        """A request is not in flight any more; None where its output did not come to its end. O(nodes of its path)."""
        placed = self._in_flight.pop(request_id, None)
        if placed is None:
            return
        self._advance(now)
        self.tree.release(placed.end, placed.slot)
        if output_len is not None:
            self.load.ended(placed.slot, output_len, now)

    def evicted(self, replica: str, prefix: Sequence[int]) -> None:
        """The replica no longer caches the last block of ``prefix``, nor what comes after it."""
        slot = self._slots.find(replica)
        if slot is not None:
            self.tree.evict(tuple(prefix), slot)

    def _match(self, prefix: Path, prompt_len: int) -> Query:
        path = self.tree.insert(prefix)
        num = len(path)
        while num and not path[num - 1].replicas & self._slots.open_mask:
            num -= 1
        return Query(path, path[:num], prompt_len)

    def _exploit(self, query: Query) -> tuple[int, str]:
        """The cheapest replica that caches the longest node of the match, or to which its prefix was replicated."""
        holders = max(query.matched, key=lambda node: len(node.span)).replicas
        for node in query.matched:
            holders |= node.assigned
        holders &= self._slots.open_mask
        slot = holders.bit_length() - 1 if is_single(holders) else self._cost.cheapest(query, holders)
        lightest = self._relief_of(slot)
        return (slot, "exploit") if lightest is None else (lightest, "rebalance")

    def _explore(self, query: Query) -> tuple[int, str]:
        slot = self._decode_heavy() if self.config.balance else None
        if slot is not None:
            return slot, "balance"
        return self._cost.cheapest(query, self._slots.open_mask), "explore"

    def _decode_heavy(self) -> int | None:
        """A replica that mostly decodes has arithmetic to spare: it takes what is explored, unless all are alike."""
        loads_s = self.load.prefill_s + self.load.decode_s
        used = (loads_s > 0) & (self._slots.closed == 0)
        ratios = np.divide(self.load.decode_s, loads_s, out=np.full(len(loads_s), -1.0), where=used)
        slot = int(ratios.argmax())
        if ratios[slot] <= self.config.imbalance_ratio or not (used & (ratios < self.config.balanced_ratio)).any():
            return None
        return slot

    def _relief_of(self, slot: int) -> int | None:
        """The lightest replica, if this one is too heavy and has requests enough to tell (load shift)."""
        config = self.config
        if not config.rebalance or self.load.num_requests[slot] < config.rebalance_after:
            return None
        return self._lighter_than(slot)

    def _lighter_than(self, slot: int) -> int | None:
        """The lightest replica, if this one has more than T_hbal times its load."""
        loads_s = self.load.prefill_s + self.load.decode_s
        lightest = int((loads_s + self._slots.closed).argmin())
        return lightest if loads_s[slot] > self.config.rebalance_ratio * loads_s[lightest] else None

    def _replicate(self, prefix: Node) -> None:
        """Prefix autoscaling: its requests may go to the lightest replica that it is not on; KV is computed there."""
        loads_s = self.load.prefill_s + self.load.decode_s + self._slots.closed
        loads_s[bits(prefix.replicas | prefix.assigned, len(loads_s))] = np.inf
        lightest = int(loads_s.argmin())
        if loads_s[lightest] < np.inf:
            prefix.assigned |= 1 << lightest
            self._scaling.restart(prefix)

    def _price(self, slot: int, reason: str, query: Query) -> E2Choice:
        load_s = float(self.load.prefill_s[slot] + self.load.decode_s[slot])
        hit_len = query.hit_end(slot) * self.block_size
        evict_s, prefill_s = self._cost.evict_s(slot, query), self._cost.prefill_s(slot, query)
        return E2Choice(self._slots.names[slot], reason, hit_len, load_s, evict_s, prefill_s)

    def _enter(self, placed: _Placed, path: list[Node]) -> None:
        """The replica computes and caches the path; what it has no room for beside that is taken to be evicted."""
        slot = placed.slot
        self.tree.hold(path, slot)
        excess = self.tree.num_cached[slot] - self._cost.capacity[slot]
        if excess > 0:
            self.tree.evict_lru(slot, excess)
        self.load.add(slot, placed.prefill_s, placed.prompt_len)
        self._in_flight[placed.request_id] = placed
        self._window.append(placed)

    def _advance(self, now: float) -> None:
        """What was placed a window ago counts no more. Amortised O(nodes of a path)."""
        window, expired_at = self._window, now - self.config.window_s
        while window and window[0].placed_at <= expired_at:
            placed = window.popleft()
            if placed.counts:
                placed.counts = False
                self.tree.forget(placed.end, placed.slot)
                self.load.remove(placed.slot, placed.prefill_s, placed.prompt_len)
        self.load.advance(now)
        self._scaling.advance(now)

    def _clear(self, slot: int) -> None:
        for request_id in [each for each, placed in self._in_flight.items() if placed.slot == slot]:
            del self._in_flight[request_id]
        for placed in self._window:
            if placed.slot == slot:
                placed.counts = False
        self.tree.clear(slot)
        self.load.clear(slot)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tree, window, loads and requests in flight agree."""
        self.tree.check_integrity()
        self.load.check_integrity()
        counted = [placed for placed in self._window if placed.counts]
        in_flight = self._in_flight.values()
        self.tree.check_counts(
            ((each.end, each.slot) for each in in_flight), ((each.end, each.slot) for each in counted)
        )
        for slot, num_requests in enumerate(self.load.num_requests):
            times_s = [placed.prefill_s for placed in counted if placed.slot == slot]
            if len(times_s) != num_requests:
                raise IntegrityError(f"replica {slot}: the window does not hold what its load counts")
            if abs(sum(times_s) - self.load.prefill_s[slot]) > 1e-6 * max(1.0, sum(times_s)):
                raise IntegrityError(f"replica {slot}: prefill times add up to {sum(times_s)}")


def _key_of(matched: list[Node]) -> Node:
    return matched[key_portion([len(node.span) for node in matched])]


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidValueError(field, value, expected)

"""The bookkeeping that placements by prefix share: cached prefixes, placed requests, loads (Preble, section 4.2)."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from farsight.core.config.scheduling import PlacementConfig
from farsight.core.costs import StepCost, mean_cost
from farsight.core.errors import IntegrityError, InvalidValueError
from farsight.core.messages.placement import PrefixView, ReplicaView
from farsight.core.messages.plans import KVCacheEvent
from farsight.policies.placement.base import Placement, ReplicaLoad
from farsight.policies.placement.load_cost import LoadCost, LoadWindow, Query, Regressions, from_step_cost
from farsight.policies.placement.prefix_tree import PLACE_BYTES, Path, PrefixNode, RadixTree
from farsight.policies.placement.replica_slots import ReplicaSlots

ROOM_SHARE = 1 / 16
"""A tree that exceeds its memory limit is cut to this share below the limit, so that cuts are rare."""

COST_CHANGE = 0.05
"""Requests are priced again when the mean step cost has changed by more than this share."""

MAX_TREE_BYTES = PlacementConfig().max_tree_bytes
"""About 1 M blocks of prompts that share little."""


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """A request from its placement until it has ended and left the window.

    Attributes:
        end: Last node of its path, which stands for the whole path in the tree.
        key: Its key portion, if it was placed where that is cached.
        hit_len: Tokens cached on the replica when it starts: believed at first, found once it has started.
        pending_len: Tokens of ``hit_len`` that requests in flight were computing when it was placed.
        prefill_s: Its prefill seconds in the load of its replica.
        counts: Whether the load of the window still includes it.
        is_use: Whether the tree still counts it among the uses of its path; never longer than the window.
    """

    request_id: str
    placed_at: float
    slot: int
    end: PrefixNode
    key: PrefixNode | None
    prompt_len: int
    hit_len: int
    prefill_s: float
    pending_len: int = 0
    counts: bool = True
    is_use: bool = True


class PrefixLoads:
    """The prefix tree, the load of the window, and the requests that are in either; it decides nothing.

    If the tree takes more than ``max_tree_bytes``, the oldest uses of the window are forgotten first, together with the
    nodes that no replica caches, then the least recently used cached nodes. The load of the window stays as it is. The
    paths of requests in flight are kept, however much memory they take.

    Args:
        regressions: PT and DT, the same for all replicas, until steps have been measured.
        block_size: Tokens an element of a path stands for.
        window_s, initial_output_len: As in ``LoadWindow``.
        ties: As in ``LoadCost``.
        max_tree_bytes: Limit of ``RadixTree.num_bytes``.

    Attributes:
        in_flight: Placed requests that have not ended, by id.
    """

    def __init__(
        self,
        regressions: Regressions,
        block_size: int,
        window_s: float,
        initial_output_len: float,
        ties: np.random.Generator | None = None,
        max_tree_bytes: int = MAX_TREE_BYTES,
    ) -> None:
        self.tree = RadixTree()
        self._max_tree_bytes = max_tree_bytes
        self.load = LoadWindow(regressions, window_s, initial_output_len)
        self.slots = ReplicaSlots()
        self.cost = LoadCost(self.tree, self.load, self.slots, regressions.prefill_s, block_size, ties)
        self.in_flight: dict[str, PlacedRequest] = {}
        self._prefill_s = regressions.prefill_s
        self._block_size = block_size
        self._window_s = window_s
        self._window: deque[PlacedRequest] = deque()
        self._uses: deque[PlacedRequest] = deque()  # the later part of the window: what the tree counts
        self._costs: dict[str, StepCost] = {}
        self._cost: StepCost | None = None  # the mean that is priced with
        self._informed = 0  # bits of the replicas that tell what they cache

    def match(
        self, request_id: str, prefix: Path, prompt_len: int, loads: tuple[ReplicaLoad, ...], now: float
    ) -> Query:
        """Enters the request's path into the tree and finds what open replicas cache of it.

        The caller must call ``enter`` before any other method: until then the new nodes belong to no replica.

        Raises:
            InvalidValueError: the request is in flight.
        """
        if request_id in self.in_flight:
            raise InvalidValueError("request_id", request_id, "a request that is not in flight")
        self.advance(now)
        self.slots.open(loads)
        path = self.tree.insert(prefix)
        num = len(path)
        while num and not path[num - 1].replicas & self.slots.open_mask:
            num -= 1
        return Query(path, path[:num], prompt_len)

    def enter(
        self, request_id: str, query: Query, slot: int, now: float, key: PrefixNode | None = None
    ) -> PlacedRequest:
        """Records that a request was placed on the replica, which will compute and cache its path.

        If the replica sends KV cache events, the new part of the path stays pending until an event confirms it. If it
        sends none, the least recently used nodes are assumed evicted as soon as the path exceeds its capacity.
        """
        hit_len, pending_len = self._hits(query, slot)
        prefill_s = self.cost.prefill_s(slot, query)
        end = query.path[-1] if query.path else self.tree.root
        placed = PlacedRequest(request_id, now, slot, end, key, query.prompt_len, hit_len, prefill_s, pending_len)
        is_informed = bool(self._informed >> slot & 1)
        self.tree.hold(query.path, slot, pending=is_informed)
        excess = self.tree.num_cached[slot] - self.cost.capacity[slot]
        if excess > 0 and not is_informed:
            self.tree.evict_lru(slot, excess)
        self.load.add(slot, prefill_s, query.prompt_len)
        self.in_flight[request_id] = placed
        self._window.append(placed)
        self._uses.append(placed)
        self._cut_back()
        return placed

    def priced(self, replica: str, cost: StepCost) -> StepCost | None:
        """Sets the replica's step cost; returns the mean cost if that has changed. O(requests of the window)."""
        if self.slots.find(replica) is None:
            return None
        self._costs[replica] = cost
        mean = mean_cost(self._costs.values())
        if self._cost is not None and mean.is_like(self._cost, COST_CHANGE):
            return None
        self._cost = mean
        regressions = from_step_cost(mean)
        self._prefill_s = regressions.prefill_s
        self.cost.price(regressions)
        self.load.price(regressions)
        for placed in self._window:
            prefill_s = self._prefill_s(placed.prompt_len - placed.hit_len, placed.prompt_len)
            if placed.counts:
                self.load.correct(placed.slot, prefill_s - placed.prefill_s)
            placed.prefill_s = prefill_s
        return mean

    def _hits(self, query: Query, slot: int) -> tuple[int, int]:
        """Returns the tokens that the request will find cached at its start, and how many of them are yet to compute.

        The requests that compute them were placed earlier and run first. The last prompt token is always computed.
        """
        end = min(query.hit_end(slot), self._left_end(query, slot))
        cached = next((node.end for node in reversed(query.matched) if _is_cached(node, slot)), 0)
        most = (query.prompt_len - 1) // self._block_size
        return min(end, most) * self._block_size, (min(end, most) - min(cached, most)) * self._block_size

    def _left_end(self, query: Query, slot: int) -> int:
        """Returns the elements of the path that remain after evictions by earlier requests. O(evicted nodes)."""
        excess = self.tree.num_cached[slot] - self.cost.capacity[slot]
        if excess <= 0 or not self._informed >> slot & 1:  # without KV cache events, ``enter`` evicted them at once
            return query.end
        going = {copy.node: num for copy, num in self.tree.lru(slot, excess)}
        return next((node.end - going[node] for node in query.matched if node in going), query.end)

    def replica_up(self, name: str, capacity: int) -> int:
        """Begins a worker life with room for ``capacity`` KV tokens and an empty cache; returns its slot. O(nodes)."""
        slot = self.slots.find(name)
        if slot is not None:
            self._clear(slot)
        else:
            slot, is_new = self.slots.take(name)
            if is_new:
                self.tree.add_replica()
                self.load.add_replica()
                self.cost.capacity.append(0)
        self.cost.capacity[slot] = capacity // self._block_size
        self._informed &= ~(1 << slot)
        return slot

    def replica_gone(self, name: str) -> int | None:
        """Forgets a replica that will not come back; returns the slot that it had, None if unknown. O(nodes)."""
        slot = self.slots.find(name)
        if slot is not None:
            self._clear(slot)
            self.slots.give_back(name)
            self._costs.pop(name, None)
        return slot

    def started(self, request_id: str, cached_len: int, now: float) -> PlacedRequest | None:
        """Corrects the load of a request whose first run found ``cached_len`` tokens cached; corrects the tree too if
        the replica sends no KV cache events.

        Returns:
            The request; None if it is not in flight.
        """
        placed = self.in_flight.get(request_id)
        if placed is None:
            return None
        self.advance(now)
        is_informed = bool(self._informed >> placed.slot & 1)  # then events have already corrected the tree
        if not is_informed and cached_len < placed.hit_len:
            self.tree.correct(placed.end, placed.slot, cached_len // self._block_size)
        prefill_s = self._prefill_s(placed.prompt_len - cached_len, placed.prompt_len)
        if placed.counts:
            self.load.correct(placed.slot, prefill_s - placed.prefill_s)
        placed.hit_len, placed.prefill_s = cached_len, prefill_s
        return placed

    def ended(self, request_id: str, output_len: int | None, now: float) -> PlacedRequest | None:
        """Books that a request is no longer in flight; None if its output is incomplete. O(nodes of its path).

        Returns:
            The request; None if it was not in flight.
        """
        placed = self.in_flight.pop(request_id, None)
        if placed is None:
            return None
        self.advance(now)
        self.tree.release(placed.end, placed.slot)
        if not placed.is_use:
            placed.end = self.tree.root
        if output_len is not None:
            self.load.ended(placed.slot, output_len, now)
        return placed

    def noticed(self, replica: str, notice: KVCacheEvent) -> None:
        """Applies a KV cache event; from the first whole one on, events alone say what is cached on the replica.

        Cost: O(changed nodes times the length of their paths).
        """
        slot, tree = self.slots.find(replica), self.tree
        if slot is None:
            return
        if notice.whole:
            tree.forget_cached(slot)
            self._informed |= 1 << slot
        for name in reversed(notice.evicted):
            if tree.caches(name, slot):
                tree.evict(tree.path_to(name) or (), slot)
        for run in notice.stored:
            before = tree.path_to(run.parent) if run.parent else ()
            if before is not None:  # else its parent is unknown: an event was lost, or the tree was cut back
                tree.store(before + run.hashes, slot)
        self._cut_back()

    def show(self, view: ReplicaView) -> ReplicaView:
        """Adds the replica's load within the window and its believed cache contents to ``view``."""
        slot = self.slots.find(view.replica)
        if slot is None:
            return view
        cached_tokens = self.tree.num_cached[slot] * self._block_size
        prefill_s, decode_s = float(self.load.prefill_s[slot]), float(self.load.decode_s[slot])
        return replace(view, prefill_s=prefill_s, decode_s=decode_s, cached_tokens=cached_tokens)

    def advance(self, now: float) -> None:
        """Drops requests that were placed a window ago or earlier. Amortised O(nodes of a path)."""
        window, expired_at = self._window, now - self._window_s
        while window and window[0].placed_at <= expired_at:
            placed = window.popleft()
            self._forget_use(placed)
            if placed.counts:
                placed.counts = False
                self.load.remove(placed.slot, placed.prefill_s, placed.prompt_len)
        self.load.advance(now)

    def _forget_use(self, placed: PlacedRequest) -> None:
        """Stops counting the request as a use of its path. While it is in flight it keeps its path."""
        if self._uses and self._uses[0] is placed:
            self._uses.popleft()
        if placed.is_use:
            placed.is_use = False
            self.tree.forget(placed.end, placed.slot)
        if self.in_flight.get(placed.request_id) is not placed:
            placed.end = self.tree.root  # keeps no removed node alive

    def _cut_back(self) -> None:
        """Cuts the tree to its memory limit. Amortised O(1) for each inserted element."""
        tree, most = self.tree, self._max_tree_bytes
        if tree.num_bytes <= most:
            return
        most -= int(most * ROOM_SHARE)
        while tree.num_bytes > most and self._uses:
            self._forget_use(self._uses[0])
        while tree.num_bytes > most and any(self._cut_cached(most)):
            pass

    def _cut_cached(self, most: int) -> list[bool]:
        """Forgets that replicas cache their least recently used nodes; returns by slot whether any was forgotten.

        A replica that sends KV cache events reports such a node again when it stores it again.
        """
        tree, was_cut = self.tree, []
        for slot in sorted(range(len(tree.num_cached)), key=tree.num_cached.__getitem__, reverse=True):
            before = tree.num_cached[slot]
            excess = max(0, tree.num_bytes - most)
            tree.evict_lru(slot, -(-excess // PLACE_BYTES))
            was_cut.append(tree.num_cached[slot] < before)
        return was_cut

    def _clear(self, slot: int) -> None:
        for request_id in [each for each, placed in self.in_flight.items() if placed.slot == slot]:
            del self.in_flight[request_id]
        for placed in self._window:
            if placed.slot == slot:
                placed.counts = placed.is_use = False
                placed.end = self.tree.root
        self.tree.clear(slot)
        self.load.clear(slot)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tree, window, loads and requests in flight agree."""
        self.tree.check_integrity()
        self.load.check_integrity()
        counted = [placed for placed in self._window if placed.counts]
        in_flight = self.in_flight.values()
        uses = [placed for placed in self._uses if placed.is_use]
        self.tree.check_counts(((each.end, each.slot) for each in in_flight), ((each.end, each.slot) for each in uses))
        if len(uses) != sum(placed.is_use for placed in self._window):
            raise IntegrityError("the uses that the tree counts are not those of the window")
        for slot, num_requests in enumerate(self.load.num_requests):
            times_s = [placed.prefill_s for placed in counted if placed.slot == slot]
            if len(times_s) != num_requests:
                raise IntegrityError(f"replica {slot}: the window does not hold what its load counts")
            if abs(sum(times_s) - self.load.prefill_s[slot]) > 1e-6 * max(1.0, sum(times_s)):
                raise IntegrityError(f"replica {slot}: prefill times add up to {sum(times_s)}")


def _is_cached(node: PrefixNode, slot: int) -> bool:
    return bool((node.replicas & ~node.pending) >> slot & 1)


class PrefixPlacement(Placement):
    """A placement that keeps ``PrefixLoads`` by what it hears.

    Args:
        block_size: Tokens that an element of a path stands for.
    """

    def __init__(self, prefixes: PrefixLoads, block_size: int) -> None:
        if block_size < 1:
            raise InvalidValueError("block_size", block_size, "an integer >= 1")
        self.block_size = block_size
        self.prefixes = prefixes

    def replica_up(self, name: str, capacity: int) -> None:
        self.prefixes.replica_up(name, capacity)

    def replica_gone(self, name: str) -> None:
        self.prefixes.replica_gone(name)

    def ended(self, request_id: str, output_len: int | None, now: float) -> None:
        self.prefixes.ended(request_id, output_len, now)

    def noticed(self, replica: str, notice: KVCacheEvent) -> None:
        self.prefixes.noticed(replica, notice)

    def priced(self, replica: str, cost: StepCost) -> None:
        self.prefixes.priced(replica, cost)

    def show(self, view: ReplicaView) -> ReplicaView:
        return self.prefixes.show(view)

    def busiest_prefixes(self, limit: int) -> tuple[PrefixView, ...]:
        loads = self.prefixes
        return busiest_prefixes(loads.tree, loads.slots.names, self.block_size, limit)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless tree, window, loads and requests in flight agree."""
        self.prefixes.check_integrity()


def busiest_prefixes(tree: RadixTree, names: Sequence[str], block_size: int, limit: int) -> tuple[PrefixView, ...]:
    """Returns the ``limit`` nodes that most recent requests go through, each after its parent.

    A node is never busier than its parent, so only children of shown nodes are visited: O(visited nodes).

    Args:
        names: Names of the replicas, by their numbers in the tree.
        block_size: Tokens of an element of a path.
    """
    shown = _busiest(tree.root, limit)
    return tuple(_view(node, depth, names, block_size) for node, depth in _in_order(tree.root, shown))


def _busiest(root: PrefixNode, limit: int) -> set[PrefixNode]:
    shown: set[PrefixNode] = set()
    order = itertools.count()  # breaks ties by order of discovery; nodes themselves cannot be compared
    heap = [(-_num_recent(child), next(order), child) for child in root.children.values()]
    heapq.heapify(heap)
    while heap and len(shown) < limit:
        _, _, node = heapq.heappop(heap)
        shown.add(node)
        for child in node.children.values():
            heapq.heappush(heap, (-_num_recent(child), next(order), child))
    return shown


def _in_order(node: PrefixNode, shown: set[PrefixNode], depth: int = 0) -> Iterator[tuple[PrefixNode, int]]:
    """Yields the shown nodes below ``node`` with their depths, depth first, the busiest child first."""
    for child in sorted(shown.intersection(node.children.values()), key=_num_recent, reverse=True):
        yield child, depth
        yield from _in_order(child, shown, depth + 1)


def _num_recent(node: PrefixNode) -> int:
    return sum(copy.num_recent for copy in node.copies.values())


def _view(node: PrefixNode, depth: int, names: Sequence[str], block_size: int) -> PrefixView:
    return PrefixView(
        depth=depth,
        num_tokens=len(node.span) * block_size,
        end_len=node.end * block_size,
        num_recent=_num_recent(node),
        num_in_flight=sum(copy.ref_count for copy in node.copies.values()),
        replicas=_named(node.replicas, names),
        assigned=_named(node.assigned & ~node.replicas, names),
    )


def _named(mask: int, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for slot, name in enumerate(names) if mask >> slot & 1)

"""E2, exploitation and exploration: the placement of Preble (section 4.2)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from farsight.core.config.scheduling import PlacementConfig
from farsight.core.request import Request
from farsight.policies.placement.base import PLACEMENTS, Choice, ReplicaLoad
from farsight.policies.placement.load_cost import Query, Regressions, from_step_cost
from farsight.policies.placement.prefix_loads import PrefixLoads, PrefixPlacement
from farsight.policies.placement.prefix_tree import Path, PrefixNode
from farsight.policies.placement.replica_slots import bits, is_single
from farsight.policies.settings import PolicySettings


@dataclass(slots=True, eq=False)
class _Queueing:
    """Requests of one prefix and the seconds they waited, in the earlier and the later half of the window."""

    num_early: int = 0
    num_late: int = 0
    early_s: float = 0.0
    late_s: float = 0.0


class PrefixScaling:
    """Queueing times by prefix; tells whether their mean has doubled between the two halves of the window.

    Every operation is amortised O(1).
    """

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._early: deque[tuple[float, PrefixNode, _Queueing, float]] = deque()
        self._late: deque[tuple[float, PrefixNode, _Queueing, float]] = deque()
        self._queueing: dict[PrefixNode, _Queueing] = {}

    def observe(self, prefix: PrefixNode, queue_s: float, now: float) -> None:
        """Records how long a request of this prefix waited before it first ran."""
        queueing = self._queueing.setdefault(prefix, _Queueing())
        queueing.num_late += 1
        queueing.late_s += queue_s
        self._late.append((now, prefix, queueing, queue_s))

    def advance(self, now: float) -> None:
        """Moves the end of the window to ``now``: samples pass into its earlier half and out of it."""
        while self._late and self._late[0][0] <= now - self._window_s / 2:
            sample = self._late.popleft()
            _, _, queueing, queue_s = sample
            self._early.append(sample)
            queueing.num_late -= 1
            queueing.late_s -= queue_s
            queueing.num_early += 1
            queueing.early_s += queue_s
        while self._early and self._early[0][0] <= now - self._window_s:
            _, prefix, queueing, queue_s = self._early.popleft()
            queueing.num_early -= 1
            queueing.early_s -= queue_s
            if not queueing.num_early + queueing.num_late and self._queueing.get(prefix) is queueing:
                del self._queueing[prefix]

    def doubled(self, prefix: PrefixNode) -> bool:
        """Returns whether the mean wait of the later half's requests is at least twice that of the earlier half."""
        queueing = self._queueing.get(prefix)
        if queueing is None or not queueing.num_early or not queueing.num_late:
            return False
        late_s = queueing.late_s / queueing.num_late
        return late_s > 0 and late_s >= 2 * queueing.early_s / queueing.num_early

    def restart(self, prefix: PrefixNode) -> None:
        """Discards the prefix's samples; called when it gets another replica."""
        self._queueing.pop(prefix, None)


@dataclass(frozen=True, slots=True)
class E2Choice(Choice):
    """``reason`` is exploit, explore, balance or rebalance; the cost is that of the chosen replica, in GPU-seconds.

    Attributes:
        load_s: L: load of the requests placed on the replica within the window.
        evict_s: M: recomputation of the prefixes that must be evicted to make room.
        prefill_s: P: prefill of the prompt tokens that the replica does not cache.
    """

    load_s: float = 0.0
    evict_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """LOADCOST of Algorithm 2."""
        return self.load_s + self.evict_s + self.prefill_s


def key_portion(spans: Sequence[int]) -> int:
    """Returns the index of the key portion: the deepest node with more tokens than all before it together (section 3).

    Args:
        spans: Lengths of the path's nodes from the root on, at least one, each above 0.
    """
    key, before = 0, 0
    for i, span in enumerate(spans):
        if span > before:
            key = i
        before += span
    return key


class E2Router(PrefixPlacement):
    """Places a request where its prefix is cached if more of the prompt is cached than not, else where it costs least.

    Cost of a placement: O(length of its path + nodes that its replica evicts), and a few numpy operations over all
    replicas.

    Args:
        regressions: PT and DT, the same for all replicas.
        block_size: Tokens that an element of a path stands for.
        ties: Draws among replicas of equal cost; without it the replica with the lowest slot is chosen.
    """

    def __init__(
        self,
        regressions: Regressions,
        block_size: int,
        config: PlacementConfig | None = None,
        ties: np.random.Generator | None = None,
    ) -> None:
        self.config = config or PlacementConfig()
        window_s, output_len = self.config.window_s, self.config.initial_output_len
        loads = PrefixLoads(regressions, block_size, window_s, output_len, ties, self.config.max_tree_bytes)
        super().__init__(loads, block_size)
        self.tree, self.load = self.prefixes.tree, self.prefixes.load
        self._slots, self._cost = self.prefixes.slots, self.prefixes.cost
        self._scaling = PrefixScaling(self.config.window_s)

    def choose(self, request: Request, prefix: Sequence[int], loads: tuple[ReplicaLoad, ...], now: float) -> E2Choice:
        """Chooses one of ``loads`` for this request."""
        return self.place(request.request_id, tuple(prefix), request.known_len, loads, now)

    def place(
        self, request_id: str, prefix: Path, prompt_len: int, loads: tuple[ReplicaLoad, ...], now: float
    ) -> E2Choice:
        """Runs Algorithm 1 with only the fields of the request that it uses. The request must not be in flight."""
        query = self.prefixes.match(request_id, prefix, prompt_len, loads, now)
        self._scaling.advance(now)
        cached = query.matched[-1].end * self.block_size if query.matched else 0
        exploits = prompt_len - cached < cached
        slot, reason = self._exploit(query) if exploits else self._explore(query)
        load_s = float(self.load.prefill_s[slot] + self.load.decode_s[slot])
        evict_s = self._cost.evict_s(slot, query)
        key = _key_of(query.matched) if exploits else None
        placed = self.prefixes.enter(request_id, query, slot, now, key)
        hits = placed.hit_len, placed.pending_len
        return E2Choice(self._slots.names[slot], reason, *hits, load_s, evict_s, placed.prefill_s)

    def started(self, request_id: str, cached_len: int, queue_s: float, now: float) -> None:
        """Corrects the load of a request whose first run found ``cached_len`` tokens cached; corrects the tree too if
        the replica sends no KV cache events.
        """
        placed = self.prefixes.started(request_id, cached_len, now)
        if placed is None or placed.key is None or not self.config.autoscale:
            return
        self._scaling.advance(now)
        self._scaling.observe(placed.key, queue_s, now)
        if self._scaling.doubled(placed.key) and self._lighter_than(placed.slot) is not None:
            self._replicate(placed.key)

    def _exploit(self, query: Query) -> tuple[int, str]:
        """Returns the slot, and the reason: the cheapest replica that caches the longest node of the match or to which
        a matched prefix was replicated; the lightest replica if that one is too heavy.
        """
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
        """Returns the replica with the largest decode share, so with arithmetic to spare; None if shares are alike."""
        loads_s = self.load.prefill_s + self.load.decode_s
        used = (loads_s > 0) & (self._slots.closed == 0)
        ratios = np.divide(self.load.decode_s, loads_s, out=np.full(len(loads_s), -1.0), where=used)
        slot = int(ratios.argmax())
        if ratios[slot] <= self.config.imbalance_ratio or not (used & (ratios < self.config.balanced_ratio)).any():
            return None
        return slot

    def _relief_of(self, slot: int) -> int | None:
        """Returns the lightest replica if this one is too heavy and has enough requests to judge by (load shift)."""
        config = self.config
        if not config.rebalance or self.load.num_requests[slot] < config.rebalance_after:
            return None
        return self._lighter_than(slot)

    def _lighter_than(self, slot: int) -> int | None:
        """Returns the lightest replica if this one has more than T_hbal times its load, else None."""
        loads_s = self.load.prefill_s + self.load.decode_s
        lightest = int((loads_s + self._slots.closed).argmin())
        return lightest if loads_s[slot] > self.config.rebalance_ratio * loads_s[lightest] else None

    def _replicate(self, prefix: PrefixNode) -> None:
        """Lets requests of the prefix go to the lightest replica that does not have it yet (prefix autoscaling)."""
        loads_s = self.load.prefill_s + self.load.decode_s + self._slots.closed
        loads_s[bits(prefix.replicas | prefix.assigned, len(loads_s))] = np.inf
        lightest = int(loads_s.argmin())
        if loads_s[lightest] < np.inf:
            prefix.assigned |= 1 << lightest
            self._scaling.restart(prefix)


def _key_of(matched: list[PrefixNode]) -> PrefixNode:
    return matched[key_portion([len(node.span) for node in matched])]


@PLACEMENTS.register("e2", uses_prefixes=True)
def build_e2(settings: PolicySettings) -> E2Router:
    """Exploits the cached prefix or explores a lighter replica: Preble's E2."""
    return E2Router(from_step_cost(settings.cost), settings.block_size, settings.placement)

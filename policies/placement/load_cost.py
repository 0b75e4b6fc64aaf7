"""LOADCOST of Preble's Algorithm 2: what a request costs on each replica in GPU-seconds, and the load of each replica.

The load L_i is counted over a window of time, by running sums. PT and DT are the regressions that E2 prices with
(section 2.1).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from farsight.core.costs import StepCost
from farsight.core.errors import IntegrityError
from farsight.policies.placement.prefix_tree import PrefixNode, RadixTree
from farsight.policies.placement.replica_slots import Floats, ReplicaSlots, bits, is_single


@dataclass(frozen=True, slots=True)
class Regressions:
    """How long a request keeps a replica busy.

    Attributes:
        prefill_s: PT: (prompt tokens computed, tokens of context at their end) -> seconds.
        decode_s: DT: (output tokens, tokens of context) -> seconds of all of them; linear in each.
    """

    prefill_s: Callable[[int, int], float]
    decode_s: Callable[[float, float], float]


def from_step_cost(cost: StepCost) -> Regressions:
    """Derives PT and DT from a step cost: PT from tokens and what they attend to, DT from the context each token reads.

    The fixed cost of a step (``base_s``) is no part of DT: the sequences of a batch share this cost, and one sequence
    more does not raise it. Counted for each sequence it would be most of the load, which would then count requests.
    """

    def decode_s(output_len: float, context_len: float) -> float:
        return output_len * (cost.decode_seq_s + cost.context_token_s * context_len)

    return Regressions(lambda new, context: cost.prefill_s(new, context - new), decode_s)


class LoadWindow:
    """GPU-seconds of the requests placed on each replica within the window: L_i = sum of PT(missed_r) + DT_r.

    DT_r is DT at the mean output length seen on the replica within the window (``initial_output_len`` without any) and
    at the request's context. DT is linear in both, so the sum is the number of requests times DT at the mean context:
    every update is O(1).

    Attributes:
        num_requests: By replica.
        prefill_s, decode_s: By replica, the two parts of L_i.
    """

    def __init__(self, regressions: Regressions, window_s: float, initial_output_len: float) -> None:
        self._regressions = regressions
        self._window_s = window_s
        self._initial_output_len = initial_output_len
        self.num_requests: list[int] = []
        self.prefill_s: Floats = np.zeros(0)
        self.decode_s: Floats = np.zeros(0)
        self._context_lens: list[int] = []
        self._outputs: deque[tuple[float, int, int]] = deque()  # (ended at, replica, output length)
        self._num_outputs: list[int] = []
        self._output_lens: list[int] = []

    def price(self, regressions: Regressions) -> None:
        """Sets new step costs and recomputes ``decode_s``. The caller corrects ``prefill_s`` request by request."""
        self._regressions = regressions
        for replica in range(len(self.num_requests)):
            self._price_decode(replica)

    def add_replica(self) -> None:
        self.num_requests.append(0)
        self._context_lens.append(0)
        self._num_outputs.append(0)
        self._output_lens.append(0)
        self.prefill_s = np.append(self.prefill_s, 0.0)
        self.decode_s = np.append(self.decode_s, 0.0)

    def add(self, replica: int, prefill_s: float, context_len: int) -> None:
        """Counts a placed request that computes for ``prefill_s`` before its first token."""
        self.num_requests[replica] += 1
        self._context_lens[replica] += context_len
        self.prefill_s[replica] += prefill_s
        self._price_decode(replica)

    def remove(self, replica: int, prefill_s: float, context_len: int) -> None:
        """Subtracts a request that left the window; ``prefill_s`` as added, plus its corrections."""
        self.num_requests[replica] -= 1
        self._context_lens[replica] -= context_len
        self.prefill_s[replica] -= prefill_s
        if not self.num_requests[replica]:
            self.prefill_s[replica] = 0.0  # rounding errors do not outlive a pause
        self._price_decode(replica)

    def correct(self, replica: int, more_s: float) -> None:
        """Adds to the prefill seconds of a request of the window; negative if it computes less than expected."""
        self.prefill_s[replica] += more_s

    def ended(self, replica: int, output_len: int, now: float) -> None:
        """Counts the output of a request that ended on the replica."""
        self._outputs.append((now, replica, output_len))
        self._num_outputs[replica] += 1
        self._output_lens[replica] += output_len
        self._price_decode(replica)

    def advance(self, now: float) -> None:
        """Drops outputs older than the window. Amortised O(1)."""
        outputs = self._outputs
        while outputs and outputs[0][0] <= now - self._window_s:
            _, replica, output_len = outputs.popleft()
            self._num_outputs[replica] -= 1
            self._output_lens[replica] -= output_len
            self._price_decode(replica)

    def clear(self, replica: int) -> None:
        """Forgets everything placed on the replica, whose worker life is over. O(outputs in the window)."""
        self.num_requests[replica] = self._context_lens[replica] = 0
        self._num_outputs[replica] = self._output_lens[replica] = 0
        self.prefill_s[replica] = self.decode_s[replica] = 0.0
        self._outputs = deque(output for output in self._outputs if output[1] != replica)

    def mean_output_len(self, replica: int) -> float:
        """Returns the mean output length of the requests that ended there within the window."""
        num = self._num_outputs[replica]
        return self._output_lens[replica] / num if num else self._initial_output_len

    @property
    def overall_output_len(self) -> float:
        """Mean output length of all requests that ended within the window; O(replicas)."""
        return sum(self._output_lens) / len(self._outputs) if self._outputs else self._initial_output_len

    def _price_decode(self, replica: int) -> None:
        num = self.num_requests[replica]
        self.decode_s[replica] = (
            num * self._regressions.decode_s(self.mean_output_len(replica), self._context_lens[replica] / num)
            if num
            else 0.0
        )

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the sums of outputs are those of the window."""
        for replica, num in enumerate(self._num_outputs):
            lens = [output_len for _, where, output_len in self._outputs if where == replica]
            if (num, self._output_lens[replica]) != (len(lens), sum(lens)):
                raise IntegrityError(f"replica {replica}: the outputs of the window do not add up")


@dataclass(frozen=True, slots=True)
class Query:
    """A request to be placed.

    Attributes:
        path: Nodes of the prompt's full blocks, from the root on.
        matched: The leading nodes of ``path`` that at least one open replica caches.
        prompt_len: Tokens of the whole prompt, not only of its full blocks.
    """

    path: list[PrefixNode]
    matched: list[PrefixNode]
    prompt_len: int

    @property
    def end(self) -> int:
        """Elements of the path."""
        return self.path[-1].end if self.path else 0

    def hit_end(self, slot: int) -> int:
        """Returns the number of elements of the path that the replica caches."""
        for node in reversed(self.matched):
            if node.replicas >> slot & 1:
                return node.end
        return 0


class LoadCost:
    """L + M + P of a request on a replica.

    L is the load of the replica within the window. M is the time to compute again the prefixes that must be evicted to
    fit the request. P is the time to compute the uncached part of its prompt. Decoding costs the same everywhere.

    Args:
        prefill_s: PT: (tokens computed, tokens of context at their end) -> seconds.
        block_size: Tokens of a path element.
        ties: Draws among replicas of equal cost; without it the lowest slot is chosen.

    Attributes:
        capacity: By slot, path elements that fit on the replica.
    """

    def __init__(
        self,
        tree: RadixTree,
        load: LoadWindow,
        slots: ReplicaSlots,
        prefill_s: Callable[[int, int], float],
        block_size: int,
        ties: np.random.Generator | None,
    ) -> None:
        self.capacity: list[int] = []
        self._tree = tree
        self._load = load
        self._slots = slots
        self._prefill_s = prefill_s
        self._block_size = block_size
        self._ties = ties

    def price(self, regressions: Regressions) -> None:
        """Sets new step costs."""
        self._prefill_s = regressions.prefill_s

    def cheapest(self, query: Query, among: int) -> int:
        """Returns the slot of the mask ``among`` (never empty) where the request costs least.

        M is priced only where L + P alone could still win, which gives the same slot: M is never negative. O(nodes
        matched + nodes evicted) and some numpy operations over all replicas.
        """
        costs = self.prefill_by_slot(query)
        costs += self._load.prefill_s
        costs += self._load.decode_s
        if among == self._slots.open_mask:
            costs += self._slots.closed
        else:
            costs[~bits(among, len(costs))] = np.inf
        best_s, tied = np.inf, [len(costs)]
        while True:
            slot = int(costs.argmin())
            least_s = float(costs[slot])
            if least_s == np.inf or least_s > best_s:
                break
            if least_s == best_s and self._ties is None and slot > tied[0]:
                break
            cost_s = least_s + self.evict_s(slot, query)
            if cost_s < best_s:
                best_s, tied = cost_s, [slot]
            elif cost_s == best_s:
                tied.append(slot)
            costs[slot] = np.inf
        return min(tied) if self._ties is None else int(self._ties.choice(sorted(tied)))

    def prefill_by_slot(self, query: Query) -> Floats:
        """Returns P by slot. A replica that caches a node caches all before it, so deeper nodes overwrite values."""
        prompt_len, matched = query.prompt_len, query.matched
        costs = np.empty(len(self._slots.names))
        costs.fill(self._prefill_s(prompt_len, prompt_len))
        for i, node in enumerate(matched):
            if i + 1 < len(matched) and matched[i + 1].replicas == node.replicas:
                continue
            prefill_s = self._prefill_s(prompt_len - node.end * self._block_size, prompt_len)
            if is_single(node.replicas):
                costs[node.replicas.bit_length() - 1] = prefill_s
            else:
                np.putmask(costs, bits(node.replicas, len(costs)), prefill_s)
        return costs

    def evict_s(self, slot: int, query: Query) -> float:
        """Returns M: the sum of PT(len_j) N_j over evicted nodes j; N_j is the share of the replica's requests using j.

        The share is of requests within the window (second version of the paper; the first one counts requests).
        """
        short = self._tree.num_cached[slot] + query.end - query.hit_end(slot) - self.capacity[slot]
        if short <= 0:
            return 0.0
        total_s = 0.0
        for copy, num in self._tree.lru(slot, short, query.path):
            if copy.num_recent:
                context_len = copy.node.end * self._block_size
                total_s += self._prefill_s(num * self._block_size, context_len) * copy.num_recent
        return total_s / max(1, self._load.num_requests[slot])

    def prefill_s(self, slot: int, query: Query) -> float:
        """Returns P on one replica."""
        lacking = query.prompt_len - query.hit_end(slot) * self._block_size
        return self._prefill_s(lacking, query.prompt_len)

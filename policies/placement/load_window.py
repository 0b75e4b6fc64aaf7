"""The load of each replica over a window of time: L_i of Preble's Algorithm 2, by running sums."""

from __future__ import annotations

from collections import deque

import numpy as np

from core.errors import IntegrityError
from policies.placement.e2_profiles import Regressions
from policies.placement.replica_slots import Floats


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

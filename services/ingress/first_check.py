"""Whether a new request may wait at all: requests and prompt tokens in flight at all ingress replicas, and the
predicted queue delay. Without clock or I/O.

Each replica counts its own requests itself. What the others have, and the load that the delay is predicted from, comes
with the Router's answer to every announcement, so it is up to one announcement old; a replica adds to the load what it
has admitted since, and takes away what has ended.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from core.config.server import ServerConfig
from core.errors import CapacityError
from core.load_snapshot import Demand, LoadSnapshot
from core.messages.requests import AnnounceReply, IngressLoad
from core.request import Request
from policies.fleet.queue_delay import ended_after_s, queue_delay_s

RETRY_AFTER_S = 1.0
"""Where nothing is known of what requests take."""


class TooMuch(CapacityError):
    """A request that is refused at the first check.

    Args:
        bound: Which bound it is: the label of ``farsight:rejected_requests``.
    """

    def __init__(self, bound: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message}; retry in {math.ceil(retry_after_s)} s", retry_after_s)
        self.bound = bound

    def __reduce__(self) -> tuple[Any, ...]:
        return CapacityError, (str(self), self.retry_after_s)


class FirstCheck:
    """Counts by key what is in flight; a key is the name of the tenant of an API key, "" where no keys are in use."""

    def __init__(self, limits: ServerConfig) -> None:
        self._limits = limits
        self._own_requests: Counter[str] = Counter()
        self._own_tokens: Counter[str] = Counter()
        self._others_requests: Counter[str] = Counter()
        self._others_tokens: Counter[str] = Counter()
        self._own_total = self._others_total = (0, 0)  # requests and tokens, over all keys
        self._outlook: LoadSnapshot | None = None

    def load(self) -> IngressLoad:
        """What this replica has in flight."""
        own = self._own_requests
        return IngressLoad(tuple((key, own[key], self._own_tokens[key]) for key in own))

    def heard(self, reply: AnnounceReply) -> None:
        """The Router has answered an announcement."""
        self._others_requests = Counter({key: num for key, num, _ in reply.others.by_key})
        self._others_tokens = Counter({key: num for key, _, num in reply.others.by_key})
        self._others_total = self._others_requests.total(), self._others_tokens.total()
        self._outlook = reply.outlook

    def admit(self, request: Request, key: str = "") -> None:
        """Counts the request.

        Raises:
            TooMuch: A bound is reached; nothing has changed.
        """
        limits = self._limits
        num, tokens = self.in_flight
        self._check(num, tokens, request, "", limits.max_queued_requests, limits.max_queued_tokens)
        if key:
            num = self._own_requests[key] + self._others_requests[key]
            tokens = self._own_tokens[key] + self._others_tokens[key]
            most = limits.max_queued_requests_per_key, limits.max_queued_tokens_per_key
            self._check(num, tokens, request, " of your tenant", *most)
        self._check_delay()
        self._count(key, request, 1)

    def leave(self, request: Request, key: str = "") -> None:
        """It is in flight no more."""
        self._count(key, request, -1)
        if not self._own_requests[key]:
            del self._own_requests[key], self._own_tokens[key]

    @property
    def in_flight(self) -> tuple[int, int]:
        """Requests and prompt tokens, at all ingress replicas."""
        return self._own_total[0] + self._others_total[0], self._own_total[1] + self._others_total[1]

    def _count(self, key: str, request: Request, num: int) -> None:
        tokens = num * request.prompt_len
        self._own_requests[key] += num
        self._own_tokens[key] += tokens
        self._own_total = self._own_total[0] + num, self._own_total[1] + tokens
        if self._limits.max_wait_s and self._outlook is not None:
            self._outlook = _changed(self._outlook, request, num)

    def _check(self, num: int, tokens: int, request: Request, whose: str, most: int, most_tokens: int) -> None:
        """0 is no limit. A request alone may have more tokens than the limit: else it could never run."""
        if most and num >= most:
            message = f"too many requests{whose} in flight: {num}, limit {most}"
            raise TooMuch("max_num_queued_reqs", message, self._ended_after_s(num - most + 1))
        if most_tokens and num and tokens + request.prompt_len > most_tokens:
            message = f"too many prompt tokens{whose} in flight: {tokens}, limit {most_tokens}"
            share = (tokens + request.prompt_len - most_tokens) / max(1, tokens)
            raise TooMuch("max_num_queued_tokens", message, self._ended_after_s(math.ceil(share * num)))

    def _check_delay(self) -> None:
        most_s, outlook = self._limits.max_wait_s, self._outlook
        if not most_s or outlook is None:
            return
        delay_s = queue_delay_s(outlook, outlook.num_replicas)
        if delay_s is not None and delay_s > most_s:
            message = f"predicted queue delay: {delay_s:.0f} s, limit {most_s:g} s"
            raise TooMuch("max_wait", message, max(RETRY_AFTER_S, delay_s - most_s))

    def _ended_after_s(self, num_requests: int) -> float:
        """Until so many have ended, if no others come."""
        found = None if self._outlook is None else ended_after_s(self._outlook, num_requests)
        return RETRY_AFTER_S if found is None else max(RETRY_AFTER_S, found)


def _changed(seen: LoadSnapshot, request: Request, num: int) -> LoadSnapshot:
    """The load with this request more (``num`` 1) or less (-1).

    Its output is taken as long as the others' in the mean; alone, as long as it may be.
    """
    demand = seen.demand
    before = demand.num_requests
    output_len = demand.output_tokens / before if before else request.sampling.max_new_tokens
    changed = Demand(
        max(0, before + num),
        max(0, demand.num_waiting + num),
        demand.num_busy,
        max(0.0, demand.known_tokens + num * request.prompt_len),
        demand.cached_tokens,
        max(0.0, demand.output_tokens + num * output_len),
    )
    return LoadSnapshot(changed, seen.num_replicas, seen.max_num_seqs, seen.kv_tokens, seen.joins, seen.cost)

"""The check of a request before it costs anything: a pure count of the requests in flight, and a predicted wait."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from farsight.core.config.server import ServerConfig
from farsight.core.errors import CapacityError
from farsight.core.messages.requests import AnnounceReply, Demand, IngressLoad, LoadSnapshot
from farsight.core.request import Request
from farsight.policies.fleet.queue_delay import TargetCheck, ended_after_s, queue_delay_s

RETRY_AFTER_S = 1.0
"""Seconds after which to try again, where nothing is known of how long requests take."""

_LEAST_PREDICTED_S = 0.2
"""Shorter predicted waits (s) teach little, because the prompt and the first step take as long. A short limit admits
only such waits, so predictions from a tenth of the limit on count in any case."""

_FADING = 0.02
"""Share of the past that a new wait replaces."""

_MOST_CORRECTION = 4.0
"""Largest factor between waits and predictions. A longer wait has another cause, such as the death of a worker."""

_SURE = 0.99
"""Share of the admitted requests that should wait no longer than the limit."""

_NUM_ERRORS = 2000
"""Latest errors of predictions, which teach how far waits exceed them. A machine stalls for a second now and then, at
most every ten seconds; under overload so many waits reach further back than that."""

_MOST_CAUTION = 0.5
"""Largest share of the limit that is reserved for errors."""


class TooMuch(CapacityError):
    """A request that is refused at the first check.

    Args:
        bound: The bound that was reached: the label of ``farsight:rejected_requests``.
    """

    def __init__(self, bound: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{message}; retry in {math.ceil(retry_after_s)} s", retry_after_s)
        self.bound = bound

    def __reduce__(self) -> tuple[Any, ...]:
        return CapacityError, (str(self), self.retry_after_s)


@dataclass(eq=False, slots=True)
class CountedRequest:
    """A request that was admitted and is in flight.

    Attributes:
        key: The key that ``FirstCheck`` counts it under.
        predicted_s: Its queue delay by the cost of steps, in seconds; 0 if none could be predicted.
        expected_s: The same, corrected by the waits before it.
        num_tokens: Output tokens so far.
        output_len: Output tokens that it will have; None if it may end at any token. A forecast does not count: with
            forecasts that err by half, requests end closer to evenly than to their forecasts.
        target_ttft_s: Predicted time to the first token of a request with a target; 0 without one.
    """

    request: Request
    key: str
    predicted_s: float
    expected_s: float
    num_tokens: int = 0
    output_len: float | None = None
    target_ttft_s: float = 0.0

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.num_tokens = len(self.request.output_ids)
        if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
            self.output_len = sampling.max_new_tokens


class FirstCheck:
    """Counts the requests in flight by key, and compares predicted waits with the waits that follow.

    A key is the name of the tenant of an API key, "" where no keys are in use. The prediction knows the cost of steps
    alone: the time between steps, and the load of other processes, shows in the waits.

    Args:
        rejected: Called at each refusal with its bound.

    Attributes:
        limits: May be replaced at any time; admitted requests stay.
    """

    def __init__(self, limits: ServerConfig, rejected: Callable[[str], None] = lambda _: None) -> None:
        self.limits = limits
        self._rejected = rejected
        self._own_requests: Counter[str] = Counter()
        self._own_tokens: Counter[str] = Counter()
        self._others_requests: Counter[str] = Counter()
        self._others_tokens: Counter[str] = Counter()
        self._own_total = self._others_total = (0, 0)  # requests and tokens, over all keys
        self._outlook: LoadSnapshot | None = None
        self._unplaced: set[CountedRequest] = set()
        self._unheard: set[CountedRequest] = set()  # the Router may not have counted them in its last load
        self._running: set[CountedRequest] = set()
        self._targets, self._target_ttft_s = TargetCheck(), 0.0
        self._predicted_s = self._waited_s = 0.0  # sums in which older waits fade
        self._errors: deque[float] = deque()  # waits less expected waits, in seconds, in order of time ...
        self._ordered: list[float] = []  # ... and of size
        self._tokens = self._tokens_s = 0.0  # fading sums: tokens of running requests, and the seconds between them

    @property
    def snapshot(self) -> LoadSnapshot | None:
        """The load that the Router last told, with the changes since; None before that."""
        return self._outlook

    def announcing(self) -> IngressLoad:
        """Returns ``load`` for an announcement, whose answer goes to ``heard``."""
        self._unheard = set(self._unplaced)
        return self.load()

    def load(self) -> IngressLoad:
        """Returns the requests and prompt tokens that this replica has in flight."""
        own = self._own_requests
        return IngressLoad(tuple((key, own[key], self._own_tokens[key]) for key in own))

    def heard(self, reply: AnnounceReply) -> None:
        """Books the Router's answer to an announcement."""
        self._others_requests = Counter({key: num for key, num, _ in reply.others.by_key})
        self._others_tokens = Counter({key: num for key, _, num in reply.others.by_key})
        self._others_total = self._others_requests.total(), self._others_tokens.total()
        self._outlook = reply.outlook
        for admitted in self._unheard:
            self._change(admitted.request, 1)

    def refusal(self, num_ahead: int = 0) -> TooMuch | None:
        """Returns why any request would be refused now; None if one may be admitted. O(1); a refusal is O(running).

        Args:
            num_ahead: Requests that came before and are not counted yet.
        """
        num, tokens = self.in_flight
        limits = self.limits
        try:
            self._check(num + num_ahead, tokens, 0, "", limits.max_queued_requests, limits.max_queued_tokens)
            self._check_delay(num_ahead)
        except TooMuch as error:
            return error
        return None

    def shed(self, num_ahead: int = 0) -> TooMuch | None:
        """Returns ``refusal`` and counts it: the caller refuses a request by it."""
        error = self.refusal(num_ahead)
        if error is not None:
            self._rejected(error.bound)
        return error

    def admit(self, request: Request, key: str = "") -> CountedRequest:
        """Counts the request.

        Raises:
            TooMuch: A bound is reached; nothing has changed.
        """
        try:
            predicted_s = self._check_all(request, key)
        except TooMuch as error:
            self._rejected(error.bound)
            raise
        expected_s = self.correction * predicted_s
        admitted = CountedRequest(request, key, predicted_s, expected_s, target_ttft_s=self._target_ttft_s)
        self._count(key, request, 1)
        self._unplaced.add(admitted)
        self._unheard.add(admitted)
        return admitted

    def _check_all(self, request: Request, key: str) -> float:
        limits = self.limits
        num, tokens = self.in_flight
        prompt_len = request.prompt_len
        self._check(num, tokens, prompt_len, "", limits.max_queued_requests, limits.max_queued_tokens)
        if key:
            num = self._own_requests[key] + self._others_requests[key]
            tokens = self._own_tokens[key] + self._others_tokens[key]
            most = limits.max_queued_requests_per_key, limits.max_queued_tokens_per_key
            self._check(num, tokens, prompt_len, " of your tenant", *most)
        self._check_targets(request)
        return self._check_delay()

    def free_places(self) -> int:
        """Returns how many more requests all replicas can run now; 0 while one waits, or before the Router answers."""
        outlook = self._outlook
        if outlook is None or outlook.demand.num_waiting:
            return 0
        return max(0, outlook.num_replicas * outlook.max_num_seqs - self.in_flight[0])

    def _check_targets(self, request: Request) -> None:
        """Raises TooMuch for a request whose tokens cannot come by the time that its client wants them."""
        self._target_ttft_s = 0.0
        if not request.wants_speed or self._outlook is None:
            return
        missed, self._target_ttft_s = self._targets.look(self._outlook, request)
        if missed is not None:
            raise TooMuch("deadline", missed.message, max(RETRY_AFTER_S, missed.late_s))

    def placed(self, admitted: CountedRequest) -> None:
        """Books that the Router has the request, and counts it in its load from now on."""
        self._unplaced.discard(admitted)

    def waited(self, admitted: CountedRequest, waited_s: float, num_tokens: int = 1) -> None:
        """Books the first tokens of a request, ``waited_s`` seconds after it was admitted."""
        self._running.add(admitted)
        admitted.num_tokens += num_tokens
        if admitted.target_ttft_s:
            self._targets.errors.add(admitted.target_ttft_s, waited_s)
        predicted_s = admitted.predicted_s
        if predicted_s > 0 and predicted_s >= min(_LEAST_PREDICTED_S, self.limits.max_wait_s / 10):
            self._note_error(waited_s - admitted.expected_s)
            self._predicted_s += predicted_s - self._predicted_s * _FADING
            self._waited_s += waited_s - self._waited_s * _FADING

    def _note_error(self, error_s: float) -> None:
        """Keeps an error, in order of time and of size. O(``_NUM_ERRORS``), in the memory of one list."""
        if len(self._errors) == _NUM_ERRORS:
            del self._ordered[bisect.bisect_left(self._ordered, self._errors.popleft())]
        self._errors.append(error_s)
        bisect.insort(self._ordered, error_s)

    def progressed(self, admitted: CountedRequest, num_tokens: int, seconds: float) -> None:
        """Books further tokens of a running request, ``seconds`` after the tokens before."""
        admitted.num_tokens += num_tokens
        self._tokens += num_tokens - self._tokens * _FADING
        self._tokens_s += seconds - self._tokens_s * _FADING

    @property
    def correction(self) -> float:
        """Ratio of recent waits to their predictions."""
        if not self._predicted_s:
            return 1.0
        return min(_MOST_CORRECTION, max(1 / _MOST_CORRECTION, self._waited_s / self._predicted_s))

    @property
    def caution_s(self) -> float:
        """Most seconds by which recent waits exceeded the expected ones, the longest 1 % aside."""
        if not self._ordered:
            return 0.0
        error_s = self._ordered[int(_SURE * (len(self._ordered) - 1))]
        return min(_MOST_CAUTION * self.limits.max_wait_s, max(0.0, error_s))

    def leave(self, admitted: CountedRequest) -> None:
        """Books that the request is no longer in flight."""
        key = admitted.key
        self._unplaced.discard(admitted)
        self._unheard.discard(admitted)
        self._running.discard(admitted)
        self._count(key, admitted.request, -1)
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
        self._change(request, num)

    def _change(self, request: Request, num: int) -> None:
        """Adds this request to the load (``num`` 1), or takes it out (-1)."""
        if self.limits.max_wait_s and self._outlook is not None:
            self._outlook = _changed(self._outlook, request, num)

    def _check(self, num: int, tokens: int, prompt_len: int, whose: str, most: int, most_tokens: int) -> None:
        """Raises TooMuch at a limit; 0 is none. A lone request may exceed that of tokens: else it could never run."""
        if most and num >= most:
            message = f"too many requests{whose} in flight: {num}, limit {most}"
            raise TooMuch("max_num_queued_reqs", message, self._ended_after_s(num - most + 1))
        if most_tokens and num and tokens + prompt_len > most_tokens:
            message = f"too many prompt tokens{whose} in flight: {tokens}, limit {most_tokens}"
            share = (tokens + prompt_len - most_tokens) / max(1, tokens)
            raise TooMuch("max_num_queued_tokens", message, self._ended_after_s(math.ceil(share * num)))

    def _check_delay(self, num_ahead: int = 0) -> float:
        """Predicts the seconds behind all in flight and ``num_ahead`` more; raises TooMuch if they exceed the limit."""
        most_s, outlook = self.limits.max_wait_s, self._outlook
        if not most_s or outlook is None:
            return 0.0
        if num_ahead:
            outlook = _longer(outlook, num_ahead)
        predicted_s = queue_delay_s(outlook, outlook.num_replicas) or 0.0
        delay_s = self.correction * predicted_s + self.caution_s
        if predicted_s and delay_s > most_s:
            message = f"predicted queue delay: {delay_s:.0f} s, limit {most_s:g} s"
            raise TooMuch("max_wait", message, self._shorter_after_s(outlook, most_s - self.caution_s))
        return predicted_s

    def _shorter_after_s(self, outlook: LoadSnapshot, limit_s: float) -> float:
        """Returns the seconds until enough requests have ended for the predicted delay to meet this limit."""
        lowest, highest = 0, outlook.demand.num_requests
        while highest - lowest > 1:
            middle = (lowest + highest) // 2
            fewer = _longer(outlook, -middle)
            if self.correction * (queue_delay_s(fewer, fewer.num_replicas) or 0.0) > limit_s:
                lowest = middle
            else:
                highest = middle
        return self._ended_after_s(highest)

    def _ended_after_s(self, num_requests: int) -> float:
        """Returns the seconds until ``num_requests`` have ended, if no others come: running requests of known length
        end in their order; beyond these, requests end evenly at the mean rate."""
        outlook = self._outlook
        if outlook is None:
            return RETRY_AFTER_S
        # Requests of other ingress replicas end as this replica's do.
        own, others = self._own_total[0], self._others_total[0]
        num_own = math.ceil(num_requests * own / (own + others)) if others else num_requests
        left = self._left()
        if 0 < num_own <= len(left) and self._tokens:
            return sorted(left)[num_own - 1] * self._tokens_s / self._tokens
        found = ended_after_s(outlook, num_requests)
        return RETRY_AFTER_S if found is None else self.correction * found

    def _left(self) -> list[float]:
        """Returns the tokens still to come of each running request of this replica; empty unless all are known."""
        left = []
        for admitted in self._running:
            if admitted.output_len is None:
                return []
            left.append(max(1.0, admitted.output_len - admitted.num_tokens))
        return left


def _changed(seen: LoadSnapshot, request: Request, num: int) -> LoadSnapshot:
    """Returns the load with this request added (``num`` 1) or taken out (-1).

    Its output counts as the mean of the others; alone, as its limit.
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
        max(0.0, demand.output_variance * (1 + num / before)) if before else 0.0,
        max(0, demand.num_with_targets + num * request.wants_speed),
    )
    return dataclasses.replace(seen, demand=changed)


def _longer(seen: LoadSnapshot, num: int) -> LoadSnapshot:
    """Returns the load with ``num`` average requests added, or taken out if negative; unchanged if it is empty."""
    demand = seen.demand
    if not demand.num_requests:
        return seen
    share = 1 + num / demand.num_requests
    longer = dataclasses.replace(
        demand,
        num_requests=demand.num_requests + num,
        num_waiting=max(0, demand.num_waiting + num),
        known_tokens=demand.known_tokens * share,
        cached_tokens=demand.cached_tokens * share,
        output_tokens=demand.output_tokens * share,
        output_variance=demand.output_variance * share,
    )
    return dataclasses.replace(seen, demand=longer)

"""What an ingress replica refuses before it costs anything: a pure count of what is in flight, and a predicted wait."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from core.config.server import ServerConfig
from core.errors import CapacityError
from core.load_snapshot import Demand, LoadSnapshot
from core.messages.requests import AnnounceReply, IngressLoad
from core.request import Request
from policies.fleet.latency_targets import TargetCheck
from policies.fleet.queue_delay import ended_after_s, queue_delay_s

RETRY_AFTER_S = 1.0
"""Where nothing is known of what requests take."""

_LEAST_PREDICTED_S = 0.2
"""A shorter wait says little, because the prompt and the first step take as long; but a limit so short that only such
waits are admitted needs them: a tenth of the limit counts in any case."""

_FADING = 0.02
"""Share of the past that a new wait replaces."""

_MOST_CORRECTION = 4.0
"""A wait beyond that has another cause, such as the death of a worker."""

_SURE = 0.99
"""Share of the requests that are to wait no longer than the limit."""

_NUM_ERRORS = 2000
"""Latest errors of predictions from which it is learned how far waits exceed them. A machine stands still for a second
now and then, more seldom than every ten seconds; under overload so many waits reach further back."""

_MOST_CAUTION = 0.5
"""Share of the limit that is kept for errors at most."""


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


@dataclass(eq=False, slots=True)
class CountedRequest:
    """A request that was admitted and is in flight.

    Attributes:
        key: Whose it is, as ``FirstCheck`` counts.
        predicted_s: Its queue delay by the cost of steps, in seconds; 0 if none could be predicted.
        expected_s: The same, corrected by the waits before it.
        num_tokens: Output tokens so far.
        output_len: Output tokens that it will have; None if it may end at any token. A forecast is no such number: with
            forecasts that err by half, those that run end less as predicted than evenly.
        target_predicted_s: Predicted time to the first token of a request with a target; 0 without one.
    """

    request: Request
    key: str
    predicted_s: float
    expected_s: float
    num_tokens: int = 0
    output_len: float | None = None
    target_predicted_s: float = 0.0

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.num_tokens = len(self.request.output_ids)
        if sampling.ignore_eos and not sampling.stop and not sampling.stop_token_ids:
            self.output_len = sampling.max_new_tokens


class FirstCheck:
    """Counts by key what is in flight, and compares the waits that it predicts with those that follow.

    A key is the name of the tenant of an API key, "" where no keys are in use. The prediction knows the cost of steps
    alone: what passes between them, and what other processes take of the machine, shows in the waits.

    Args:
        rejected: Told of each refusal by its bound.

    Attributes:
        limits: May be replaced at any time; what was admitted stays.
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
        self._unheard: set[CountedRequest] = set()  # which the Router may not have known when it last spoke of its load
        self._running: set[CountedRequest] = set()
        self._targets, self._predicted_s = TargetCheck(), 0.0
        self._predicted_s = self._waited_s = 0.0  # sums in which older waits fade
        self._errors: deque[float] = deque()  # waits less what was expected, in seconds, in order of time ...
        self._ordered: list[float] = []  # ... and of size
        self._tokens = self._tokens_s = 0.0  # the same of the tokens of those that run, and of the time between them

    @property
    def snapshot(self) -> LoadSnapshot | None:
        """The load as the Router last told it, with what has changed since; None before that."""
        return self._outlook

    def announcing(self) -> IngressLoad:
        """What this replica has in flight; the answer to the announcement that is made now goes to ``heard``."""
        self._unheard = set(self._unplaced)
        return self.load()

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
        for admitted in self._unheard:
            self._change(admitted.request, 1)

    def refusal(self, num_ahead: int = 0) -> TooMuch | None:
        """Why any request at all would be refused now; None if one may be admitted. O(1), and O(running) if it is
        refused.

        Args:
            num_ahead: Requests that have come before it and that are not counted yet.
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
        """As ``refusal``, for a request that is refused if there is a reason."""
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
        admitted = CountedRequest(request, key, predicted_s, expected_s, target_predicted_s=self._predicted_s)
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
        """Places at the replicas that no request has, wherever it came in; 0 as long as one waits for a replica, and
        before the Router has spoken."""
        outlook = self._outlook
        if outlook is None or outlook.demand.num_waiting:
            return 0
        return max(0, outlook.num_replicas * outlook.max_num_seqs - self.in_flight[0])

    def _check_targets(self, request: Request) -> None:
        """A request that cannot have its tokens by when its client wants them is refused at once."""
        self._predicted_s = 0.0
        if not request.wants_speed or self._outlook is None:
            return
        missed, self._predicted_s = self._targets.look(self._outlook, request)
        if missed is not None:
            raise TooMuch("deadline", missed.message, max(RETRY_AFTER_S, missed.late_s))

    def placed(self, admitted: CountedRequest) -> None:
        """The Router has it, and counts it in its load from now on."""
        self._unplaced.discard(admitted)

    def waited(self, admitted: CountedRequest, waited_s: float, num_tokens: int = 1) -> None:
        """A request had its first tokens so long after it was admitted."""
        self._running.add(admitted)
        admitted.num_tokens += num_tokens
        if admitted.target_predicted_s:
            self._targets.errors.add(admitted.target_predicted_s, waited_s)
        predicted_s = admitted.predicted_s
        if predicted_s > 0 and predicted_s >= min(_LEAST_PREDICTED_S, self.limits.max_wait_s / 10):
            self._note_error(waited_s - admitted.expected_s)
            self._predicted_s += predicted_s - self._predicted_s * _FADING
            self._waited_s += waited_s - self._waited_s * _FADING

    def _note_error(self, error_s: float) -> None:
        """O(``_NUM_ERRORS``), in the memory of one list."""
        if len(self._errors) == _NUM_ERRORS:
            del self._ordered[bisect.bisect_left(self._ordered, self._errors.popleft())]
        self._errors.append(error_s)
        bisect.insort(self._ordered, error_s)

    def progressed(self, admitted: CountedRequest, num_tokens: int, seconds: float) -> None:
        """A request that runs had so many more tokens, so long after those before."""
        admitted.num_tokens += num_tokens
        self._tokens += num_tokens - self._tokens * _FADING
        self._tokens_s += seconds - self._tokens_s * _FADING

    @property
    def correction(self) -> float:
        """Waits over their predictions, of late."""
        if not self._predicted_s:
            return 1.0
        return min(_MOST_CORRECTION, max(1 / _MOST_CORRECTION, self._waited_s / self._predicted_s))

    @property
    def caution_s(self) -> float:
        """Seconds by which all but the longest waits of late exceeded what was expected, at most."""
        if not self._ordered:
            return 0.0
        error_s = self._ordered[int(_SURE * (len(self._ordered) - 1))]
        return min(_MOST_CAUTION * self.limits.max_wait_s, max(0.0, error_s))

    def leave(self, admitted: CountedRequest) -> None:
        """It is in flight no more."""
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
        """The load with this request more (``num`` 1) or less (-1)."""
        if self.limits.max_wait_s and self._outlook is not None:
            self._outlook = _changed(self._outlook, request, num)

    def _check(self, num: int, tokens: int, prompt_len: int, whose: str, most: int, most_tokens: int) -> None:
        """0 is no limit. A request alone may have more tokens than the limit: else it could never run."""
        if most and num >= most:
            message = f"too many requests{whose} in flight: {num}, limit {most}"
            raise TooMuch("max_num_queued_reqs", message, self._ended_after_s(num - most + 1))
        if most_tokens and num and tokens + prompt_len > most_tokens:
            message = f"too many prompt tokens{whose} in flight: {tokens}, limit {most_tokens}"
            share = (tokens + prompt_len - most_tokens) / max(1, tokens)
            raise TooMuch("max_num_queued_tokens", message, self._ended_after_s(math.ceil(share * num)))

    def _check_delay(self, num_ahead: int = 0) -> float:
        """The predicted delay behind all in flight and so many more like them."""
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
        """Until so many have ended that the predicted delay is no longer than this limit."""
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
        """Until so many have ended, if no others come: as those that run come to their ends, where these are known, and
        beyond these as evenly as they do in the mean."""
        outlook = self._outlook
        if outlook is None:
            return RETRY_AFTER_S
        # Those that came in elsewhere end as ours do.
        own, others = self._own_total[0], self._others_total[0]
        num_own = math.ceil(num_requests * own / (own + others)) if others else num_requests
        left = self._left()
        if 0 < num_own <= len(left) and self._tokens:
            return sorted(left)[num_own - 1] * self._tokens_s / self._tokens
        found = ended_after_s(outlook, num_requests)
        return RETRY_AFTER_S if found is None else self.correction * found

    def _left(self) -> list[float]:
        """Tokens still to come of each own request that runs; none unless it is known of all."""
        left = []
        for admitted in self._running:
            if admitted.output_len is None:
                return []
            left.append(max(1.0, admitted.output_len - admitted.num_tokens))
        return left


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
        max(0.0, demand.output_variance * (1 + num / before)) if before else 0.0,
        max(0, demand.num_with_targets + num * request.wants_speed),
    )
    return dataclasses.replace(seen, demand=changed)


def _longer(seen: LoadSnapshot, num: int) -> LoadSnapshot:
    """The load with so many requests more, or less if that is negative, each as the others are in the mean; unchanged
    where there are none."""
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

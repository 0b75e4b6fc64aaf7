"""What is on a replica at this instant, for the operator's pages."""

from __future__ import annotations

from dataclasses import dataclass, field, fields


@dataclass(frozen=True, slots=True)
class LiveQuery:
    """To a Scheduler: ``max_rows`` of its requests at most, 0 for its sums alone."""

    max_rows: int = 0


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request on a replica.

    Attributes:
        response_id: The answer that it belongs to, ``choice`` its index there; empty if it cannot be explained.
        state: waiting, prefill, decode, paused or offloaded.
        age_s: Seconds since it reached the replica's scheduler.
        predicted_len, most_len: Forecast of the whole output, its mean and 90th percentile in tokens; None without one.
        kv_tokens: Tokens whose KV it holds on the device.
        level: Its queue of the MLFQ, from 1; 0 under another order.
        eta_p50, eta_p90: Seconds by which it has ended with probability 0.5 and 0.9; None while unknown.
        rank_s: Its rank under an order that ranks by time, in seconds, lower first; None under another one.
        prefilled_len: Prompt tokens computed or found cached so far, as the worker last reported.
    """

    request_id: str
    response_id: str
    choice: int
    tenant: str
    state: str
    age_s: float
    prompt_len: int
    output_len: int
    max_new_tokens: int
    predicted_len: float | None
    most_len: float | None
    kv_tokens: int
    level: int
    rank_s: float | None
    waits_for: str
    num_preemptions: int
    eta_p50: float | None = None
    eta_p90: float | None = None
    prefilled_len: int = 0


@dataclass(frozen=True, slots=True)
class EndedRequest:
    """A request that has ended on a replica, or whose client left before any replica took it.

    Attributes:
        predicted_len, most_len: As in ``LiveRequest``.
        took_s: Since it reached the replica's scheduler, or the Router if it came no further.
        ago_s: Seconds since its end.
        ttft_s: Seconds from the same instant until its first token was reported; None without one.
    """

    response_id: str
    choice: int
    reason: str
    output_len: int
    predicted_len: float | None
    took_s: float
    most_len: float | None = None
    ago_s: float = 0.0
    tenant: str = ""
    prompt_len: int = 0
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class MemoryPoint:
    """KV tokens in use after ``steps`` further decoding steps, if no request joins."""

    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class ForecastTally:
    """Accuracy of forecasts, over the requests that had one and ended of themselves or at their limit.

    Attributes:
        error_tokens: Sum of the distances between mean and true length.
        excess_tokens: Sum of mean minus true length; below 0 where forecasts were too short.
        output_tokens: Sum of the true lengths.
        within_p50, within_p90: Requests that were no longer than that quantile.
    """

    num_requests: int = 0
    error_tokens: float = 0.0
    excess_tokens: float = 0.0
    output_tokens: int = 0
    within_p50: int = 0
    within_p90: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLive:
    """From a Scheduler.

    Attributes:
        num_running: Requests with a place; requests without one wait.
        used_tokens: KV tokens of the requests with a place.
        capacity_tokens: KV tokens that its requests may hold, shared ones counted for each; 0 without a worker.
        curve: The predicted memory, at most ``policies.replica.live_view.MAX_POINTS`` points, steps rising.
        requests: Requests with a place first, then waiting ones, best first.
        ended: The last ended requests, newest first.
        forecasts: Accuracy of forecasts since the Scheduler began.
        prompt_tokens: Prompt tokens computed or found cached since then; tokens computed again do not count.
        gpu_s: GPU-seconds of its requests since then.
    """

    replica: str
    num_running: int
    num_waiting: int
    num_offloaded: int
    used_tokens: int
    capacity_tokens: int
    curve: tuple[MemoryPoint, ...]
    requests: tuple[LiveRequest, ...] = ()
    ended: tuple[EndedRequest, ...] = ()
    forecasts: ForecastTally = ForecastTally()
    prompt_tokens: int = 0
    gpu_s: float = 0.0

    @property
    def peak_tokens(self) -> int:
        """The highest point of the curve."""
        return max((point.tokens for point in self.curve), default=0)


@dataclass(frozen=True, slots=True)
class LeftWaiting:
    """From the Router: requests whose clients left before a replica took them, the last ones, newest first."""

    requests: tuple[EndedRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class LiveView:
    """All replicas that answered, and the requests that are on none.

    Attributes:
        left_waiting: As in ``LeftWaiting``.
    """

    replicas: tuple[ReplicaLive, ...]
    num_unplaced: int = 0
    left_waiting: tuple[EndedRequest, ...] = ()


@dataclass(slots=True)
class SessionCounts:
    """Sums over the turns of one session, or over the sessions of one application; a mutable record.

    Attributes:
        sessions: Sessions that began; 0 in the counts of one session.
        turns: Requests that began, ``answers`` those that have ended with an answer.
        prompt_tokens: Tokens of the prompts of answered turns; the other tokens are of these turns too.
        new_tokens: Tokens of prompts behind what an earlier prompt of the session had.
        computed_tokens: Prompt tokens that were computed, the first time or again.
        restored_tokens: Prompt tokens that were brought back from the host or from disk.
        in_model_s: Seconds in which at least one of its requests was open.
        away_s: Seconds from an answer to the next turn: in tools, or with people.
        gpu_s: GPU-seconds (``core.costs.row_shares``).
    """

    sessions: int = 0
    turns: int = 0
    answers: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    computed_tokens: int = 0
    restored_tokens: int = 0
    output_tokens: int = 0
    in_model_s: float = 0.0
    away_s: float = 0.0
    gpu_s: float = 0.0

    def add(self, other: SessionCounts) -> None:
        """Adds the sums of another."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(slots=True)
class SessionRow:
    """One session; instants in seconds of the clock of who keeps it.

    Attributes:
        name: As its client named it, cut to 128 characters; ``#7`` where it was found by its prompts.
        application: What its requests say that they come from; empty where they do not.
        num_open: Its requests that have not ended.
        first_at, last_at: Its first request, and its latest event.
    """

    name: str
    tenant: str
    application: str
    is_named: bool
    first_at: float
    last_at: float
    num_open: int = 0
    counts: SessionCounts = field(default_factory=SessionCounts)


@dataclass(frozen=True, slots=True)
class SessionsQuery:
    """To the Router: the ``max_rows`` sessions with the latest events; of one tenant alone where ``tenant`` is set."""

    max_rows: int = 0
    tenant: str | None = None


@dataclass(frozen=True, slots=True)
class ApplicationRow:
    """The sessions of one application together, forgotten ones included."""

    application: str
    counts: SessionCounts


@dataclass(frozen=True, slots=True)
class SessionsView:
    """From the Router: sessions, the latest first.

    Attributes:
        now: Instant of the answer on the clock of the rows.
        num_sessions: Sessions that are kept, shown or not; ``num_forgotten`` had to make room for others.
    """

    rows: tuple[SessionRow, ...]
    applications: tuple[ApplicationRow, ...]
    now: float = 0.0
    num_sessions: int = 0
    num_forgotten: int = 0

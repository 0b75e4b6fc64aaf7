"""The scheduler of another server: events in, instructions out; and the breaker that decides what goes there."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.decisions import unpack_decisions
from farsight.core.errors import IntegrityError
from farsight.core.forecast import QUANTILES, Forecast, ForecastMade
from farsight.core.messages.requests import Key
from farsight.core.request import Origin, Request, SamplingParams, SequenceStatus
from farsight.policies.compose import configured_backend
from farsight.policies.external.circuit_breaker import (
    BreakerEvent,
    BreakerRules,
    BreakerState,
    CircuitBreaker,
    Failed,
    ProbeBegun,
    ProbeFailed,
    ProbePassed,
    Succeeded,
)
from farsight.policies.external.events import (
    AskServer,
    BackendEvent,
    BackendInstruction,
    BreakerChanged,
    CancelRequest,
    FailRequest,
    OutputEnded,
    OutputFailed,
    OutputGrew,
    ProbeDone,
    ProbeTick,
    ReturnRequest,
    SendRequest,
    ServerFailure,
)
from farsight.policies.external.scheduler import NUM_REMEMBERED, BackendScheduler
from farsight.policies.replica.events import (
    AccountClosed,
    ForecastsArrived,
    RefuseRequest,
    RequestEnded,
    RequestsAborted,
    RequestsArrived,
)
from tests.unit.policies.batch_jobs import seeds

STOPPED = SequenceStatus.FINISHED_STOPPED
DOWN = ServerFailure("connect", "no connection")
LIES = ServerFailure("model", "another model", trips=True)
UNFIT = ServerFailure("request", "what a prompt", of_request=True)


def request(name: str, attempt: int = 0, ingress: str = "i", out: int = 10, resumed: int = 0, **fields: Any) -> Request:
    return Request(name, attempt, ingress, (1,) * 10, SamplingParams(out), (2,) * resumed, **fields)


def handle(scheduler: BackendScheduler, event: BackendEvent, now: float = 0.0) -> list[BackendInstruction]:
    instructions = scheduler.handle(event, now)
    scheduler.check_integrity()
    return instructions


def arrive(scheduler: BackendScheduler, *requests: Request, now: float = 0.0) -> list[BackendInstruction]:
    return handle(scheduler, RequestsArrived(requests), now)


def up(max_num_seqs: int = 2, **config: Any) -> BackendScheduler:
    """Its server has passed the first probe."""
    scheduler = configured_backend(SchedulerConfig(**config), max_num_seqs)
    assert handle(scheduler, ProbeTick()) == [AskServer(generates=True)]
    assert handle(scheduler, ProbeDone(None, 1000)) == [BreakerChanged()]
    return scheduler


def sent(instructions: list[BackendInstruction]) -> list[str]:
    return [each.request.request_id for each in instructions if isinstance(each, SendRequest)]


def returned(instructions: list[BackendInstruction]) -> list[str]:
    return [each.request.request_id for each in instructions if isinstance(each, ReturnRequest)]


def ended(instructions: list[BackendInstruction]) -> list[tuple[str, SequenceStatus, int]]:
    found = [each.finished for each in instructions if isinstance(each, RequestEnded)]
    return [(each.request_id, each.status, each.output_len) for each in found]


def test_as_many_are_sent_as_the_server_may_have() -> None:
    scheduler = up()
    assert sent(arrive(scheduler, request("a"), request("b"), request("c"))) == ["a", "b"]
    assert (scheduler.num_sent, scheduler.num_waiting) == (2, 1)
    handle(scheduler, OutputGrew(("a", 0), 3))
    done = handle(scheduler, OutputEnded(("a", 0), STOPPED), 2.0)
    assert ended(done) == [("a", STOPPED, 3)]
    assert sent(done) == ["c"]


def test_who_waits_goes_by_the_order_of_the_preset() -> None:
    scheduler = up(1)
    arrive(scheduler, request("first"))
    arrive(scheduler, request("late"), request("urgent", priority=-1))
    assert sent(handle(scheduler, OutputEnded(("first", 0), STOPPED))) == ["urgent"]


def predicted(mean: float) -> Forecast:
    return Forecast(mean, tuple(mean * level for level in QUANTILES), 100, "forest", 1)


def test_forecasts_order_those_who_wait() -> None:
    scheduler = up(1, preset="farsight")
    arrive(scheduler, request("first", out=900))
    arrive(scheduler, request("long", out=900), request("short", out=900))
    made = tuple(ForecastMade(name, 0, predicted(mean)) for name, mean in (("long", 800.0), ("short", 5.0)))
    handle(scheduler, ForecastsArrived(made))
    assert sent(handle(scheduler, OutputEnded(("first", 0), STOPPED), 1.0)) == ["short"]


def test_before_its_first_token_it_goes_elsewhere_and_after_it_fails() -> None:
    scheduler = up()
    arrive(scheduler, request("a"), request("b"))
    failed = handle(scheduler, OutputFailed(("a", 0), DOWN))
    assert returned(failed) == ["a"]
    assert ended(failed) == [("a", SequenceStatus.FINISHED_ABORTED, 0)]
    assert not handle(scheduler, OutputEnded(("a", 0), STOPPED)), "nothing more is said of it"
    handle(scheduler, OutputGrew(("b", 0), 1))
    failed = handle(scheduler, OutputFailed(("b", 0), DOWN))
    assert failed[0] == FailRequest(request("b"), 1, "no connection")
    assert ended(failed) == [("b", SequenceStatus.FINISHED_FAILED, 1)]
    for index in range(5):
        arrive(scheduler, request(f"r{index}"))
        assert isinstance(handle(scheduler, OutputFailed((f"r{index}", 0), UNFIT))[0], FailRequest)
    assert scheduler.breaker.closed, "the server is not blamed for what it will not take"


def test_tokens_of_earlier_attempts_are_not_its_own() -> None:
    scheduler = up()
    arrive(scheduler, request("a", 1, resumed=4))
    assert returned(handle(scheduler, OutputFailed(("a", 1), DOWN))) == ["a"]
    arrive(scheduler, request("a", 2, resumed=4))
    handle(scheduler, OutputGrew(("a", 2), 2))
    assert ended(handle(scheduler, OutputEnded(("a", 2), STOPPED))) == [("a", STOPPED, 6)]


def test_an_open_breaker_sends_all_that_waits_elsewhere_and_lets_the_rest_end() -> None:
    scheduler = up()
    arrive(scheduler, *(request(name) for name in "abcd"))
    handle(scheduler, OutputGrew(("b", 0), 1))
    failed = handle(scheduler, OutputFailed(("a", 0), LIES), 1.0)
    assert failed[0] == BreakerChanged()
    assert returned(failed) == ["c", "d", "a"]
    assert returned(arrive(scheduler, request("e"), now=1.1)) == ["e"]
    assert ended(handle(scheduler, OutputEnded(("b", 0), STOPPED), 1.2)) == [("b", STOPPED, 1)]
    assert handle(scheduler, ProbeTick(), 1.9) == []
    assert handle(scheduler, ProbeTick(), 2.0) == [BreakerChanged(), AskServer(generates=True)]
    assert handle(scheduler, ProbeTick(), 60.0) == [], "one probe at a time"
    assert handle(scheduler, ProbeDone(None, 1000), 60.0) == [BreakerChanged()]
    assert sent(arrive(scheduler, request("e", 1), now=60.0)) == ["e"]


def test_no_probe_goes_to_a_server_that_has_a_request() -> None:
    scheduler = up()
    arrive(scheduler, request("a"), now=4.0)
    assert handle(scheduler, ProbeTick(), 5.0) == [], "it computes the prompt"
    handle(scheduler, OutputGrew(("a", 0), 1), 100.0)
    assert handle(scheduler, ProbeTick(), 100.1) == []
    handle(scheduler, OutputEnded(("a", 0), STOPPED), 200.0)
    assert handle(scheduler, ProbeTick(), 204.9) == [], "its answer was as good as a probe"
    assert handle(scheduler, ProbeTick(), 205.0) == [AskServer(generates=False)]


def test_a_closed_one_is_asked_whether_it_is_well() -> None:
    scheduler = up()
    assert handle(scheduler, ProbeTick(), 4.9) == []
    assert handle(scheduler, ProbeTick(), 5.0) == [AskServer(generates=False)]
    assert handle(scheduler, ProbeDone(None, 1000), 5.1) == []
    handle(scheduler, ProbeTick(), 10.1)
    assert handle(scheduler, ProbeDone(None, 2000), 10.2) == [BreakerChanged()], "it holds longer sequences now"
    handle(scheduler, ProbeTick(), 15.2)
    assert handle(scheduler, ProbeDone(LIES), 15.3) == [BreakerChanged()]
    assert scheduler.breaker.state is BreakerState.OPEN


def test_attempts_are_fenced() -> None:
    scheduler = up()
    arrive(scheduler, request("a", 1))
    assert arrive(scheduler, request("a", 1), request("a", 0)) == []
    assert arrive(scheduler, request("a", 2)) == [CancelRequest(("a", 1)), SendRequest(request("a", 2))]
    assert handle(scheduler, RequestsAborted((("a", 1),))) == [], "an earlier attempt is gone already"
    assert handle(scheduler, OutputFailed(("a", 1), DOWN)) == []
    assert handle(scheduler, RequestsAborted((("a", 2),))) == [CancelRequest(("a", 2))]
    assert arrive(scheduler, request("a", 2)) == [], "the message came late"
    assert scheduler.num_sent == 0


def test_known_is_what_is_here_or_has_ended_lately() -> None:
    scheduler = up()
    arrive(scheduler, request("a"), request("b", 1))
    handle(scheduler, OutputEnded(("a", 0), STOPPED))
    keys = (("a", 0), ("b", 0), ("b", 1), ("b", 2), ("c", 0))
    assert scheduler.unknown(keys) == (("b", 2), ("c", 0))
    assert (scheduler.ingress_ids, scheduler.keys_of("i")) == ({"i"}, (("b", 1),))
    for index in range(NUM_REMEMBERED):
        scheduler.handle(RequestsArrived((request(f"r{index}"),)), 0.0)
        scheduler.handle(RequestsAborted(((f"r{index}", 0),)), 0.0)
    assert scheduler.unknown([("a", 0)]) == (("a", 0),)


def test_what_is_too_long_there_is_refused() -> None:
    scheduler = up()
    refused = arrive(scheduler, request("a", out=991))
    message = "prompt and max_tokens together are 1001 tokens; the limit of the server is 1000"
    assert refused == [RefuseRequest("a", 0, "max_tokens", message)]


def test_every_decision_is_noted() -> None:
    scheduler = up(1)
    named = [Request(name, 0, "i", (1,), SamplingParams(9), origin=Origin(f"cmpl-{name}")) for name in "ab"]
    arrive(scheduler, *named)
    assert len(scheduler.accounts("cmpl-b")) == 1
    handle(scheduler, OutputGrew(("a", 0), 2))
    accounts = [
        each
        for event in (OutputEnded(("a", 0), STOPPED), OutputFailed(("b", 0), DOWN))
        for each in handle(scheduler, event, 1.5)
        if isinstance(each, AccountClosed)
    ]
    kinds = [[decision.kind for decision in unpack_decisions(account.decisions)] for account in accounts]
    assert kinds == [["arrived", "sent", "server_ended"], ["arrived", "sent", "returned"]]
    facts = unpack_decisions(accounts[1].decisions)[1].facts
    assert facts == {"waited_s": 1.5, "num_admitted": 1, "num_waiting": 0}


class _Run:
    """A random course of events, told the truth by what the machine says."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = configured_backend(SchedulerConfig(), 3)
        self.now = 0.0
        self.at_server: set[Key] = set()
        self.probing = False
        self.told: Counter[Key] = Counter()
        self.aborted: set[Key] = set()
        self.submitted: list[Request] = []

    def step(self) -> None:
        self.now += self.rng.expovariate(2.0)
        self.apply(self._event())

    def apply(self, event: BackendEvent) -> None:
        if isinstance(event, OutputEnded | OutputFailed):
            self.at_server.discard(event.key)
        for each in handle(self.scheduler, event, self.now):
            match each:
                case SendRequest(request):
                    self.at_server.add((request.request_id, request.attempt))
                case CancelRequest(key):
                    self.at_server.remove(key)
                case AskServer():
                    self.probing = True
                case RequestEnded(finished):
                    self.told[finished.request_id, finished.attempt] += 1

    def _event(self) -> BackendEvent:
        rng, choice = self.rng, self.rng.random()
        if self.probing and choice < 0.2:
            self.probing = False
            return ProbeDone(rng.choice([None, None, DOWN, LIES]), 1000)
        if choice < 0.5:
            new = request(f"r{len(self.submitted)}")
            self.submitted.append(new)
            return RequestsArrived((new,))
        if choice < 0.55 and self.submitted:
            key = rng.choice(self.submitted).request_id, 0
            self.aborted.add(key)
            return RequestsAborted((key,))
        if self.at_server and choice < 0.9:
            key = rng.choice(sorted(self.at_server))
            events: list[BackendEvent] = [
                OutputGrew(key, 1),
                OutputEnded(key, STOPPED),
                OutputFailed(key, rng.choice([DOWN, LIES, UNFIT])),
            ]
            return rng.choices(events, (4, 3, 1))[0]
        return ProbeTick()


@pytest.mark.parametrize("seed", seeds(12, nightly=18))
def test_every_request_comes_to_exactly_one_end(seed: int) -> None:
    run = _Run(seed)
    for _ in range(300):
        run.step()
    while run.at_server:
        run.apply(OutputEnded(min(run.at_server), STOPPED))
    for each in run.submitted:
        key = each.request_id, each.attempt
        waits = key not in run.told and key not in run.aborted
        assert not waits, f"{key} is still somewhere"
        assert run.told[key] <= 1
    assert (run.scheduler.num_sent, run.scheduler.num_waiting) == (0, 0)


def test_integrity_sees_a_wrong_count() -> None:
    scheduler = up()
    arrive(scheduler, request("a"))
    scheduler._num_sent = 2
    with pytest.raises(IntegrityError, match="1 requests are sent"):
        scheduler.check_integrity()


def told(breaker: CircuitBreaker, event: BreakerEvent, now: float = 0.0) -> bool:
    changed = breaker.handle(event, now)
    breaker.check_integrity()
    return changed


def closed(rules: BreakerRules | None = None) -> CircuitBreaker:
    breaker = CircuitBreaker(rules)
    told(breaker, ProbeBegun())
    assert told(breaker, ProbePassed())
    return breaker


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = closed()
    assert told(breaker, Failed("it lies", trips=True), now)
    return breaker


def test_nothing_goes_to_a_server_that_has_not_been_asked() -> None:
    breaker = CircuitBreaker()
    assert (breaker.state, breaker.closed, breaker.reason) == (BreakerState.HALF_OPEN, False, "not asked yet")
    assert breaker.probe_at == 0, "it is asked at once"
    assert not told(breaker, ProbeBegun())
    assert told(breaker, ProbePassed(), 1.0)
    assert (breaker.state, breaker.reason, breaker.probe_at) == (BreakerState.CLOSED, "", 6.0)


def test_three_failures_in_a_row_open_it_however_many_successes_came_before() -> None:
    breaker = closed()
    for _ in range(1000):
        told(breaker, Succeeded())
        assert not told(breaker, Failed("now and then"))
        assert not told(breaker, Failed("twice"))
    told(breaker, Succeeded())
    assert [told(breaker, Failed("dead"), 2.0) for _ in range(3)] == [False, False, True]
    assert (breaker.state, breaker.reason, breaker.probe_at) == (BreakerState.OPEN, "dead", 3.0)


def test_what_is_long_ago_does_not_count() -> None:
    breaker = closed(BreakerRules(window_s=10.0))
    for _ in range(2):
        told(breaker, Failed("then"), 0.0)
    assert not told(breaker, Failed("now"), 10.1)
    assert not told(breaker, Failed("now"), 10.1)
    assert told(breaker, Failed("now"), 10.1)


@pytest.mark.parametrize("event", [Failed("another model", trips=True), ProbeFailed("another model", trips=True)])
def test_what_would_go_on_opens_it_at_once(event: BreakerEvent) -> None:
    breaker = closed()
    assert told(breaker, event, 4.0)
    assert (breaker.state, breaker.reason, breaker.probe_at) == (BreakerState.OPEN, "another model", 5.0)


def test_one_probe_decides() -> None:
    breaker = opened()
    assert told(breaker, ProbeBegun(), 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert told(breaker, ProbePassed(), 1.5)
    assert breaker.closed
    for _ in range(2):
        assert not told(breaker, Failed("anew"), 1.5), "what was before it opened is forgotten"


def test_each_pause_is_twice_as_long_until_a_request_succeeds() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(7):
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
        told(breaker, ProbeBegun(), now)
        assert told(breaker, ProbeFailed("still down"), now)
        assert (breaker.state, breaker.reason) == (BreakerState.OPEN, "still down")
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    told(breaker, ProbeBegun(), now)
    told(breaker, ProbePassed(), now)
    told(breaker, Failed("passes probes only", trips=True), now)
    assert breaker.probe_at == now + 30, "a probe alone does not make good"
    told(breaker, ProbePassed(), now)
    told(breaker, Succeeded(), now)
    told(breaker, Failed("again", trips=True), now)
    assert breaker.probe_at == now + 1


def test_while_it_is_closed_it_is_looked_after() -> None:
    breaker = closed()
    assert breaker.probe_at == 5.0
    told(breaker, ProbeBegun(), 5.0)
    assert breaker.closed
    assert not told(breaker, ProbeFailed("silent"), 5.1)
    assert breaker.probe_at == 6.1, "it is looked at again soon"
    assert not told(breaker, ProbeFailed("silent"), 6.2)
    assert told(breaker, ProbeFailed("silent"), 7.2), "an idle server's death is seen as well"


def test_what_still_comes_of_requests_does_not_touch_an_open_one() -> None:
    breaker = opened()
    before = breaker.probe_at
    assert not told(breaker, Succeeded(), 0.5)
    assert not told(breaker, Failed("late"), 0.6)
    assert (breaker.state, breaker.probe_at) == (BreakerState.OPEN, before)


def test_any_course_of_events_leaves_it_sound() -> None:
    rng = random.Random(3)
    for _ in range(80):
        breaker, now = CircuitBreaker(), 0.0
        for _ in range(100):
            now += rng.expovariate(1.0)
            kinds: list[BreakerEvent] = [
                Succeeded(),
                Failed("f"),
                Failed("t", trips=True),
                ProbeBegun(),
                ProbePassed(),
                ProbeFailed("p"),
            ]
            before = breaker.state
            changed = told(breaker, rng.choices(kinds, (5, 4, 1, 2, 2, 1))[0], now)
            assert changed == (breaker.state is not before)
            assert breaker.probe_at <= now + breaker.rules.max_pause_s, "it is never left alone for good"


def test_integrity_sees_failures_that_should_have_opened_it() -> None:
    breaker = closed()
    breaker._failed_at.extend([0.0] * 3)
    with pytest.raises(IntegrityError, match="the breaker is closed at 3 failures"):
        breaker.check_integrity()

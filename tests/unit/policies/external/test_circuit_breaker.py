"""When requests go to another server, and when one probe decides about it."""

from __future__ import annotations

import random

import pytest

from core.errors import IntegrityError
from policies.external.circuit_breaker import (
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


def handle(breaker: CircuitBreaker, event: BreakerEvent, now: float = 0.0) -> bool:
    changed = breaker.handle(event, now)
    breaker.check_integrity()
    return changed


def closed(rules: BreakerRules | None = None) -> CircuitBreaker:
    breaker = CircuitBreaker(rules)
    handle(breaker, ProbeBegun())
    assert handle(breaker, ProbePassed())
    return breaker


def opened(now: float = 0.0) -> CircuitBreaker:
    breaker = closed()
    assert handle(breaker, Failed("it lies", trips=True), now)
    return breaker


def test_nothing_goes_to_a_server_that_has_not_been_asked() -> None:
    breaker = CircuitBreaker()
    assert (breaker.state, breaker.closed, breaker.reason) == (BreakerState.HALF_OPEN, False, "not asked yet")
    assert breaker.probe_at == 0, "it is asked at once"
    assert not handle(breaker, ProbeBegun())
    assert handle(breaker, ProbePassed(), 1.0)
    assert (breaker.state, breaker.reason, breaker.probe_at) == (BreakerState.CLOSED, "", 6.0)


def test_three_failures_in_a_row_open_it() -> None:
    breaker = closed()
    assert not handle(breaker, Failed("slow"))
    assert not handle(breaker, Failed("slow"))
    assert handle(breaker, Failed("slow"), 2.0)
    assert (breaker.state, breaker.reason, breaker.probe_at) == (BreakerState.OPEN, "slow", 3.0)


def test_failures_with_successes_between_them_do_not() -> None:
    breaker = closed()
    for _ in range(20):
        handle(breaker, Succeeded())
        assert not handle(breaker, Failed("now and then"))
        assert not handle(breaker, Failed("twice"))


def test_a_sudden_death_is_seen_however_busy_the_server_was() -> None:
    breaker = closed()
    for _ in range(1000):
        handle(breaker, Succeeded())
    assert [handle(breaker, Failed("dead")) for _ in range(3)] == [False, False, True]


def test_what_is_long_ago_does_not_count() -> None:
    breaker = closed(BreakerRules(window_s=10.0))
    for _ in range(2):
        handle(breaker, Failed("then"), 0.0)
    assert not handle(breaker, Failed("now"), 10.1)
    assert not handle(breaker, Failed("now"), 10.1)
    assert handle(breaker, Failed("now"), 10.1)


@pytest.mark.parametrize("event", [Failed("another model", trips=True), ProbeFailed("another model", trips=True)])
def test_what_would_go_on_opens_it_at_once(event: BreakerEvent) -> None:
    breaker = closed()
    assert handle(breaker, event, 4.0)
    assert (breaker.state, breaker.reason, breaker.probe_at) == (BreakerState.OPEN, "another model", 5.0)


def test_one_probe_decides() -> None:
    breaker = opened()
    assert handle(breaker, ProbeBegun(), 1.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert handle(breaker, ProbePassed(), 1.5)
    assert breaker.closed
    for _ in range(2):
        assert not handle(breaker, Failed("anew"), 1.5), "what was before it opened is forgotten"


def test_each_pause_is_twice_as_long_until_a_request_succeeds() -> None:
    breaker, now, pauses = opened(), 0.0, []
    for _ in range(7):
        pauses.append(breaker.probe_at - now)
        now = breaker.probe_at
        handle(breaker, ProbeBegun(), now)
        assert handle(breaker, ProbeFailed("still down"), now)
        assert (breaker.state, breaker.reason) == (BreakerState.OPEN, "still down")
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    handle(breaker, ProbeBegun(), now)
    handle(breaker, ProbePassed(), now)
    handle(breaker, Failed("passes probes only", trips=True), now)
    assert breaker.probe_at == now + 30, "a probe alone does not make good"
    handle(breaker, ProbePassed(), now)
    handle(breaker, Succeeded(), now)
    handle(breaker, Failed("again", trips=True), now)
    assert breaker.probe_at == now + 1


def test_while_it_is_closed_it_is_looked_after() -> None:
    breaker = closed()
    assert breaker.probe_at == 5.0
    handle(breaker, ProbeBegun(), 5.0)
    assert breaker.closed
    assert not handle(breaker, ProbeFailed("silent"), 5.1)
    assert breaker.probe_at == 6.1, "it is looked at again soon"
    assert not handle(breaker, ProbeFailed("silent"), 6.2)
    assert handle(breaker, ProbeFailed("silent"), 7.2), "an idle server's death is seen as well"


def test_what_still_comes_of_requests_does_not_touch_an_open_one() -> None:
    breaker = opened()
    before = breaker.probe_at
    assert not handle(breaker, Succeeded(), 0.5)
    assert not handle(breaker, Failed("late"), 0.6)
    assert (breaker.state, breaker.probe_at) == (BreakerState.OPEN, before)


def test_any_course_of_events_leaves_it_sound() -> None:
    rng = random.Random(3)
    for _ in range(200):
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
            changed = handle(breaker, rng.choices(kinds, (5, 4, 1, 2, 2, 1))[0], now)
            assert changed == (breaker.state is not before)
            assert breaker.probe_at <= now + breaker.rules.max_pause_s, "it is never left alone for good"


def test_integrity_sees_failures_that_should_have_opened_it() -> None:
    breaker = closed()
    breaker._failed_at.extend([0.0] * 3)
    with pytest.raises(IntegrityError, match="the breaker is closed at 3 failures"):
        breaker.check_integrity()

"""What ``test_ledger_network`` does not tell of open requests: announcements, forecasts, what cannot be resumed, and
what thousands of leaving clients cost, counted and not timed."""

from __future__ import annotations

import pytest

from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.key_sums import NUM_PARTS, KeySums
from farsight.core.messages.requests import AnnounceReply, OpenRequest, Placed, SubmitReply
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request, SamplingParams
from farsight.services.ingress.ledger import ABORT_AGAIN_S, MAX_ATTEMPTS, OpenStream, RequestLedger
from tests.opcodes import num_opcodes


def stream(name: str = "r") -> OpenStream:
    return OpenStream(Request(name, 0, "i", (1,) * 4, SamplingParams(6)))


def delta(name: str, start: int, *tokens: int, attempt: int = 0, finish: str | None = None) -> TokenDelta:
    return TokenDelta(name, attempt, start, tokens, "x" * len(tokens), finish, "broken" if finish == "error" else None)


def placed(name: str, replica: str = "a") -> SubmitReply:
    return SubmitReply((Placed(name, 0, replica, "w1"),), ())


def running(*names: str, replica: str = "a") -> RequestLedger:
    """A ledger whose requests have been sent and placed."""
    ledger = RequestLedger("i")
    for name in names:
        ledger.open(stream(name))
    ledger.take_outgoing()
    for name in names:
        ledger.submitted(placed(name, replica))
    return ledger


def announced(ledger: RequestLedger) -> tuple[OpenRequest, ...]:
    """All open streams, as the ledger lists them for a Router that asks for all."""
    ledger.announced(AnnounceReply((), (), (), asked=tuple(range(NUM_PARTS))))
    assert ledger.is_asked
    streams = ledger.announce().open
    assert not ledger.is_asked
    return streams


def receive(ledger: RequestLedger, *deltas: TokenDelta, now: float = 0.0) -> list[TokenDelta]:
    return ledger.receive("a", "w1", deltas, now)


def taken(ledger: RequestLedger) -> list[Request]:
    """What goes out; aborts are not expected."""
    requests, aborts = ledger.take_outgoing()
    assert aborts == ()
    return list(requests)


def attempts(ledger: RequestLedger) -> list[tuple[str, int]]:
    return [(each.request_id, each.attempt) for each in taken(ledger)]


@pytest.mark.parametrize("finish", ["stop", "length", "error"])
def test_no_replica_is_told_to_abort_what_has_ended(finish: str) -> None:
    ledger = running("r")
    last = delta("r", 0, 7, finish=finish)
    assert receive(ledger, last, last) == [last]
    assert not ledger.has_outgoing


def test_an_attempt_that_goes_on_is_aborted_at_most_once_a_second() -> None:
    ledger = RequestLedger("i")
    aborted_at = []
    for now in (0.0, 0.4, 0.99, 1.0, 1.5, 2.5):
        assert receive(ledger, delta("gone", 0, 7), now=now) == []
        if ledger.take_outgoing()[1]:
            aborted_at.append(now)
    assert aborted_at == [0.0, 1.0, 2.5]
    receive(ledger, delta("other", 0, 7, attempt=5), now=2.6)
    assert ledger.take_outgoing() == ((), (("other", 5),)), "another attempt has a clock of its own"


def test_aborts_of_long_ago_are_not_kept() -> None:
    ledger = RequestLedger("i")
    for i in range(5000):
        receive(ledger, delta(f"gone{i}", 0, 7), now=i * 0.1)
        ledger.take_outgoing()
    assert len(ledger._aborted_at) <= 1025


def test_a_request_that_has_lost_too_many_workers_is_given_up() -> None:
    ledger = running("r", "s")
    for attempt in range(MAX_ATTEMPTS):
        assert ledger.take_given_up() == []
        receive(ledger, delta("r", 0, attempt=attempt, finish="abort"))
        taken(ledger)
    assert [(each.request_id, each.attempts) for each in ledger.take_given_up()] == [("r", MAX_ATTEMPTS)]
    assert ledger.take_given_up() == [], "said once"
    assert len(ledger) == 1


def test_an_announcement_tells_where_an_attempt_is_and_how_much_is_left_of_it() -> None:
    ledger = running("r")
    assert receive(ledger, delta("r", 0, 7, 8))
    assert announced(ledger) == (OpenRequest("r", 0, "a", "w1", 10),)
    assert ledger.replica_of("r") == "a" and ledger.replica_of("s") is None
    ledger.worker_lost("a")
    assert ledger.replica_of("r") == "", "it goes elsewhere"
    assert attempts(ledger) == [("r", 1)]
    assert announced(ledger) == (OpenRequest("r", 1, "", "", 8),), "prompt, and the rest of the output"
    told = ledger.announce()
    assert (told.listed, told.open) == ((), ()), "streams are listed once they are asked for"


def test_a_forecast_goes_out_with_its_request_or_after_it() -> None:
    forecast = Forecast(5.0, (5.0,) * len(QUANTILES), 1, "test", 1)
    ledger = RequestLedger("i")
    early, late = stream("early"), stream("late")
    ledger.open(early)
    assert ledger.foresee(early, forecast) is None
    assert [each.forecast for each in taken(ledger)] == [forecast]

    ledger.open(late)
    ledger.take_outgoing()
    ledger.submitted(placed("late"))
    assert ledger.foresee(late, forecast) == 0
    ledger.worker_lost("a")
    assert ledger.foresee(late, forecast) is None
    assert [(each.attempt, each.forecast) for each in taken(ledger)] == [(1, forecast)]
    ledger.close("late", 0.0)
    assert ledger.foresee(late, forecast) is None


def unnamed(name: str, start: int, count: int, finish: str | None = None) -> TokenDelta:
    """Output of another server, whose tokens have no names."""
    return TokenDelta(name, 0, start, (), "x" * count, finish, num_unnamed=count)


def test_after_tokens_without_ids_nobody_can_go_on() -> None:
    ledger = running("r", "s", replica="backend-0")
    ledger.receive("backend-0", "w1", [unnamed("r", 0, 2)], 0.0)
    ledger.worker_lost("backend-0")
    assert attempts(ledger) == [("s", 1)]
    (given_up,) = ledger.take_given_up()
    assert (given_up.request_id, given_up.attempts) == ("r", 1)
    assert given_up.reason == "backend-0, another server, was lost 2 tokens into it"


def test_a_router_that_dies_late_costs_a_stream_without_ids_nothing() -> None:
    ledger = running("r")
    first, then, last = unnamed("r", 0, 2), unnamed("r", 2, 1), unnamed("r", 3, 1, finish="stop")
    assert receive(ledger, first) == [first]
    ledger.submit_failed([stream("r").request])
    assert taken(ledger) == []
    assert receive(ledger, then, last) == [then, last]
    assert len(ledger) == 0


def leave(num: int) -> tuple[RequestLedger, int]:
    """So many leave at one instant; what it took."""
    ledger = RequestLedger("i")
    for index in range(num):
        ledger.open(stream(f"r{index}"))
    ledger.take_outgoing()

    def close_all() -> None:
        for index in range(num):
            ledger.close(f"r{index}", 5.0)

    return ledger, num_opcodes(close_all)


def test_a_mass_disconnect_costs_each_leaving_client_the_same() -> None:
    _, few = leave(500)
    ledger, many = leave(3000)
    assert many / 3000 <= 1.1 * few / 500
    assert len(ledger.take_outgoing()[1]) == 3000


def test_those_who_leave_later_pay_for_forgetting_each_abort_once() -> None:
    ledger, _ = leave(2000)
    costs = []
    for name in ("late", "later"):
        ledger.open(stream(name))
        ledger.take_outgoing()
        costs.append(num_opcodes(lambda name=name: ledger.close(name, 5.0 + ABORT_AGAIN_S)))  # type: ignore[misc]
    assert costs[0] <= 2000 * 40
    assert costs[1] <= 400


def test_an_announcement_costs_the_same_at_a_hundred_requests_and_at_ten_thousand() -> None:
    few, many = (running(*map(str, range(count))) for count in (100, 10_000))
    assert num_opcodes(few.announce) == num_opcodes(many.announce)
    assert len(many.announce().sums) == 8 * NUM_PARTS
    kept = KeySums()
    for number in range(10_000):
        kept.put(str(number), 0)
    assert many.announce().sums == kept.packed()

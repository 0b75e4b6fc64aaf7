"""The open requests of an ingress replica, one event at a time."""

from __future__ import annotations

import dataclasses

import pytest

from core.forecast import QUANTILES, Forecast
from core.messages.requests import AnnounceReply, OpenRequest, Placed, SubmitReply
from core.messages.tokens import DeltaLogprobs, TokenDelta
from services.ingress.ledger import MAX_ATTEMPTS, RequestLedger
from tests.unit.services.ingress.ledger_messages import (
    delta,
    lost,
    placed,
    receive,
    refusal,
    request,
    running,
    stream,
    taken,
)


def replica(ledger: RequestLedger, name: str) -> str:
    """Where the announcement says that a request runs."""
    return next(each.replica for each in ledger.announce().open if each.request_id == name)


def test_a_request_goes_out_once() -> None:
    ledger = RequestLedger("i")
    assert not ledger.has_outgoing
    ledger.open(stream("r"))
    ledger.open(stream("s"))
    assert (len(ledger), ledger.has_outgoing) == (2, True)
    assert ledger.take_outgoing() == ((request("r"), request("s")), ())
    assert not ledger.has_outgoing
    assert ledger.take_outgoing() == ((), ())


def test_tokens_in_order_reach_the_client_and_the_last_closes_the_request() -> None:
    ledger = running("r")
    first, last = delta("r", 0, 7, 8), delta("r", 2, 9, finish="stop")
    assert receive(ledger, first) == [first]
    assert receive(ledger, last) == [last]
    assert len(ledger) == 0
    assert (ledger.has_outgoing, ledger.num_resumed) == (False, 0)


@pytest.mark.parametrize("finish", ["stop", "length", "error"])
def test_an_end_is_told_once(finish: str) -> None:
    ledger = running("r")
    last = delta("r", 0, 7, finish=finish)
    assert receive(ledger, last, last) == [last]
    assert receive(ledger, last) == []
    assert not ledger.has_outgoing, "no replica is told to abort what has ended"


def test_where_a_request_runs_is_known_from_the_answer_or_from_its_first_tokens() -> None:
    ledger = RequestLedger("i")
    ledger.open(stream("r"))
    ledger.open(stream("s"))
    ledger.take_outgoing()
    assert replica(ledger, "r") == ""
    ledger.submitted(placed("r", replica="b"))
    receive(ledger, delta("s", 0, 1))
    assert (replica(ledger, "r"), replica(ledger, "s")) == ("b", "a")


def test_tokens_may_come_from_where_an_open_request_runs() -> None:
    ledger = running("r", replica="b")
    assert (ledger.runs_on("b"), ledger.runs_on("a")) == (True, False)
    ledger.worker_lost("b")
    assert not ledger.runs_on("b")
    taken(ledger)
    ledger.submitted(placed("r", 1, replica="a"))
    assert ledger.runs_on("a")
    ledger.close("r", 0.0)
    assert not ledger.runs_on("a")


def test_an_answer_that_it_waits_does_not_undo_what_tokens_have_told() -> None:
    ledger = running("r")
    ledger.submitted(placed("r", replica="", incarnation=""))
    assert replica(ledger, "r") == "a"


def test_where_a_request_runs_that_waited_is_known_from_the_answer_to_an_announcement() -> None:
    ledger = RequestLedger("i")
    ledger.open(stream("r"))
    ledger.take_outgoing()
    ledger.submitted(placed("r", replica="", incarnation=""))
    ledger.announced(AnnounceReply((), (), ("b",), (Placed("r", 0, "b", "w2"), Placed("r", 1, "c", "w3"))))
    assert replica(ledger, "r") == "b"
    ledger.worker_lost("b")
    assert [each.attempt for each in ledger.take_outgoing()[0]] == [1]


def test_an_answer_about_an_older_attempt_is_ignored() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    ledger.submitted(placed("r", 0, replica="old"))
    assert not ledger.runs_on("old")
    assert taken(ledger) == [("r", 1, ())]
    ledger.submitted(placed("r", 0, replica="old"))
    assert replica(ledger, "r") == ""


def test_a_router_that_died_with_requests_in_its_hands_gets_them_again_under_a_higher_attempt() -> None:
    ledger = RequestLedger("i")
    ledger.open(stream("r"))
    requests, _ = ledger.take_outgoing()
    ledger.submit_failed(requests)
    assert taken(ledger) == [("r", 1, ())]
    assert ledger.num_resumed == 1


def test_a_submission_that_failed_after_all_of_it_was_answered_changes_nothing() -> None:
    ledger = running("r", "s", "t")
    ledger.worker_lost("a")
    taken(ledger)
    receive(ledger, delta("s", 0, 7, attempt=1, finish="stop"))
    ledger.close("t", 0.0)
    ledger.take_outgoing()
    ledger.submit_failed([request("r"), request("s"), request("t")])
    assert not ledger.has_outgoing


def test_what_ran_on_a_lost_worker_is_resumed_where_the_tokens_of_its_client_end() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7, 8))
    ledger.worker_lost("a")
    assert taken(ledger) == [("r", 1, (7, 8))]
    assert replica(ledger, "r") == ""
    rest = delta("r", 2, 9, attempt=1)
    assert ledger.receive("b", "w2", [rest], 0.0) == [rest]
    ledger.worker_lost("b")
    assert taken(ledger) == [("r", 2, (7, 8, 9))]


def test_log_probabilities_have_neither_gap_nor_repeat_after_a_loss() -> None:
    """They come with their tokens: what is dropped is dropped with them."""

    def logged(start: int, attempt: int) -> TokenDelta:
        prompt = (((1,), (-0.5,)),) if start == 0 else ()
        told = DeltaLogprobs((((start,), (-float(start),)),), prompt)
        return dataclasses.replace(delta("r", start, start, attempt=attempt), logprobs=told)

    ledger = running("r")
    shown = receive(ledger, logged(0, 0), logged(1, 0))
    ledger.worker_lost("a")
    assert taken(ledger) == [("r", 1, (0, 1))]
    ledger.submitted(placed("r", 1))
    shown += receive(ledger, logged(2, 0), logged(2, 1), logged(3, 1))
    found = [each.logprobs for each in shown if each.logprobs is not None]
    assert [each.output[0][0] for each in found] == [(0,), (1,), (2,), (3,)]
    assert [len(each.prompt) for each in found] == [1, 0, 0, 0]


def test_a_lost_worker_takes_nothing_that_runs_elsewhere_or_waits() -> None:
    ledger = running("r", replica="b")
    ledger.open(stream("s"))
    ledger.take_outgoing()
    ledger.worker_lost("a")
    assert not ledger.has_outgoing


def test_a_worker_lost_twice_before_the_request_goes_out_is_one_attempt() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    ledger.worker_lost("a")
    assert taken(ledger) == [("r", 1, ())]


def test_a_resumed_request_keeps_prompt_sampling_and_bound() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7))
    ledger.worker_lost("a")
    (resumed,), _ = ledger.take_outgoing()
    original = request("r")
    assert (resumed.prompt_ids, resumed.sampling, resumed.ingress_id) == (original.prompt_ids, original.sampling, "i")
    assert resumed.max_total_len == original.max_total_len


@pytest.mark.parametrize("start", [0, 1, 3, 9], ids=["repeat", "overlap", "gap", "wide gap"])
def test_a_gap_or_a_repeat_is_not_shown_and_resumes(start: int) -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7, 8))
    assert receive(ledger, delta("r", start, 9)) == []
    assert taken(ledger) == [("r", 1, (7, 8))]


def test_after_a_gap_nothing_more_of_that_attempt_is_shown() -> None:
    ledger = running("r")
    assert receive(ledger, delta("r", 1, 8), delta("r", 0, 7), delta("r", 1, 8, finish="length")) == []
    requests, aborts = ledger.take_outgoing()
    assert [(each.attempt, each.output_ids) for each in requests] == [(1, ())]
    assert aborts == (("r", 0),), "it still runs: the client's request is the new attempt"


def test_an_end_after_a_gap_is_no_end() -> None:
    ledger = running("r")
    assert receive(ledger, delta("r", 4, 9, finish="stop")) == []
    assert taken(ledger) == [("r", 1, ())]


def test_tokens_of_an_older_attempt_are_dropped_and_it_is_aborted() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    taken(ledger)
    assert receive(ledger, delta("r", 0, 7)) == []
    assert ledger.take_outgoing() == ((), (("r", 0),))
    good = delta("r", 0, 7, attempt=1)
    assert receive(ledger, good) == [good]


def test_tokens_of_an_unknown_request_are_dropped_and_it_is_aborted() -> None:
    ledger = RequestLedger("i")
    assert receive(ledger, delta("gone", 3, 7, attempt=5)) == []
    assert ledger.take_outgoing() == ((), (("gone", 5),))


def test_the_end_of_an_older_attempt_needs_no_abort() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    taken(ledger)
    assert receive(ledger, delta("r", 0, 7, finish="length")) == []
    assert not ledger.has_outgoing
    assert len(ledger) == 1


def test_an_attempt_that_goes_on_is_aborted_at_most_once_a_second() -> None:
    ledger = RequestLedger("i")
    aborted_at = []
    for now in (0.0, 0.4, 0.99, 1.0, 1.5, 2.5):
        receive(ledger, delta("gone", 0, 7), now=now)
        if ledger.take_outgoing()[1]:
            aborted_at.append(now)
    assert aborted_at == [0.0, 1.0, 2.5]
    receive(ledger, delta("other", 0, 7), now=2.6)
    assert ledger.take_outgoing()[1] == (("other", 0),), "another attempt has a clock of its own"


def test_aborts_of_long_ago_are_not_kept() -> None:
    ledger = RequestLedger("i")
    for i in range(5000):
        receive(ledger, delta(f"gone{i}", 0, 7), now=i * 0.1)
        ledger.take_outgoing()
    assert len(ledger._aborted_at) <= 1025


def test_an_abort_nobody_asked_for_resumes() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7))
    assert receive(ledger, delta("r", 1, finish="abort")) == []
    assert taken(ledger) == [("r", 1, (7,))]


def test_a_request_that_has_lost_too_many_workers_is_given_up() -> None:
    ledger = running("r", "s")
    for attempt in range(MAX_ATTEMPTS):
        assert ledger.take_given_up() == []
        receive(ledger, delta("r", 0, attempt=attempt, finish="abort"))
        taken(ledger)
    assert [(each.request_id, each.attempts) for each in ledger.take_given_up()] == [("r", MAX_ATTEMPTS)]
    assert ledger.take_given_up() == [], "said once"
    assert len(ledger) == 1


def test_a_refusal_ends_its_request() -> None:
    ledger = running("r", "s")
    assert ledger.submitted(SubmitReply((), (refusal("r"),))) == [refusal("r")]
    assert len(ledger) == 1
    assert ledger.submitted(SubmitReply((), (refusal("r"),))) == []
    assert ledger.announced(AnnounceReply((), (refusal("s"),), ())) == [refusal("s")]
    assert len(ledger) == 0
    assert not ledger.has_outgoing, "no replica runs it: nothing to abort"


def test_a_refusal_said_twice_in_one_answer_is_one() -> None:
    ledger = running("r")
    assert ledger.announced(AnnounceReply((), (refusal("r"), refusal("r")), ())) == [refusal("r")]


def test_a_refusal_of_an_older_attempt_or_of_a_closed_request_is_ignored() -> None:
    ledger = running("r")
    ledger.worker_lost("a")
    assert ledger.submitted(SubmitReply((), (refusal("r", 0), refusal("unknown")))) == []
    assert taken(ledger) == [("r", 1, ())]


def test_a_request_closed_before_it_went_out_is_nobodys_business() -> None:
    ledger = RequestLedger("i")
    ledger.open(stream("r"))
    ledger.close("r", 0.0)
    assert (len(ledger), ledger.has_outgoing) == (0, False)


def test_a_request_closed_after_it_went_out_is_aborted() -> None:
    ledger = running("r")
    ledger.close("r", 0.0)
    assert ledger.has_outgoing
    assert ledger.take_outgoing() == ((), (("r", 0),))
    assert receive(ledger, delta("r", 0, 7), now=0.5) == []
    assert not ledger.has_outgoing, "the abort is on its way"


def test_closing_what_has_ended_or_was_never_there_does_nothing() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7, finish="stop"))
    ledger.close("r", 0.0)
    ledger.close("unknown", 0.0)
    assert not ledger.has_outgoing


def test_a_request_closed_between_two_attempts_is_aborted_once_the_old_one_is_heard() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 5, 7))  # a gap: the attempt is replaced, and may well run on
    ledger.close("r", 0.0)
    assert ledger.take_outgoing() == ((), ())
    receive(ledger, delta("r", 6, 8))
    assert ledger.take_outgoing() == ((), (("r", 0),))


def test_an_announcement_holds_what_was_sent_and_is_open() -> None:
    ledger = running("r", "s", "t")
    receive(ledger, delta("r", 0, 7, 8), delta("s", 0, 7, finish="stop"))
    ledger.close("t", 0.0)
    ledger.open(stream("new"))
    announcement = ledger.announce()
    assert announcement.ingress_id == "i"
    assert announcement.open == (OpenRequest("r", 0, "a", "w1", 10),)


def test_an_announcement_leaves_out_an_attempt_that_has_not_been_sent() -> None:
    ledger = running("r")
    receive(ledger, delta("r", 0, 7, 8))
    ledger.worker_lost("a")
    assert ledger.announce().open == ()
    taken(ledger)
    assert ledger.announce().open == (OpenRequest("r", 1, "", "", 8),), "prompt, and the rest of the output"


def test_what_nobody_runs_is_resumed_once() -> None:
    ledger = running("r", "s")
    receive(ledger, delta("r", 0, 7))
    assert ledger.announced(lost(("r", 0), ("r", 0), ("s", 3), ("unknown", 0))) == []
    assert taken(ledger) == [("r", 1, (7,))]
    ledger.announced(lost(("r", 0)))
    assert not ledger.has_outgoing, "that was the attempt before"


def test_a_late_loss_before_the_new_attempt_goes_out_changes_nothing() -> None:
    ledger = running("r")
    ledger.announced(lost(("r", 0)))
    ledger.announced(lost(("r", 0), ("r", 1)))
    assert taken(ledger) == [("r", 1, ())]


# An adversarial network --------------------------------------------------------------------------------------------


def test_a_forecast_goes_out_with_its_request_or_after_it() -> None:
    forecast = Forecast(5.0, (5.0,) * len(QUANTILES), 1, "test", 1)
    ledger = RequestLedger("i")
    early, late = stream("early"), stream("late")
    ledger.open(early)
    assert ledger.foresee(early, forecast) is None
    (sent,), _ = ledger.take_outgoing()
    assert sent.forecast == forecast

    ledger.open(late)
    ledger.take_outgoing()
    ledger.submitted(placed("late"))
    assert ledger.foresee(late, forecast) == 0
    ledger.worker_lost("a")
    assert ledger.foresee(late, forecast) is None
    (again,), _ = ledger.take_outgoing()
    assert (again.attempt, again.forecast) == (1, forecast)
    ledger.close("late", 0.0)
    assert ledger.foresee(late, forecast) is None


def unnamed(name: str, start: int, count: int, attempt: int = 0, finish: str | None = None) -> TokenDelta:
    """Output of another server, whose tokens have no names."""
    return TokenDelta(name, attempt, start, (), "x" * count, finish, num_unnamed=count)


def test_tokens_without_ids_reach_the_client_and_count() -> None:
    ledger = running("r")
    deltas = [unnamed("r", 0, 2), unnamed("r", 2, 1), unnamed("r", 3, 1, finish="stop")]
    assert receive(ledger, *deltas) == deltas
    assert len(ledger) == 0


def test_where_an_open_request_is() -> None:
    ledger = running("r")
    assert (ledger.replica_of("r"), ledger.replica_of("s")) == ("a", None)
    receive(ledger, delta("r", 0, finish="abort"))
    assert ledger.replica_of("r") == "", "it goes elsewhere"
    ledger.close("r", 0.0)
    assert ledger.replica_of("r") is None


def test_what_another_server_gave_back_goes_elsewhere() -> None:
    ledger = running("r")
    assert receive(ledger, delta("r", 0, finish="abort")) == []
    assert taken(ledger) == [("r", 1, ())]


def test_after_tokens_without_ids_nobody_can_go_on() -> None:
    ledger = running("r", "s", replica="backend-0")
    ledger.receive("backend-0", "w1", [unnamed("r", 0, 2)], 0.0)
    ledger.worker_lost("backend-0")
    assert taken(ledger) == [("s", 1, ())]
    (given_up,) = ledger.take_given_up()
    assert (given_up.request_id, given_up.attempts) == ("r", 1)
    assert given_up.reason == "backend-0, another server, was lost 2 tokens into it"


def test_a_router_that_dies_late_costs_a_stream_without_ids_nothing() -> None:
    ledger = running("r")
    receive(ledger, unnamed("r", 0, 2))
    ledger.submit_failed([request("r")])
    assert taken(ledger) == []
    assert receive(ledger, unnamed("r", 2, 1)) == [unnamed("r", 2, 1)]

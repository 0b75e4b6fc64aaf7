"""What is refused before it waits, and when a refused request would be admitted if no others came."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from farsight.core.config.server import ServerConfig
from farsight.core.costs import StepCost
from farsight.core.messages.requests import AnnounceReply, Demand, IngressLoad, LoadSnapshot, total_load
from farsight.core.request import Request, SamplingParams, Slo
from farsight.policies.fleet.queue_delay import ended_after_s, queue_delay_s
from farsight.services.ingress.first_check import RETRY_AFTER_S, CountedRequest, FirstCheck, TooMuch

COST = StepCost(0.010, 0.0, 0.0, 0.0)
PLACES, REPLICAS, OUTPUT_LEN = 4, 2, 100
OFF = ServerConfig(max_queued_requests=10**9, max_queued_tokens=10**9, max_wait_s=0.0)


LIMITED = dataclasses.replace(OFF, max_wait_s=3.0)


def request(prompt_len: int = 10) -> Request:
    return Request("", 0, "", (1,) * prompt_len, SamplingParams(OUTPUT_LEN))


def outlook(num: int) -> LoadSnapshot:
    """So many requests on two replicas with four places each; a batch of four takes a second."""
    demand = Demand(num, max(0, num - PLACES * REPLICAS), min(num, REPLICAS), 10.0 * num, 0.0, float(OUTPUT_LEN * num))
    return LoadSnapshot(demand, REPLICAS, PLACES, 10**6, joins=True, cost=COST)


def reply(seen: LoadSnapshot | None = None, **others: tuple[int, int]) -> AnnounceReply:
    by_key = tuple((key.strip("_"), *counts) for key, counts in others.items())
    return AnnounceReply((), (), (), (), IngressLoad(by_key), seen)


def refused(check: FirstCheck, each: Request, key: str = "") -> TooMuch:
    before = check.load(), check._outlook
    with pytest.raises(TooMuch) as error:
        check.admit(each, key)
    assert (check.load(), check._outlook) == before
    return error.value


def test_requests_count_wherever_they_came_in() -> None:
    check = FirstCheck(dataclasses.replace(OFF, max_queued_requests=5))
    check.heard(reply(_=(2, 20), a=(1, 10)))
    check.admit(request())
    b = check.admit(request(), "b")
    error = refused(check, request())
    assert (error.bound, error.retry_after_s) == ("max_num_queued_reqs", RETRY_AFTER_S)
    assert str(error) == "too many requests in flight: 5, limit 5; retry in 1 s"
    check.leave(b)
    check.admit(request())
    check.heard(reply())
    check.admit(request())


def test_places_are_free_as_long_as_no_request_of_any_ingress_replica_has_them() -> None:
    check = FirstCheck(OFF)
    assert check.free_places() == 0, "the Router has not spoken"
    check.heard(reply(outlook(0)))
    assert check.free_places() == REPLICAS * PLACES
    mine = check.admit(request())
    check.heard(reply(outlook(4), _=(2, 20), a=(1, 10)))
    assert check.free_places() == REPLICAS * PLACES - 4
    check.leave(mine)
    assert check.free_places() == REPLICAS * PLACES - 3
    check.heard(reply(outlook(REPLICAS * PLACES + 1)))
    assert check.free_places() == 0, "one waits"


def test_prompt_tokens_count_but_one_request_alone_may_have_any_number() -> None:
    check = FirstCheck(dataclasses.replace(OFF, max_queued_tokens=100))
    alone = check.admit(request(500))
    assert str(refused(check, request(1))) == "too many prompt tokens in flight: 500, limit 100; retry in 1 s"
    check.leave(alone)
    check.heard(reply(_=(1, 95)))
    assert refused(check, request(6)).bound == "max_num_queued_tokens"
    check.admit(request(5))


def test_other_limits_hold_for_the_next_request() -> None:
    check = FirstCheck(dataclasses.replace(OFF, max_queued_requests=1))
    check.admit(request())
    refused(check, request())
    check.limits = dataclasses.replace(OFF, max_queued_requests=2)
    check.admit(request())
    assert str(refused(check, request())).startswith("too many requests in flight: 2, limit 2")


def test_a_key_has_its_own_share() -> None:
    check = FirstCheck(dataclasses.replace(OFF, max_queued_requests_per_key=2, max_queued_tokens_per_key=50))
    check.heard(reply(_=(9, 900), a=(1, 10)))
    check.admit(request(), "a")
    assert str(refused(check, request(), "a")) == "too many requests of your tenant in flight: 2, limit 2; retry in 1 s"
    check.admit(request(40), "b")
    assert (
        str(refused(check, request(11), "b"))
        == "too many prompt tokens of your tenant in flight: 40, limit 50; retry in 1 s"
    )
    for _ in range(5):
        check.admit(request(900))  # no key, no share
    assert set(check.load().by_key) == {("a", 1, 10), ("b", 1, 40), ("", 5, 4500)}


def test_what_would_wait_too_long_is_refused_also_by_what_was_admitted_since() -> None:
    check = FirstCheck(LIMITED)
    check.placed(check.admit(request()))  # nothing is known of the load
    check.announcing()
    admitted, error = admit_all(check)
    assert (error.bound, error.retry_after_s) == ("max_wait", 0.125), "when the next one ends"
    delays = [queue_delay_s(outlook(num), REPLICAS) or 0.0 for num in (admitted - 1, admitted)]
    assert delays[0] <= 3.0 < delays[1]
    check.announcing()
    check.heard(reply(outlook(admitted - 1)))
    check.admit(request())
    off = FirstCheck(OFF)
    off.heard(reply(outlook(10**6)))
    off.admit(request())


def test_what_the_router_does_not_know_yet_counts_beside_the_load_that_it_tells() -> None:
    """Its answer holds neither what came after the question, nor what had not reached it."""
    check = FirstCheck(LIMITED)
    placed, on_its_way = check.admit(request()), check.admit(request())
    check.placed(placed)
    check.announcing()
    later = check.admit(request())
    check.placed(later)
    check.heard(reply(outlook(50)))
    seen = check._outlook
    assert seen is not None and seen.demand.num_requests == 52
    check.placed(on_its_way)
    check.announcing()
    check.leave(later)
    check.heard(reply(outlook(51)))
    assert check._outlook == outlook(51)


def test_a_refusal_before_the_request_is_read_is_the_one_that_it_would_get() -> None:
    told: list[str] = []
    check = FirstCheck(dataclasses.replace(OFF, max_wait_s=3.0, max_queued_requests=100), told.append)
    assert check.refusal() is None
    check.heard(reply(outlook(50), _=(50, 500)))
    early, late = check.refusal(), refused(check, request())
    assert early is not None and (early.bound, str(early)) == (late.bound, str(late))
    assert told == ["max_wait"], "a look is not counted"
    assert check.shed() is not None and told == ["max_wait", "max_wait"]
    check.heard(reply(outlook(1), _=(1, 10)))
    assert check.shed() is None
    assert check.refusal(num_ahead=49) is not None, "behind those that are not read yet"
    check.heard(reply(outlook(0), _=(100, 1000)))
    full = check.refusal()
    assert full is not None and full.bound == "max_num_queued_reqs"


def wait(check: FirstCheck, predicted_s: float, waited_s: float, times: int = 1) -> None:
    """Requests that were admitted with this prediction waited so long."""
    for _ in range(times):
        check.waited(CountedRequest(request(), "", predicted_s, check.correction * predicted_s), waited_s)


def admit_all(check: FirstCheck) -> tuple[int, TooMuch]:
    """How many are admitted until one is refused, and why it is."""
    check.heard(reply(outlook(0)))
    for number in itertools.count():
        try:
            check.placed(check.admit(request()))
        except TooMuch as error:
            return number, error
    raise AssertionError


def waiting(check: FirstCheck) -> int:
    """How many are admitted behind those that run."""
    return admit_all(check)[0] - PLACES * REPLICAS


def test_predictions_follow_the_waits_that_come() -> None:
    """A machine that is twice as slow as its steps say admits half as many behind those that run, and recovers."""
    check = FirstCheck(LIMITED)
    wait(check, 1.0, 2.0, 300)
    assert check.correction == pytest.approx(2.0)
    assert waiting(check) == pytest.approx(waiting(FirstCheck(LIMITED)) / 2, abs=1)
    wait(check, 1.0, 1.0, 300)
    assert check.correction == pytest.approx(1.0, abs=0.01)
    assert check.caution_s == 0.0, "shorter waits than expected cost nothing"
    wait(check, 1.0, 2.0, 300)
    assert 0.7 < check.caution_s <= 1.0, "the first of them came unexpected"


def test_a_prediction_that_errs_admits_less() -> None:
    """Waits that are right in the mean, of which one in 25 is half a second late: so much earlier requests are refused,
    that these wait no longer than the limit."""
    check = FirstCheck(LIMITED)
    for _ in range(120):
        wait(check, 1.0, 1.5)
        wait(check, 1.0, 1.0 - 0.5 / 24, 24)
    assert check.correction == pytest.approx(1.0, abs=0.02)
    assert check.caution_s == pytest.approx(0.5, abs=0.02)
    assert waiting(check) == pytest.approx(waiting(FirstCheck(LIMITED)) * 2.5 / 3.0, abs=1)
    wait(check, 1.0, 1.0, 2500)
    assert check.caution_s == pytest.approx(0.0, abs=0.01)
    rare = FirstCheck(LIMITED)
    for _ in range(15):
        wait(rare, 1.0, 3.0)
        wait(rare, 1.0, 1.0 - 2.0 / 199, 199)
    assert rare.caution_s < 0.1, "errors below the hundredth that may wait longer cost nothing"


@pytest.mark.parametrize("limit_s", [1.0, 3.0])
def test_a_limit_keeps_half_of_itself_for_errors_and_recovers_from_bad_waits(limit_s: float) -> None:
    """What the most careful prediction still admits is enough to learn from."""
    check = FirstCheck(dataclasses.replace(OFF, max_wait_s=limit_s))
    for _ in range(200):
        wait(check, 1.0, 0.0)
        wait(check, 1.0, 20.0)
    assert (check.correction, check.caution_s) == (4.0, limit_s / 2)
    wait(check, limit_s / 8, limit_s / 8, 2500)
    assert check.correction == pytest.approx(1.0, abs=0.05)
    assert check.caution_s == pytest.approx(0.0, abs=0.05)


def test_waits_that_say_nothing_change_nothing() -> None:
    check = FirstCheck(dataclasses.replace(OFF, max_wait_s=300.0))
    wait(check, 0.0, 100.0)
    wait(check, 0.19, 100.0)
    assert check.correction == 1.0
    wait(check, 1.0, 1e9)
    assert check.correction == 4.0
    fast = FirstCheck(OFF)
    wait(fast, 1.0, 0.0)
    assert fast.correction == 0.25
    fast.admit(request())
    assert fast.correction == 0.25, "nor does a request that is only admitted"


@pytest.mark.parametrize("num", [40, 100, 1000])
def test_after_retry_after_it_is_admitted_if_no_others_came(num: int) -> None:
    """Requests end as the cost of their steps says."""
    for limits in (LIMITED, dataclasses.replace(OFF, max_queued_requests=20)):
        check = FirstCheck(limits)
        check.heard(reply(outlook(num), _=(num, 10 * num)))
        wait_s = refused(check, request()).retry_after_s
        for part, admitted in ((0.9, False), (1.0, True)):
            left = num - int(part * wait_s / (ended_after_s(outlook(num), 1) or 0.0))
            check.heard(reply(outlook(left), _=(left, 10 * left)))
            if admitted:
                check.admit(request())
            else:
                refused(check, request())


def running(check: FirstCheck, output_len: int, num_tokens: int, *, ignore_eos: bool = True) -> CountedRequest:
    each = Request("", 0, "", (1,), SamplingParams(output_len, ignore_eos=ignore_eos))
    admitted = check.admit(each)
    check.waited(admitted, 0.1)
    check.progressed(admitted, num_tokens - 1, 0.02 * (num_tokens - 1))
    return admitted


def test_a_bound_on_requests_opens_when_those_that_run_come_to_their_ends() -> None:
    """Three of known lengths, 20 ms a token: the next has 10 tokens left, the second 40."""
    check = FirstCheck(dataclasses.replace(OFF, max_queued_requests=3))
    check.heard(reply(outlook(3)))
    first = running(check, 50, 40)
    for output_len, num_tokens in ((60, 20), (90, 5)):
        running(check, output_len, num_tokens)
    assert refused(check, request()).retry_after_s == pytest.approx(10 * 0.02)
    check.progressed(first, 10, 0.2)
    assert refused(check, request()).retry_after_s == pytest.approx(0.02), "it ends with the next token"
    check.leave(first)
    unknown = running(check, 100, 10, ignore_eos=False)
    mean_s = ended_after_s(outlook(3), 1)
    assert refused(check, request()).retry_after_s == pytest.approx(mean_s), "one may end at any token"
    unknown.output_len = 15
    assert refused(check, request()).retry_after_s == pytest.approx(5 * 0.02)
    check.heard(reply(outlook(6), _=(3, 30)))
    assert refused(check, request()).retry_after_s == pytest.approx(40 * 0.02), "half of the four that end are ours"


def test_where_nothing_is_measured_nothing_is_predicted() -> None:
    unknown = dataclasses.replace(outlook(50), cost=None)
    assert ended_after_s(unknown, 1) is None
    assert ended_after_s(outlook(0), 1) is None
    assert ended_after_s(dataclasses.replace(outlook(50), num_replicas=0), 1) is None
    check = FirstCheck(dataclasses.replace(OFF, max_wait_s=1.0))
    check.heard(reply(unknown))
    check.admit(request())


def test_loads_add_up_by_key() -> None:
    one, other = IngressLoad((("", 1, 10), ("a", 2, 20))), IngressLoad((("a", 3, 30), ("b", 4, 40)))
    assert set(total_load([one, other]).by_key) == {("", 1, 10), ("a", 5, 50), ("b", 4, 40)}
    assert total_load([]) == IngressLoad()


def test_a_request_that_cannot_be_in_time_is_refused_with_the_predicted_time() -> None:
    told: list[str] = []
    check = FirstCheck(OFF, told.append)
    wanted = dataclasses.replace(request(), slo=Slo(ttft_s=1e-3))
    check.admit(wanted)
    assert not told, "nothing is known yet"
    check.heard(reply(outlook(0)))
    error = refused(check, wanted)
    assert told == ["deadline"] and error.retry_after_s >= 1.0
    assert "predicted time to the first token" in str(error) and "slo.ttft is 0.001 s" in str(error)
    check.admit(request())
    check.admit(dataclasses.replace(request(), slo=Slo(ttft_s=60.0), deadline_s=600.0))

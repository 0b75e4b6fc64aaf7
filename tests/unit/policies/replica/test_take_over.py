"""A worker that is taken over: what it holds is adopted, what it ended is known, another life begins again."""

from __future__ import annotations

import pytest

from core.messages.plans import WorkerReady
from policies.replica.events import (
    RequestsAborted,
    WorkerConnected,
    WorkerLost,
)
from tests.unit.policies.replica.scheduler_harness import (
    LEASE,
    Harness,
    ids,
    names,
    request,
    running,
    shipped,
    state,
    waiting,
)


def test_what_a_worker_holds_is_adopted_and_not_shipped_again() -> None:
    h = Harness(worker=state((request("a"), running("a", 2, 2)), (request("b"), waiting("b"))))
    h.arrive(request("c"))
    assert names(h) == ["a", "b", "c"]
    assert shipped(h) == ["c"]


def test_the_first_plan_after_a_take_over_names_everything_adopted() -> None:
    held = [(request("a", out=30), running("a", 20, 6)), *((request(n), waiting(n)) for n in "bcdef")]
    h = Harness(max_num_seqs=1, standby_slots=1, worker=state(*held))
    assert len(h.plans) == 1
    assert names(h) == list("abcdef"), "more than the standby window: what is not named is forgotten by the worker"
    assert h.admitted == ["a"]
    assert (h.plans[0].lease, h.plans[0].plan_seq) == (LEASE, 1)


def test_a_plan_after_a_take_over_knows_the_report_that_came_with_it() -> None:
    h = Harness(worker=state((request("a"), running("a", 2, 2)), report_seq=41))
    assert h.plans[-1].as_of_report_seq == 41
    h.report(0, ended=("a",))
    assert h.ended == [], "that one came with the take-over"
    h.report(1, ended=("a",))
    assert [end.finished.request_id for end in h.ended] == ["a"]


def test_the_adopted_that_run_are_admitted_whatever_admission_would_say_and_not_preempted() -> None:
    held = [(request(n, prompt=12), running(n, 1, 4)) for n in "ab"]  # 8 of 10 blocks, at the limit of 1 sequence
    h = Harness(max_num_seqs=1, worker=state(*held))
    assert h.admitted == ["a", "b"]
    assert [slot.num_preemptions for slot in h.plans[-1].slots] == [0, 0]


def test_the_order_of_the_worker_is_kept_and_goes_before_newcomers() -> None:
    h = Harness(max_num_seqs=2)
    h.handle(WorkerLost())
    h.arrive(request("new1"), request("new2"))
    h.handle(WorkerConnected(state((request("z"), running("z", 1, 2)), (request("m"), waiting("m")))))
    assert (h.admitted, h.standby) == (["z", "m"], ["new1", "new2"])


def test_the_count_of_preemptions_is_adopted() -> None:
    h = Harness(worker=state((request("a"), waiting("a", preemptions=3))))
    assert h.plans[-1].slots[0].num_preemptions == 3


def test_an_adopted_request_that_the_scheduler_had_too_is_one_request() -> None:
    h = Harness()
    h.arrive(request("a"), request("b"))
    h.handle(WorkerConnected(state((request("a"), running("a", 1, 2)), lease=LEASE + 1)))
    assert names(h) == ["a", "b"]
    assert shipped(h) == ["b"], "the worker had never got it"


def test_a_newcomer_of_a_higher_attempt_replaces_the_held_one_and_is_shipped() -> None:
    h = Harness()
    h.handle(WorkerLost())
    h.arrive(request("a", out=9, attempt=1, resumed=3))
    h.handle(WorkerConnected(state((request("a", out=9), running("a", 5, 3)))))
    (slot,) = h.plans[-1].slots
    assert (slot.attempt, slot.request) == (1, request("a", out=9, attempt=1, resumed=3))


def test_a_newcomer_of_a_lower_attempt_is_the_held_one() -> None:
    h = Harness()
    h.handle(WorkerLost())
    h.arrive(request("a"))
    h.handle(WorkerConnected(state((request("a", attempt=2), running("a", 1, 2, attempt=2)))))
    assert [(slot.attempt, slot.request) for slot in h.plans[-1].slots] == [(2, None)]


def test_a_newcomer_that_does_not_fit_the_worker_is_refused_when_it_connects() -> None:
    h = Harness()
    h.handle(WorkerLost())
    h.arrive(request("long", prompt=40, out=4), request("b"))
    assert h.refused == []
    h.handle(WorkerConnected(state()))
    assert [refusal.request_id for refusal in h.refused] == ["long"]
    assert h.admitted == ["b"]


def test_ends_that_a_worker_still_reports_are_ends_of_what_the_scheduler_had() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.handle(WorkerConnected(state(ended=("a",), lease=LEASE + 1)))
    assert [end.finished.request_id for end in h.ended] == ["a"]
    assert h.scheduler.num_admitted + h.scheduler.num_waiting == 0


def test_a_lost_worker_takes_everything_with_it() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a"), request("b"))
    plans = len(h.plans)
    h.handle(WorkerLost())
    assert h.scheduler.num_admitted + h.scheduler.num_waiting == 0
    assert ids(h, ("a", 0), ("b", 0)) == ["a", "b"]
    h.report(1, ended=("a",))
    h.arrive(request("c"))
    assert (h.ended, len(h.plans)) == ([], plans), "no worker: nothing to hear and no component to tell"


def test_after_a_lost_worker_numbering_begins_anew() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.report(50, running("a", 1, 2))
    h.handle(WorkerLost())
    h.arrive(request("b"))
    h.handle(WorkerConnected(state(ready=WorkerReady("w2", 10, 4, 40, True, 100), lease=1)))
    assert (h.plans[-1].plan_seq, h.plans[-1].as_of_report_seq) == (1, 1)
    assert shipped(h) == ["b"]


@pytest.mark.parametrize("lease", [LEASE - 1, LEASE + 1])
def test_reports_under_another_lease_are_ignored(lease: int) -> None:
    h = Harness()
    h.arrive(request("a"))
    h.report(7, running("a", 1, 2), ended=("a",), lease=lease)
    assert h.ended == []
    h.report(1, ended=("a",))
    assert len(h.ended) == 1


def test_a_resumed_request_counts_its_known_output_when_it_is_admitted() -> None:
    h = Harness()
    h.arrive(request("a", prompt=4, out=30, resumed=20), request("b", prompt=16, out=1), request("c"))
    assert h.admitted == ["a", "b"], "6 blocks and 4 of 10"


def test_attempts_that_are_here_are_known_up_to_the_current_one() -> None:
    h = Harness(max_num_seqs=1)
    h.arrive(request("a", attempt=1), request("b"))
    assert ids(h, ("a", 0), ("a", 1), ("b", 0)) == []
    assert h.scheduler.unknown((("a", 2), ("c", 0))) == (("a", 2), ("c", 0))


def test_what_ended_lately_is_known_that_attempt_alone() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.report(1, ended=("a",))
    assert h.scheduler.unknown((("a", 0), ("a", 1))) == (("a", 1),)
    h.handle(WorkerLost())
    assert ids(h, ("a", 0)) == [], "its last tokens may be on their way, the worker dead or not"


def test_what_was_aborted_is_unknown() -> None:
    h = Harness()
    h.arrive(request("a"))
    h.handle(RequestsAborted((("a", 0),)))
    assert ids(h, ("a", 0)) == ["a"]


def test_ends_that_a_taken_over_worker_still_reports_are_known() -> None:
    h = Harness(worker=state(ended=("a",)))
    assert h.ended == [], "it was not this Scheduler's"
    assert ids(h, ("a", 0)) == []


def test_only_so_many_ends_are_remembered_the_latest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.replica.mirror.NUM_REMEMBERED", 3)
    h = Harness()
    for seq, name in enumerate("abcde", start=1):
        h.arrive(request(name))
        h.report(seq, ended=(name,))
    assert ids(h, *((name, 0) for name in "abcde")) == ["a", "b"]

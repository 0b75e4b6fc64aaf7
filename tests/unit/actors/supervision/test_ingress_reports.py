"""What the Supervisor tells ingress replicas and the launcher about a drain of the whole service."""

from __future__ import annotations

from actors.supervision.ingress_reports import SILENCE_S, IngressReports
from core.messages.drains import DrainProgress, DrainService, IngressReport

ORDER = DrainService(30.0, 2)


def report(ingress_id: str, num_open: int = 0, *, is_draining: bool = True) -> IngressReport:
    return IngressReport(ingress_id, num_open, is_draining)


def test_without_an_order_ingress_replicas_go_on() -> None:
    assert IngressReports().report(report("a", 3, is_draining=False), 0.0) is None


def test_a_drain_is_over_when_every_ingress_replica_drains_and_has_nothing_open() -> None:
    drain = IngressReports()
    drain.report(report("a", 1, is_draining=False), 0.0)
    assert drain.order(ORDER, 0.0) == DrainProgress(1, False)
    assert drain.report(report("a", 1), 1.0) == 29.0
    drain.report(report("a"), 1.0)
    assert not drain.order(ORDER, 1.0).is_over, "the second ingress replica has not been heard"
    drain.report(report("b", is_draining=False), 1.0)
    assert not drain.order(ORDER, 1.0).is_over, "it still takes requests"
    drain.report(report("b"), 1.5)
    assert drain.order(ORDER, 1.5) == DrainProgress(0, True)


def test_an_ingress_replica_that_has_died_is_forgotten_and_its_successor_counts() -> None:
    drain = IngressReports()
    drain.report(report("a", 5), 0.0)
    now = SILENCE_S + 1
    drain.report(report("b"), now)
    assert drain.silent(now) == ["a"]
    assert drain.order(ORDER, now) == DrainProgress(5, False), "who is only silent still has its requests"
    drain.forget(["a", "unknown"])
    assert drain.order(ORDER, now) == DrainProgress(0, False)
    drain.report(report("c"), now)
    assert drain.order(ORDER, now).is_over


def test_requests_of_a_silent_ingress_replica_keep_the_weights_that_they_run_on() -> None:
    reports = IngressReports()
    reports.report(IngressReport("a", 1, False, 1, 0), 0.0)
    reports.report(IngressReport("b", 0, False, 1, 1), SILENCE_S + 60)
    assert reports.oldest_version() == 0
    reports.forget(reports.silent(SILENCE_S + 60))
    assert reports.oldest_version() == 1


def test_a_time_that_is_over_is_not_negative() -> None:
    drain = IngressReports()
    drain.order(DrainService(1.0, 1), 0.0)
    assert drain.report(report("a"), 5.0) == 0.0

"""What the Supervisor tells ingress replicas and the launcher about a drain of the whole service."""

from __future__ import annotations

from actors.supervision.ingress_reports import FORGET_S, IngressReports
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


def test_an_ingress_replica_that_is_silent_is_forgotten_and_its_successor_counts() -> None:
    drain = IngressReports()
    drain.report(report("a", 5), 0.0)
    drain.report(report("b"), FORGET_S + 1)
    assert drain.order(ORDER, FORGET_S + 1) == DrainProgress(0, False)
    drain.report(report("c"), FORGET_S + 1)
    assert drain.order(ORDER, FORGET_S + 1).is_over


def test_a_time_that_is_over_is_not_negative() -> None:
    drain = IngressReports()
    drain.order(DrainService(1.0, 1), 0.0)
    assert drain.report(report("a"), 5.0) == 0.0

"""What the Supervisor says: before it knows what its predecessor has left, about numbers, and about a drain of all."""

from __future__ import annotations

import dataclasses

import pytest

from farsight.actors.runtime.names import SUPERVISOR, own_replicas, wanted_components
from farsight.actors.runtime.peer import PeerLost
from farsight.actors.runtime.watching import ClusterStore
from farsight.actors.supervision import supervisor as module
from farsight.actors.supervision.autoscaling import scaled, takes_requests, without_drains
from farsight.actors.supervision.ingress_reports import SILENCE_S, IngressReports
from farsight.actors.supervision.supervisor import Supervisor
from farsight.core.codec import decode, encode
from farsight.core.config.engine import ModelConfig
from farsight.core.errors import MessageError
from farsight.core.messages.status import ComponentCounts, Scale
from farsight.core.messages.supervision import DrainProgress, DrainService, IngressOrders, IngressReport, WeightsState
from tests.unit.actors.components import component_context

LEFT = WeightsState(((3, "/model"),), current=3, oldest=3, target=3, num_versions=4)


async def test_it_names_no_weights_and_no_numbers_that_are_not_those_of_the_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stored = {"counts": encode(ComponentCounts(5, 1, 1, 0)), "weights": encode(LEFT)}
    supervisor = Supervisor(component_context(SUPERVISOR))
    report = encode(IngressReport("a", 0, False))

    async def get(_: ClusterStore, key: str) -> bytes | None:
        with pytest.raises(PeerLost):
            await supervisor.answer("report_ingress", report)
        with pytest.raises(PeerLost):
            await supervisor.answer("counts", b"")
        return stored.get(key)

    async def put(_: ClusterStore, key: str, value: bytes) -> None:
        stored[key] = value

    monkeypatch.setattr(ClusterStore, "get", get)
    monkeypatch.setattr(ClusterStore, "put", put)
    monkeypatch.setattr(module, "list_hosts", lambda _: ["router-of-an-earlier-life"])
    monkeypatch.setattr(Supervisor, "_keep_wanted", lambda _: None)
    monkeypatch.setattr(Supervisor, "_add_own", _nothing)
    try:
        await supervisor.start()
        orders = decode(await supervisor.answer("report_ingress", report), IngressOrders)
        counts = decode(await supervisor.answer("counts", b""), ComponentCounts)
    finally:
        await supervisor.stop()
    assert (orders.model_version, orders.oldest_version, counts.replicas) == (3, 3, 5)


async def _nothing(_: Supervisor) -> None:
    return


BOUNDS = ModelConfig(min_replicas=1, max_replicas=3)


@pytest.mark.parametrize(
    ("model", "scale", "field", "expected"),
    [
        (ModelConfig(), Scale("nonsense", 1), "kind", "one of replica, length-predictor"),
        (ModelConfig(), Scale("image-encoder", 1), "kind", "another kind: the served model reads no pictures"),
        (ModelConfig(), Scale("replica", 0), "count", "an integer from 1 to 1000"),
        (ModelConfig(), Scale("replica", 1001), "count", "an integer from 1 to 1000"),
        (BOUNDS, Scale("replica", 4), "count", "an integer from 1 to 3, between which their number follows the load"),
    ],
)
async def test_a_scale_that_cannot_be_is_refused(model: ModelConfig, scale: Scale, field: str, expected: str) -> None:
    context = component_context(SUPERVISOR)
    site = dataclasses.replace(context.site, config=dataclasses.replace(context.config, model=model))
    with pytest.raises(MessageError) as refused:
        await Supervisor(dataclasses.replace(context, site=site)).scale(scale)
    assert refused.value.field == field
    assert refused.value.expected.startswith(expected)


COUNTS = ComponentCounts(3, 1, 1, 0, draining=("2",), drained=("0",))


def test_a_drained_replica_has_no_components_and_a_draining_one_keeps_its_own() -> None:
    assert own_replicas(COUNTS) == ["1", "2"]
    assert [name for name in wanted_components(COUNTS) if name.startswith("worker-")] == ["worker-1", "worker-2"]


def test_a_replica_that_no_longer_counts_is_not_drained_either() -> None:
    assert scaled(COUNTS, "replica", 2) == ComponentCounts(2, 1, 1, 0, drained=("0",))
    assert scaled(scaled(COUNTS, "replica", 2), "replica", 3).draining == ()


def test_one_replica_that_takes_requests_stays() -> None:
    assert not takes_requests(ComponentCounts(2, 1, 1, 0, draining=("1",), drained=("0",)))
    assert takes_requests(ComponentCounts(1, 1, 1, 0, backends=1, drained=("0",)))
    with pytest.raises(MessageError, match="only drained replicas would be left"):
        scaled(COUNTS, "replica", 1)


def test_a_replica_that_is_taken_back_is_wanted_again() -> None:
    assert own_replicas(without_drains(COUNTS, "0")) == ["0", "1", "2"]
    assert without_drains(COUNTS, "2").draining == ()


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

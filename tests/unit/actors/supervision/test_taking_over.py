"""A Supervisor that has just started tells nothing before it knows what the one before it has left."""

from __future__ import annotations

import pytest

from actors.runtime.cluster_store import ClusterStore
from actors.runtime.names import SUPERVISOR
from actors.runtime.peer import PeerLost
from actors.supervision import supervisor as module
from actors.supervision.supervisor import Supervisor
from core.codec import decode, encode
from core.messages.drains import IngressOrders, IngressReport
from core.messages.status import ComponentCounts
from core.messages.weights import WeightsState
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
            await supervisor.answer("attend", report)
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
        orders = decode(await supervisor.answer("attend", report), IngressOrders)
        counts = decode(await supervisor.answer("counts", b""), ComponentCounts)
    finally:
        await supervisor.stop()
    assert (orders.model_version, orders.oldest_version, counts.replicas) == (3, 3, 5)


async def _nothing(_: Supervisor) -> None:
    return

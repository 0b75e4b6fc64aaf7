"""Desired numbers with replicas that the operator has taken out."""

from __future__ import annotations

import pytest

from actors.runtime.names import own_replicas, wanted_components
from actors.supervision.counts import scaled, takes_requests, without_drains
from core.errors import MessageError
from core.messages.status import ComponentCounts

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

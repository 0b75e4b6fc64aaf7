"""What the router counts of each replica."""

from __future__ import annotations

from policies.fleet.request_table import FleetReplica
from policies.placement.base import ReplicaLoad


def test_an_empty_replica_has_exactly_no_work() -> None:
    replica = FleetReplica(ReplicaLoad("a", 0, 0.0))
    for name, work_tokens in (("x", 0.1), ("y", 0.2), ("z", 0.3)):
        replica.enter(name, work_tokens)
    for name in ("z", "x", "y"):
        replica.remove(name)
    assert replica.load.num_requests == 0
    assert f"{replica.load.work_tokens}" == "0.0"  # neither a rounding error nor -0.0

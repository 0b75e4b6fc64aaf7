"""Requests run through one simulated replica, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from farsight.policies.compose import build_router, build_scheduler
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import PolicySettings
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import LinearLatency
from farsight.simulator.cluster.records import Record
from farsight.simulator.cluster.replica import ReplicaShape
from farsight.simulator.traffic.workload import SimRequest

CLIENTS, PLACES = 24, 4
"""Six times as many requests as run at once, all the time."""

SMALL = ReplicaShape(40, 16, num_host_blocks=40, max_num_seqs=PLACES, look_every=1)
LONG, SHORT = SimRequest("long", 0.0, 200, 30, 100), SimRequest("short", 0.0, 32, 3, 100)


def one_replica(
    preset: str,
    settings: PolicySettings,
    shape: ReplicaShape = SMALL,
    *,
    standby_slots: int = 0,
    clients: int | None = None,
    order: str = "",
    admission: str = "",
    watched: Callable[[ReplicaScheduler], ReplicaScheduler] = lambda scheduler: scheduler,
) -> Fleet:
    """A fleet of one, whose steps take what the settings say."""
    assert settings.cost is not None
    limits = SchedulerLimits(shape.max_num_seqs, standby_slots)
    scheduler = watched(build_scheduler(preset, limits, settings, order=order, admission=admission))
    fleet_shape = FleetShape(shape, LinearLatency(settings.cost))
    return Fleet(fleet_shape, build_router(preset), lambda _: scheduler, clients=clients)


def run_beside(
    fleet: Fleet, num_short: int, long: SimRequest = LONG, short: SimRequest = SHORT, num_before: int = 0
) -> tuple[Record, float]:
    """What becomes of the long request, and when the last of so many short ones has ended."""
    crowd = [replace(short, request_id=f"short{number}") for number in range(num_short)]
    done = fleet.run([*crowd[:num_before], long, *crowd[num_before:]]).done
    assert len(done) == num_short + 1
    (record,) = (each for each in done if each.arrival.request_id == long.request_id)
    return record, max(each.finished_at for each in done if each is not record)

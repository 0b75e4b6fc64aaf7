"""Named compositions of policies (design section 5)."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from core.errors import ConfigError
from policies.aggressive import Aggressive
from policies.fcfs import Fcfs
from policies.global_scheduler import GlobalScheduler
from policies.least_work import LeastWork
from policies.placement import Placement
from policies.recompute import NewestGiveWay
from policies.replica_scheduler import ReplicaPolicies, ReplicaScheduler, SchedulerLimits
from policies.round_robin import RoundRobin


@dataclass(frozen=True, slots=True)
class Preset:
    """One row of the table: which policy fills each part."""

    name: str
    placement: str
    mode: str
    order: str
    admission: str
    preemption: str


PRESETS: dict[str, Preset] = {
    preset.name: preset for preset in (Preset("fcfs", "round-robin", "continuous", "fcfs", "watermark", "recompute"),)
}

PLACEMENTS: dict[str, Callable[[], Placement]] = {"round-robin": RoundRobin, "least-work": LeastWork}


def find_preset(name: str) -> Preset:
    """The preset of this name.

    Raises:
        ConfigError: there is none; names the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    nearest = difflib.get_close_matches(name, PRESETS, n=1)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    raise ConfigError("scheduler.preset", name, f"one of {', '.join(PRESETS)}{hint}")


def build_router(preset: str, placement: str = "") -> GlobalScheduler:
    """The scheduler over replicas; ``placement`` overrides the preset's own.

    Raises:
        ConfigError: there is no such preset or placement.
    """
    name = placement or find_preset(preset).placement
    if name not in PLACEMENTS:
        raise ConfigError("scheduler.placement", name, f"one of {', '.join(PLACEMENTS)}")
    return GlobalScheduler(PLACEMENTS[name]())


def build_scheduler(
    preset: str, *, watermark: float, limits: SchedulerLimits, offload: str = "recompute"
) -> ReplicaScheduler:
    """The scheduler of one replica under a preset; ``offload`` as in ``SchedulerConfig``."""
    find_preset(preset)
    policies = ReplicaPolicies(Fcfs(), Aggressive(watermark), NewestGiveWay(swaps=offload == "reactive"))
    return ReplicaScheduler(policies, limits)

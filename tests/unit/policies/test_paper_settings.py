"""The parameters that the papers name reach the parts that a server builds."""

from __future__ import annotations

from typing import Any

import pytest

from core.config.placement import PlacementConfig
from core.config.scheduling import SchedulerConfig
from core.errors import ConfigError
from policies.compose import configured_scheduler, configured_settings
from policies.interfaces import ADMISSIONS, KV_POLICIES, ORDERS, Job, ReplicaContext
from policies.kv.enst_offload import EnstOffload
from policies.order.skip_join_mlfq import SkipJoinMlfq
from policies.placement.base import PLACEMENTS
from policies.placement.e2 import E2Router
from policies.settings import PolicySettings


def admitted(admission: str, **settings: Any) -> int:
    """How many jobs of 10 prompt and at most 90 output tokens a pool of 1,000 tokens takes."""
    config = SchedulerConfig(admission=admission, **settings)
    part = ADMISSIONS.find(admission).build(ReplicaContext(configured_settings(config), 100))
    part.begin([], 1000)
    count = 0
    while part.admits(new := Job(f"r{count}", 0.0, 10, 90)):
        part.add(new)
        count += 1
    return count


def test_the_mlfq_has_the_quanta_and_levels_of_the_configuration() -> None:
    config = SchedulerConfig(preset="fastserve", quantum_s=0.5, quantum_ratio=3.0, num_levels=2, starve_limit_s=7.0)
    order = configured_scheduler(config, 4).order
    assert isinstance(order, SkipJoinMlfq)
    rules = order.rules
    assert (rules.quantum_s, rules.ratio, rules.num_levels, rules.starve_limit_s) == (0.5, 3.0, 2, 7.0)
    unbounded = configured_scheduler(SchedulerConfig(preset="fastserve"), 4).order
    assert isinstance(unbounded, SkipJoinMlfq) and unbounded.rules.num_levels is None


def test_proactive_offload_has_both_numbers_of_idle_slots() -> None:
    settings = configured_settings(SchedulerConfig(min_idle_slots=3, num_burst_levels=5))
    order = ORDERS.find("skip-join-mlfq").build(ReplicaContext(settings, 4))
    kv = KV_POLICIES.find("enst-proactive").build(ReplicaContext(settings, 4, order=order))
    assert isinstance(kv, EnstOffload) and (kv.min_idle_slots, kv.num_burst_levels) == (3, 5)


def test_past_future_keeps_free_what_it_is_told() -> None:
    assert admitted("past-future", reserve_ratio=0.0) > admitted("past-future", reserve_ratio=0.5)


def test_the_conservative_admission_counts_the_pool_larger() -> None:
    assert admitted("conservative") == 10
    assert admitted("conservative", overcommit=1.5) == 15


def test_e2_has_the_thresholds_of_the_configuration() -> None:
    config = PlacementConfig(imbalance_ratio=0.7, balanced_ratio=0.4, rebalance_after=9, initial_output_len=50.0)
    e2 = PLACEMENTS.find("e2").build(PolicySettings(placement=config))
    assert isinstance(e2, E2Router) and e2.config == config


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("quantum_ratio", 1.0),
        ("num_levels", -1),
        ("min_idle_slots", -1),
        ("num_burst_levels", -1),
        ("reserve_ratio", 1.0),
        ("history_window", 0),
        ("overcommit", 0.5),
    ],
)
def test_what_no_paper_means_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"scheduler\.{name}"):
        SchedulerConfig(**{name: value})

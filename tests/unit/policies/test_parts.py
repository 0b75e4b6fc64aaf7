"""Parts and presets: FCFS, victims of the newest-give-way rule, what goes together, and which settings reach a part."""

from __future__ import annotations

import math
from typing import Any

import pytest

from farsight.core.config.scheduling import BatchConfig, PlacementConfig, SchedulerConfig
from farsight.core.errors import ConfigError
from farsight.policies.admission.watermark import Aggressive
from farsight.policies.compose import (
    build_batcher,
    build_router,
    build_scheduler,
    check_scheduler,
    configured_replica,
    configured_scheduler,
    swaps_kv,
)
from farsight.policies.interfaces import ADMISSIONS, KV_POLICIES, ORDERS, Job, KvMoves, KvView, ReplicaContext
from farsight.policies.kv.enst_baselines import Reactive
from farsight.policies.kv.enst_offload import EnstOffload
from farsight.policies.kv.newest_first import NewestGiveWay
from farsight.policies.order.fcfs import Fcfs
from farsight.policies.order.skip_join_mlfq import SkipJoinMlfq
from farsight.policies.placement.base import PLACEMENTS
from farsight.policies.placement.e2 import E2Router
from farsight.policies.presets import PRESETS, find_preset
from farsight.policies.replica.scheduler import SchedulerLimits
from farsight.policies.settings import BatchSettings, PolicySettings


def job(name: str, computed: int = 0, **details: float) -> Job:
    return Job(name, 0.0, 4, 10, computed_len=computed, **details)  # type: ignore[arg-type]


def names(order: Fcfs) -> str:
    return "".join(each.request_id for each in order.ranked(0.0))


def test_fcfs_keeps_the_order_of_arrival() -> None:
    order = Fcfs()
    jobs = {name: job(name) for name in "bacd"}
    for each in jobs.values():
        order.add(each, 0.0)
    order.remove(jobs["a"])
    order.remove(job("unknown"))
    assert names(order) == "bcd"
    assert order.slice_s(jobs["b"]) == math.inf
    assert not order.preemptive


def test_priority_then_deadline_go_before_arrival() -> None:
    order = Fcfs()
    for each in (job("c"), job("b", deadline_at=9.0), job("a", deadline_at=5.0), job("z", priority=1, deadline_at=1.0)):
        order.add(each, 0.0)
    order.add(job("0", priority=-1), 0.0)
    assert names(order) == "0abcz"


def view(running: str, idle: str = "", *, free: int = 0, needed: int = 0, host_free: int = 0) -> KvView:
    """Each job holds 5 tokens."""
    jobs = {name: job(name, 5) for name in running + idle}
    executing, others = [jobs[name] for name in running], [jobs[name] for name in idle]
    return KvView(executing, others, [], free=free, needed=needed, host_free=host_free, host_capacity=host_free)


def moved(moves: KvMoves) -> tuple[str, str]:
    return "".join(each.request_id for each in moves.offload), "".join(each.request_id for each in moves.drop)


@pytest.mark.parametrize(
    ("idle", "swaps", "pool", "victims"),
    [
        ("", False, {"free": 2, "needed": 2}, ("", "")),
        ("", False, {"free": 2, "needed": 3}, ("", "c")),
        ("", False, {"free": 2, "needed": 8}, ("", "cb")),
        ("", False, {"free": 2, "needed": 100}, ("", "cb")),
        ("de", False, {"needed": 11}, ("", "edc")),
        ("d", True, {"needed": 15, "host_free": 9}, ("d", "cb")),
    ],
    ids=["none", "the newest", "until enough is free", "never the oldest", "the idle first", "to the host"],
)
def test_the_newest_give_way(idle: str, swaps: bool, pool: dict[str, int], victims: tuple[str, str]) -> None:
    assert moved(NewestGiveWay(swaps=swaps).moves(view("abc", idle, **pool), 0.0)) == victims


def test_a_job_that_holds_nothing_is_no_victim() -> None:
    empty = KvView([job("a", 5), job("b", 5), job("c")], [], [], free=0, needed=1, host_free=0, host_capacity=0)
    assert moved(NewestGiveWay().moves(empty, 0.0)) == ("", "b")


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.mode == "batch"])
def test_every_preset_of_batch_mode_builds_and_is_no_continuous_one(name: str) -> None:
    settings = BatchSettings(memory_tokens=1000, serving_time_s=lambda size, prompt, output: float(output))
    build_batcher(name, settings).check_integrity()
    with pytest.raises(ConfigError, match=r"scheduler\.preset.*static batches"):
        build_scheduler(name, SchedulerLimits(16, 4))
    with pytest.raises(ConfigError, match=r"scheduler\.preset.*batch mode"):
        build_batcher("fcfs", settings)


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_preset_can_be_served_on_both_sides_of_a_replica(name: str) -> None:
    check_scheduler(SchedulerConfig(preset=name))
    configured_replica(SchedulerConfig(preset=name), 16).check_integrity()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"preset": "magnus", "placement": "least-work"}, r"placement.*idle workers pull"),
        ({"placement": "idle-worker"}, r"placement.*round-robin"),
        ({"preset": "fastserve", "execution": "static"}, r"execution.*'static'.*ragged.*'fastserve'.*multi-bin"),
        *(({"preset": "multi-bin", part: "fcfs"}, rf"{part}.*'multi-bin'") for part in ("order", "admission", "kv")),
    ],
)
def test_in_batch_mode_nobody_places_and_replicas_decide_nothing(settings: dict[str, Any], says: str) -> None:
    check_scheduler(SchedulerConfig(preset="magnus", execution="static"))
    with pytest.raises(ConfigError, match=rf"scheduler\.{says}"):
        check_scheduler(SchedulerConfig(**settings))


@pytest.mark.parametrize(("size", "max_num_seqs", "batch"), [(0, None, 7), (3, None, 3), (9, 5, 5), (0, 4, 4)])
def test_no_batch_is_larger_than_a_worker_can_run(size: int, max_num_seqs: int | None, batch: int) -> None:
    settings = BatchSettings(1000, lambda *_: 1.0, BatchConfig(batch_size=size), max_num_seqs=max_num_seqs)
    batcher = build_batcher("magnus-vs", settings)
    for index in range(20):
        batcher.add(job(str(index)), 0.0)
    pulled = batcher.pull(0.0)
    assert pulled is not None
    assert len(pulled) == batch


def test_the_configuration_sets_parts_alone() -> None:
    config = SchedulerConfig(preset="past-future", order="skip-join-mlfq", admission="watermark", kv="enst-reactive")
    built = configured_scheduler(config, 4)
    parts = [type(part) for part in (built.order, built.admission, built.selector.kv)]
    assert parts == [SkipJoinMlfq, Aggressive, Reactive]
    with pytest.raises(ConfigError, match=r"scheduler\.kv.*swap-newest with the order 'fcfs'"):
        check_scheduler(SchedulerConfig(kv="enst-reactive"))


SWAPPING = {"fastserve", "fastserve-reactive", "farsight", "farsight-mean"}


@pytest.mark.parametrize("preset", PRESETS)
def test_only_some_presets_need_a_host_pool(preset: str) -> None:
    assert swaps_kv(SchedulerConfig(preset=preset)) == (preset in SWAPPING)
    if PRESETS[preset].mode == "continuous" and PRESETS[preset].order == "fcfs":
        assert swaps_kv(SchedulerConfig(preset=preset, kv="swap-newest"))


def test_a_preset_bounds_the_batch() -> None:
    assert build_scheduler("magnus-ccb", SchedulerLimits(16, 4)).limits.max_num_seqs == 7
    assert build_scheduler("magnus-ccb", SchedulerLimits(4, 4)).limits.max_num_seqs == 4


@pytest.mark.parametrize(("part", "named"), [("order", "fcfs"), ("admission", "oracle"), ("kv", "enst-defer")])
def test_an_unknown_part_names_those_there_are(part: str, named: str) -> None:
    parts: dict[str, Any] = {part: "none"}
    with pytest.raises(ConfigError, match=rf"scheduler\.{part}.*{named}"):
        build_scheduler("fcfs", SchedulerLimits(4, 4), **parts)
    with pytest.raises(ConfigError, match=r"scheduler\.placement.*least-work, round-robin"):
        build_router("fcfs", "random")
    with pytest.raises(ConfigError, match=r"scheduler\.preset.*did you mean 'fcfs'"):
        find_preset("fcf")


def test_parts_can_be_set_alone_but_must_go_together() -> None:
    mixed = build_scheduler("past-future", SchedulerLimits(4, 4), order="skip-join-mlfq", kv="enst-proactive")
    assert mixed.order.preemptive
    for preset, kv in (("fcfs", "enst-proactive"), ("fcfs", "cheapest-victim"), ("farsight", "enst-defer")):
        with pytest.raises(ConfigError, match=r"scheduler\.kv.*recompute-newest"):
            build_scheduler(preset, SchedulerLimits(4, 4), kv=kv)


def admitted(admission: str, **settings: Any) -> int:
    """How many jobs of 10 prompt and at most 90 output tokens a pool of 1,000 tokens takes."""
    config = SchedulerConfig(admission=admission, **settings)
    part = ADMISSIONS.find(admission).build(ReplicaContext(PolicySettings(config), 100))
    part.begin([], 1000)
    count = 0
    while part.admits(new := Job(f"r{count}", 0.0, 10, 90)):
        part.add(new)
        count += 1
    return count


def test_the_mlfq_has_the_quanta_and_levels_of_the_configuration() -> None:
    config = SchedulerConfig(preset="fastserve", quantum_s=0.5, quantum_ratio=3.0, num_levels=3, starve_limit_s=7.0)
    order = configured_scheduler(config, 4).order
    assert isinstance(order, SkipJoinMlfq)
    assert order.config == config
    assert [order.quantum_s(level) for level in (1, 2)] == [0.5, 1.5]


def test_proactive_offload_has_both_numbers_of_idle_slots() -> None:
    settings = PolicySettings(SchedulerConfig(min_idle_slots=3, num_burst_levels=5))
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

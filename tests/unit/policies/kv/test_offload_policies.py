"""Who gives way, and where to: proactive offload by ENST, its baselines, and the cheapest victim."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.policies.interfaces import Job, KvMoves, KvPolicy, KvView
from farsight.policies.kv.cheapest_victim import CheapestVictim
from farsight.policies.kv.enst_baselines import Defer, Reactive, Recompute
from farsight.policies.kv.enst_offload import EnstOffload, by_enst, enst_s
from farsight.policies.order.gittins import DecodePrice, Gittins
from farsight.policies.order.skip_join_mlfq import SkipJoinMlfq
from tests.unit.policies.mlfq_server import unit_mlfq
from tests.unit.policies.order.test_gittins import STEP
from tests.unit.policies.order.test_gittins import job as foreseen


def order_with(*levels: int, priorities: tuple[int, ...] = (), **rules: object) -> tuple[SkipJoinMlfq, list[Job]]:
    """Jobs of 10 tokens on the device at these levels, all there since instant 0."""
    order = unit_mlfq(**rules)
    urgencies = priorities or (0,) * len(levels)
    jobs = [
        Job(f"J{i}", 0.0, 2 ** (level - 1), 99, urgency)
        for i, (level, urgency) in enumerate(zip(levels, urgencies, strict=True))
    ]
    for job in jobs:
        order.add(job, 0.0)
        job.prompt_len, job.output_len, job.computed_len = 8, 2, 10
    assert [order.level(job) for job in jobs] == list(levels)
    return order, jobs


def on_host(job: Job) -> Job:
    job.computed_len, job.host_len = 0, job.known_len
    return job


def view_of(**fields: Any) -> KvView:
    empty = KvView((), (), (), free=0, needed=0, host_free=1000, host_capacity=1000)
    return replace(empty, **fields)


def ids_of(jobs: tuple[Job, ...]) -> list[str]:
    return [job.request_id for job in jobs]


def test_the_time_to_execute_counts_every_quantum_down_to_the_own_level() -> None:
    order, jobs = order_with(4, 1, 2, 2, 3, 4)
    assert enst_s(order, jobs[:1], 0.0) == {"J0": 7 + 6 + 6 + 4}


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3.0, 40.0, math.inf]), st.booleans())
def test_enst_is_the_sum_over_pairs(seed: int, starve_limit_s: float, has_priorities: bool) -> None:
    rng = np.random.default_rng(seed)
    levels = rng.integers(1, 7, size=int(rng.integers(1, 25)))
    priorities = rng.integers(0, 3, size=len(levels)) * has_priorities
    order, jobs = order_with(
        *(int(level) for level in levels),
        priorities=tuple(int(each) for each in priorities),
        starve_limit_s=starve_limit_s,
    )
    asked = [job for job in jobs if rng.random() < 0.6]
    times = enst_s(order, asked, 2.0)
    assert times == {job.request_id: _by_pairs(order, job, jobs, 2.0) for job in asked}


def _by_pairs(order: SkipJoinMlfq, job: Job, jobs: list[Job], now: float) -> float:
    own = urgent = 0.0
    level = order.level(job)
    for other in jobs:
        begin = order.level(other)
        if other.urgency < job.urgency:
            urgent += sum(2.0 ** (k - 1) for k in range(begin, max(level, begin + 1)))
        elif other.urgency == job.urgency:
            own += sum(2.0 ** (k - 1) for k in range(begin, level))
    return urgent + min(max(0.0, order.config.starve_limit_s - (now - 0.0)), own)


def test_urgency_then_enst_then_level_then_age() -> None:
    order, jobs = order_with(1, 3, 3, 1, priorities=(0, 0, 0, 1), starve_limit_s=1)
    jobs[1].arrived_at = -1.0
    assert ids_of(tuple(by_enst(order, jobs, 0.0))) == ["J0", "J2", "J1", "J3"]
    assert enst_s(order, jobs, 5.0)["J0"] == enst_s(order, jobs, 5.0)["J1"] == 0
    assert ids_of(tuple(by_enst(order, jobs, 5.0))) == ["J0", "J2", "J1", "J3"]


def test_of_equal_enst_the_lower_level_leaves_first() -> None:
    order, jobs = order_with(5, 3, starve_limit_s=1)
    jobs[1].arrived_at = -1.0
    assert by_enst(order, jobs, 5.0) == [jobs[1], jobs[0]]


def test_what_left_for_the_running_jobs_does_not_count_again_for_the_target() -> None:
    order, jobs = order_with(1, 3, 5, 4)
    policy = EnstOffload(order, min_idle_slots=2, num_burst_levels=0)
    view = view_of(running=jobs[:1], idle=jobs[1:], free=0, needed=5)
    assert policy.moves(view, 0.0) == KvMoves(offload=(jobs[2], jobs[3], jobs[1]))


def test_a_slot_is_the_mean_length_of_the_running() -> None:
    order, jobs = order_with(1, 2, 3, 4)
    jobs[0].prompt_len = 18
    view = view_of(running=jobs[:2], idle=jobs[2:])
    assert EnstOffload(order, min_idle_slots=1, num_burst_levels=0).idle_target(view) == 15
    assert EnstOffload(order, min_idle_slots=1, num_burst_levels=3).idle_target(view) == 45
    assert EnstOffload(order, min_idle_slots=4, num_burst_levels=3).idle_target(view) == 60
    assert EnstOffload(order).idle_target(view_of(idle=jobs[2:])) == 20
    assert EnstOffload(order).idle_target(view_of()) == 0


def test_the_last_to_come_back_leave_first_until_the_target_is_free() -> None:
    order, jobs = order_with(1, 3, 5, 4)
    policy = EnstOffload(order, min_idle_slots=2, num_burst_levels=0)
    view = view_of(running=jobs[:1], idle=jobs[1:], free=5, needed=1)
    assert policy.moves(view, 0.0) == KvMoves(offload=(jobs[2], jobs[3]))
    assert policy.moves(replace(view, free=11), 0.0) == KvMoves(offload=(jobs[2],))
    assert policy.moves(replace(view, free=21), 0.0) == KvMoves()


def test_nothing_is_dropped_for_the_target_alone() -> None:
    order, jobs = order_with(1, 3, 5)
    jobs[2].output_len, jobs[2].computed_len = 22, 30
    policy = EnstOffload(order, min_idle_slots=1, num_burst_levels=0)
    view = view_of(running=jobs[:1], idle=jobs[1:], free=1, needed=1, host_free=10)
    assert policy.moves(view, 0.0) == KvMoves(offload=(jobs[1],))
    assert policy.moves(replace(view, needed=2), 0.0) == KvMoves(drop=(jobs[2],))
    assert policy.moves(replace(view, host_free=0), 0.0) == KvMoves()


def test_running_jobs_give_way_from_the_last_and_never_the_first() -> None:
    order, jobs = order_with(1, 1, 2)
    policy = EnstOffload(order, min_idle_slots=0, num_burst_levels=0)
    view = view_of(running=jobs, needed=15, host_free=10)
    assert policy.moves(view, 0.0) == KvMoves(offload=(jobs[2],), drop=(jobs[1],))
    assert policy.moves(replace(view, needed=500), 0.0) == KvMoves(offload=(jobs[2],), drop=(jobs[1],))


def test_the_first_to_come_back_are_uploaded_while_the_target_stays_free() -> None:
    order, jobs = order_with(1, 4, 2, 3)
    for job in jobs[1:]:
        on_host(job)
    policy = EnstOffload(order, min_idle_slots=1, num_burst_levels=0)
    view = view_of(running=jobs[:1], offloaded=jobs[1:], free=31, needed=1)
    assert policy.moves(view, 0.0) == KvMoves(upload=(jobs[2], jobs[3]))
    assert policy.moves(replace(view, free=30), 0.0) == KvMoves(upload=(jobs[2],))
    assert policy.moves(replace(view, free=1000), 0.0) == KvMoves(upload=(jobs[2], jobs[3], jobs[1]))
    assert replace(policy, lookahead=1).moves(view, 0.0) == KvMoves(upload=(jobs[2],))


def test_an_upload_takes_whole_blocks() -> None:
    """Or it would be offloaded again at the next point, and so on for ever."""
    order, jobs = order_with(1, 4)
    view = view_of(running=jobs[:1], offloaded=[on_host(jobs[1])], block_size=16)
    policy = EnstOffload(order)
    target, known = policy.idle_target(view), jobs[1].known_len
    assert known % 16
    assert policy.moves(replace(view, free=target + known), 0.0) == KvMoves()
    assert policy.moves(replace(view, free=target + 16), 0.0) == KvMoves(upload=(jobs[1],))


def test_nothing_is_uploaded_at_a_point_that_offloads() -> None:
    order, jobs = order_with(1, 5, 2)
    jobs[1].output_len, jobs[1].computed_len = 92, 100
    on_host(jobs[2])
    policy = EnstOffload(order, min_idle_slots=1, num_burst_levels=0)
    view = view_of(running=jobs[:1], idle=jobs[1:2], offloaded=jobs[2:], free=9)
    assert policy.moves(view, 0.0) == KvMoves(offload=(jobs[1],))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_moves_come_to_rest_and_respect_every_bound(seed: int) -> None:
    """Carried out again and again with no job running on, at most one offload phase and one upload phase follow."""
    rng = np.random.default_rng(seed)
    order, jobs = order_with(*(int(level) for level in rng.integers(1, 6, size=int(rng.integers(2, 15)))))
    for job in jobs:
        job.output_len = int(rng.integers(1, 30))
        job.computed_len = job.known_len
    cut, end = sorted(int(each) for each in rng.integers(1, len(jobs) + 1, size=2))
    running, idle, offloaded = jobs[:cut], jobs[cut:end], [on_host(job) for job in jobs[end:]]
    policy = EnstOffload(order, int(rng.integers(0, 3)), int(rng.integers(0, 2)), lookahead=4)
    free, host_free = int(rng.integers(0, 200)), int(rng.integers(0, 200))
    has_uploaded = False
    for _ in range(20):
        view = view_of(running=running, idle=idle, offloaded=offloaded, free=free, host_free=host_free)
        moves = policy.moves(view, 0.0)
        if moves == KvMoves():
            break
        assert not moves.drop
        assert not (moves.offload and (moves.upload or has_uploaded))
        for job in moves.offload:
            idle.remove(job)
            free, host_free = free + job.computed_len, host_free - job.computed_len
            offloaded.append(on_host(job))
        for job in moves.upload:
            has_uploaded = True
            offloaded.remove(job)
            free, host_free = free - job.host_len, host_free + job.host_len
            job.computed_len, job.host_len = job.host_len, 0
            idle.append(job)
            assert free >= policy.idle_target(view)
        assert host_free >= 0
    else:
        raise AssertionError("moves never end")


def test_no_more_start_than_the_host_takes_of_those_whom_they_push_out() -> None:
    policy = EnstOffload(unit_mlfq())
    assert policy.start_room(view_of(host_free=99, free=50)) == 0, "the host is nearly full"
    assert policy.start_room(view_of(host_free=0, host_capacity=0)) == math.inf
    assert policy.start_room(view_of(host_free=160, free=50)) == 110
    assert policy.start_room(view_of(host_free=160, free=50, needed=90)) == 20, "those promised room come first"
    assert policy.start_room(view_of(host_free=160, needed=90)) == 0


@pytest.fixture
def placed() -> tuple[SkipJoinMlfq, list[Job]]:
    return order_with(1, 3, 5, 4)


@pytest.mark.parametrize("policy_of", [Defer, Reactive, Recompute])
def test_nothing_moves_before_memory_is_short(
    placed: tuple[SkipJoinMlfq, list[Job]], policy_of: type[Defer | Reactive | Recompute]
) -> None:
    order, jobs = placed
    on_host(jobs[3])
    view = view_of(running=jobs[:1], idle=jobs[1:3], offloaded=jobs[3:], free=5, needed=5)
    assert policy_of(order).moves(view, 0.0) == KvMoves()
    assert policy_of(order).moves(replace(view, free=500), 0.0) == KvMoves()


def test_victims_come_in_the_same_order_and_go_to_the_host_or_nowhere(placed: tuple[SkipJoinMlfq, list[Job]]) -> None:
    order, jobs = placed
    view = view_of(running=jobs[:1], idle=jobs[1:], free=0, needed=15)
    assert Reactive(order).moves(view, 0.0) == KvMoves(offload=(jobs[2], jobs[3]))
    assert Recompute(order).moves(view, 0.0) == KvMoves(drop=(jobs[2], jobs[3]))
    assert Defer(order).moves(view, 0.0) == KvMoves(drop=(jobs[2], jobs[3]))
    assert Reactive(order).moves(replace(view, host_free=19), 0.0) == KvMoves((jobs[2],), (jobs[3],))


def test_the_first_of_the_running_is_never_taken(placed: tuple[SkipJoinMlfq, list[Job]]) -> None:
    order, jobs = placed
    view = view_of(running=jobs, needed=500)
    assert Recompute(order).moves(view, 0.0) == KvMoves(drop=(jobs[3], jobs[2], jobs[1]))


def test_jobs_without_kv_free_nothing(placed: tuple[SkipJoinMlfq, list[Job]]) -> None:
    order, jobs = placed
    jobs[3].computed_len = 0
    view = view_of(running=jobs, needed=5)
    assert Recompute(order).moves(view, 0.0) == KvMoves(drop=(jobs[2],))


def test_only_who_swaps_minds_a_full_host(placed: tuple[SkipJoinMlfq, list[Job]]) -> None:
    order, _ = placed
    policies: list[KvPolicy] = [Defer(order), Reactive(order), Recompute(order)]
    full = view_of(host_free=99)
    assert [each.start_room(full) for each in policies] == [math.inf, 0, math.inf]
    assert [each.start_room(view_of(free=7, host_free=105)) for each in policies] == [math.inf, 12, math.inf]


def policy(**options: object) -> CheapestVictim:
    return CheapestVictim(Gittins(DecodePrice(STEP, 64, 10_000)), **options)  # type: ignore[arg-type]


def moves_of(seen: KvView) -> KvMoves:
    """What is moved where the order knows exactly these jobs."""
    rule = policy()
    for each in (*seen.running, *seen.idle, *seen.offloaded):
        rule.order.add(each, 0.0)
    return rule.moves(seen, 0.0)


def view(*jobs: list[Job], **fields: Any) -> KvView:
    """Jobs that run, are idle and are offloaded."""
    named = dict(zip(("running", "idle", "offloaded"), jobs, strict=False))
    return view_of(**({"host_free": 100_000, "host_capacity": 100_000} | named | fields))


def resident(name: str, length: float, computed_len: int = 500, **fields: object) -> Job:
    return foreseen(name, length, prompt_len=computed_len, computed_len=computed_len, output_len=1, **fields)


def test_example_swap_or_compute_again() -> None:
    """Llama-2-7B, 2000 tokens of 512 KiB: 42 ms one way at 25 GB/s against 217 ms, so the victim is moved."""
    assert round(2000 * 512 * 1024 / 25e9 * 1e3) == 42
    assert round(2000 * 0.1085) == 217
    victim = resident("a", 50, 2000)
    assert moves_of(view(idle=[victim], needed=10)) == KvMoves(offload=(victim,))


def test_worst_idle_first_then_the_tail_of_the_running() -> None:
    short, long = resident("short", 50), resident("long", 900)
    running = [resident("first", 900), resident("last", 10), foreseen("new", 10)]
    assert moves_of(view(running, [long, short], needed=500)) == KvMoves((long,))
    full = view(running, [short, long], needed=1001, host_free=1000)
    assert moves_of(full) == KvMoves((long, short), drop=(running[1],))
    assert moves_of(view(running[:1], needed=10)) == KvMoves(), "the first of the running stays"
    enough = view(running, [long], [foreseen("far", 900, host_len=100)], free=250, needed=250)
    assert policy().moves(enough, 0.0) == KvMoves(), "no job is ranked: this order knows none of them"
    urgent = resident("urgent", 900, priority=-1)
    assert moves_of(view(idle=[urgent, short], needed=10)).offload == (short,), "urgent ones leave last"


@pytest.mark.parametrize(("computed_len", "host_free", "moved"), [(256, 256, 1), (255, 999, 0), (300, 299, 0)])
def test_dropped_if_small_or_the_host_is_full(computed_len: int, host_free: int, moved: int) -> None:
    moves = moves_of(view(idle=[resident("a", 50, computed_len)], needed=1, host_free=host_free))
    assert (len(moves.offload), len(moves.drop)) == (moved, 1 - moved)


def test_host_guard() -> None:
    assert policy().start_room(view(host_free=10_100, free=20, needed=5)) == 115
    assert policy().start_room(view(host_free=9_999, free=20)) == 0
    assert policy().start_room(KvView([], [], [], 0, 0, 0, 0)) == math.inf

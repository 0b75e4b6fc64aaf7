"""Defer, Reactive, Recompute: who gives way, where to, and who may start."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.interfaces import Job, KvMoves, KvPolicy
from policies.kv.enst_baselines import Defer, Reactive, Recompute
from policies.order.skip_join_mlfq import SkipJoinMlfq
from tests.unit.policies.kv.test_enst_offload import on_host, order_with, view_of


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


def test_what_they_are(placed: tuple[SkipJoinMlfq, list[Job]]) -> None:
    order, _ = placed
    policies: list[KvPolicy] = [Defer(order), Reactive(order), Recompute(order)]
    assert [(each.evicts, each.swaps) for each in policies] == [(False, False), (True, True), (True, False)]


def test_only_who_swaps_minds_a_full_host(placed: tuple[SkipJoinMlfq, list[Job]]) -> None:
    order, _ = placed
    policies: list[KvPolicy] = [Defer(order), Reactive(order), Recompute(order)]
    full = view_of(host_free=99)
    assert [each.start_room(full) for each in policies] == [math.inf, 0, math.inf]
    assert [each.start_room(view_of(free=7, host_free=105)) for each in policies] == [math.inf, 12, math.inf]

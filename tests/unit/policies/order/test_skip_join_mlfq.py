"""Skip-join MLFQ: the examples of the paper, and its bookkeeping under random use."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.errors import IntegrityError
from farsight.policies.interfaces import Job, Order
from farsight.policies.order.fcfs import Fcfs
from farsight.policies.order.skip_join_mlfq import SkipJoinMlfq
from farsight.policies.settings import MlfqRules
from tests.unit.policies.mlfq_server import Server, jobs, unit_mlfq

FIG_6 = (5, 2), (1, 2), (2, 2)


def ids(order: Order) -> list[str]:
    return [job.request_id for job in order.ranked(0.0)]


@pytest.mark.parametrize(
    ("order", "kills", "completions"),
    [
        (Fcfs(), False, (6, 8, 11)),
        (unit_mlfq(mlfq="no-preemption"), False, (9, 10, 11)),
        (unit_mlfq(), False, (11, 4, 5)),
        (unit_mlfq(strict=True), False, (11, 2, 5)),
        (unit_mlfq(demotes_to_front=True), False, (11, 2, 5)),
        (unit_mlfq(mlfq="preemption"), True, (19, 6, 13)),
    ],
    ids=["fcfs", "naive", "skip-join", "strict", "demotes-to-front", "naive-kill"],
)
def test_figure_6(order: Order, kills: bool, completions: tuple[float, ...]) -> None:
    server = Server(order, kills=kills)
    done = server.run(jobs(*FIG_6))
    assert tuple(done[name] for name in ("J1", "J2", "J3")) == completions


def test_a_job_stays_first_until_its_quantum_is_used_up() -> None:
    server = Server(unit_mlfq())
    done = server.run(jobs((3, 4), (1, 1), (1, 6)))
    sequence = [("J2", 1, 1), *(("J3", i, i + 1) for i in (1, 2, 3)), ("J1", 1, 7), ("J1", 2, 8)]
    sequence += [*(("J3", i, i + 5) for i in (4, 5, 6)), ("J1", 3, 12), ("J1", 4, 13)]
    assert server.tokens == sequence
    assert (done["J1"], done["J2"], done["J3"]) == (13, 1, 11)
    assert sum(done.values()) / 3 == pytest.approx(8.333, abs=5e-4)


def test_a_prefill_of_35_ms_joins_the_third_queue_of_40_ms() -> None:
    order = SkipJoinMlfq(StepCost(0.005, 0.001, 0.001, 0.0), SchedulerConfig(quantum_s=0.010))
    job = Job("a", 0.0, prompt_len=30, max_new_tokens=1)
    order.add(job, 0.0)
    assert order.level(job) == 3
    assert order.quantum_s(3) == pytest.approx(0.040)


def test_only_missing_tokens_count_for_the_level() -> None:
    order = SkipJoinMlfq(StepCost(0, 1, 1, 1, prefill_pair_s=1), SchedulerConfig(quantum_s=1.0))
    known = [Job(f"{cached_len}", 0.0, 100, 1, cached_len=cached_len) for cached_len in (0, 98, 100)]
    for job in known:
        order.add(job, 0.0)
    assert list(map(order.next_iteration_s, known)) == [100 + 5050, 2 + 99 + 100, 1 + 100], "one token in any case"
    assert (list(map(order.level, known)), ids(order)) == ([14, 9, 8], ["100", "98", "0"])
    whole = known[-1]
    whole.output_len = 3
    for computed_len, wanted in ((102, 1 + 103), (101, 2 + 102 + 103)):
        whole.computed_len = computed_len
        assert order.next_iteration_s(whole) == wanted


def test_a_job_whose_kv_was_dropped_has_a_first_iteration_again() -> None:
    order = unit_mlfq()
    kept, dropped = (Job(name, 0.0, prompt_len=1, max_new_tokens=50) for name in ("kept", "dropped"))
    for job in (kept, dropped):
        order.add(job, 0.0)
        job.output_len, job.computed_len = 1, 1
        order.ran(job, 1.0, 1.0)
        assert order.level(job) == 2
        job.output_len, job.computed_len = 20, 20
    dropped.computed_len = 0
    assert [order.next_iteration_s(job) for job in (kept, dropped)] == [1, 21]
    kept.computed_len, dropped.computed_len = 21, 10
    kept.output_len += 1
    for job in (kept, dropped):
        order.ran(job, 2.0, 3.0)
    assert (order.level(kept), order.level(dropped)) == (3, 2), "its prefill is under way"
    assert ids(order) == ["dropped", "kept"]
    uploaded = Job("a", 0.0, prompt_len=10, max_new_tokens=50, output_len=5, host_len=14)
    assert order.next_iteration_s(uploaded) == 1, "its KV is on the host"


def test_a_prefill_in_components_goes_on_before_others_and_sinks_only_at_its_end() -> None:
    order = unit_mlfq()
    long, short = Job("long", 0.0, 8, 9), Job("short", 0.0, 1, 9)
    order.add(long, 0.0)
    long.computed_len = 4
    order.ran(long, 9.0, 9.0)
    order.add(short, 9.0)
    assert ids(order) == ["long", "short"]
    assert order.slice_s(long) == 0
    long.computed_len, long.output_len = 8, 1
    order.ran(long, 4.0, 13.0)
    assert ids(order) == ["short", "long"]
    assert order.level(long) == 5
    order.check_integrity()


def test_a_prefill_that_ends_within_its_quantum_goes_back_to_its_place() -> None:
    order = unit_mlfq()
    first, second = Job("first", 0.0, 8, 9), Job("second", 0.0, 8, 9)
    order.add(first, 0.0)
    order.add(second, 0.0)
    second.computed_len = 2
    order.ran(second, 2.0, 2.0)
    assert ids(order) == ["second", "first"]
    second.computed_len, second.output_len = 8, 1
    order.ran(second, 2.0, 4.0)
    assert ids(order) == ["first", "second"]
    assert order.slice_s(second) == 4


def test_only_those_that_ran_attain_time() -> None:
    order = unit_mlfq()
    ran, waits = jobs((4, 9), (4, 9))
    order.add(ran, 0.0)
    order.add(waits, 0.0)
    ran.computed_len, ran.output_len = 4, 1
    order.ran(ran, 3.0, 3.0)
    assert order.slice_s(ran) == 1
    assert order.slice_s(waits) == 4
    assert (order.waited_s(ran, 5.0), order.waited_s(waits, 5.0)) == (2, 5)


def test_the_starving_are_promoted_with_time_for_one_iteration() -> None:
    order = unit_mlfq(starve_limit_s=10)
    (job,) = jobs((6, 9))
    order.add(job, 0.0)
    order.refresh(9.9)
    assert order.level(job) == 4
    order.refresh(10.0)
    assert (order.level(job), order.slice_s(job), order.waited_s(job, 10.0)) == (1, 6, 0)
    job.computed_len, job.output_len = 6, 1
    order.ran(job, 6.0, 16.0)
    assert order.level(job) == 2


def test_the_last_of_a_given_number_of_levels_has_no_bound() -> None:
    order = unit_mlfq(num_levels=3)
    (job,) = jobs((100, 9))
    order.add(job, 0.0)
    job.computed_len, job.output_len = 100, 1
    order.ran(job, 1e6, 1e6)
    assert order.level(job) == 3
    assert order.slice_s(job) == math.inf
    assert [order.quantum_s(level) for level in (1, 2, 3)] == [1, 2, math.inf]


@pytest.mark.parametrize("strict", [False, True])
def test_a_quantum_that_was_used_in_parts_is_used_up(strict: bool) -> None:
    """Eight times 0.1 is 1.1e-16 less than 0.8: no iteration fits into the rest, and each would be cut off at once."""
    order = unit_mlfq(quantum_s=0.8, mlfq="preemption", strict=strict)
    (job,) = jobs((4, 1))
    order.add(job, 0.0)
    for i in range(8):
        assert order.level(job) == 1 and order.slice_s(job) > 0.09
        order.ran(job, 0.1, 0.1 * (i + 1))
    assert order.level(job) == 2 and order.slice_s(job) == 1.6
    order.check_integrity()


def test_broken_bookkeeping_is_found() -> None:
    order = unit_mlfq()
    (job,) = jobs((4, 1))
    order.add(job, 0.0)
    order._places["J1"].level = 2
    with pytest.raises(IntegrityError):
        order.check_integrity()


SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 8), st.integers(0, 60)), min_size=1, max_size=20)


@settings(max_examples=60, deadline=None)
@given(SHAPES, st.integers(1, 4), st.sampled_from([5.0, 20.0]))
def test_nobody_starves(shapes: list[tuple[int, int, int]], batch_size: int, starve_limit_s: float) -> None:
    """Who waits is promoted after the limit and one iteration, and then waits for at most one turn of each other."""
    arrivals = [Job(f"J{i}", at, first, num) for i, (first, num, at) in enumerate(shapes)]
    turns_s = sum(first + num for first, num, _ in shapes)
    server = Server(unit_mlfq(starve_limit_s=starve_limit_s), batch_size)
    done = server.run(arrivals)
    assert len(done) == len(arrivals)
    assert max(server.waited.values()) <= starve_limit_s + max(first for first, _, _ in shapes) + turns_s


def test_without_promotion_a_stream_of_short_jobs_starves_a_long_one() -> None:
    def first_token_at(starve_limit_s: float) -> float:
        long = Job("long", 0.0, 16, 1)
        server = Server(unit_mlfq(starve_limit_s=starve_limit_s))
        server.run([long, *(Job(f"s{i}", float(i), 1, 1) for i in range(200))])
        return next(at for name, _, at in server.tokens if name == "long")

    assert first_token_at(math.inf) == 216
    assert first_token_at(30.0) == 30 + 1 + 16, "after the one that came just before its promotion"


@settings(max_examples=100, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["skip-join", "no-preemption"]),
    st.booleans(),
    st.sampled_from([0, 1, 3]),
)
def test_bookkeeping_and_ranks_hold_under_random_use(seed: int, mlfq: str, to_front: bool, num_levels: int) -> None:
    rng = np.random.default_rng(seed)
    order = unit_mlfq(mlfq=mlfq, demotes_to_front=to_front, num_levels=num_levels, starve_limit_s=12.0)
    known: list[Job] = []
    numbers = itertools.count()
    now = 0.0
    for _ in range(40):
        now += float(rng.integers(0, 3))
        action = rng.integers(5)
        if action == 0 or not known:
            job = Job(f"J{next(numbers)}", now, int(rng.integers(1, 30)), 99, priority=int(rng.integers(2)))
            job.deadline_at = float(rng.choice([1.0, 2.0, math.inf]))
            order.add(job, now)
            known.append(job)
        elif action == 1:
            gone = known.pop(int(rng.integers(len(known))))
            order.remove(gone)
            order.remove(gone)  # unknown by now
        elif action == 2:
            known[int(rng.integers(len(known)))].computed_len = 0
        elif action == 3:
            order.refresh(now)
            assert all(order.waited_s(job, now) < 12 or order.level(job) == 1 for job in known)
        else:
            job = next(iter(order.ranked(now)))
            job.computed_len = min(job.known_len, job.computed_len + 10)
            job.output_len += job.computed_len == job.known_len
            order.ran(job, float(rng.integers(1, 6)), now)
        order.check_integrity()
        ranked = list(order.ranked(now))
        assert sorted(ids(order)) == sorted(job.request_id for job in known)
        assert [job.urgency for job in ranked] == sorted(job.urgency for job in known)
        assert order.num_in_top(2) == sum(order.level(job) <= 2 for job in known)


def prefilled(job: Job, order: SkipJoinMlfq, duration_s: float = 1.0, now: float = 0.0) -> None:
    """Its first iteration is over."""
    job.computed_len, job.output_len = job.prompt_len, 1
    order.ran(job, duration_s, now)


def test_a_prefill_under_way_takes_its_part_of_the_budget() -> None:
    order = unit_mlfq(max_prompt_tokens=6)
    long, short, low = jobs((16, 9), (4, 9), (16, 9))
    order.add(low, 0.0)
    prefilled(low, order, duration_s=16.0)
    order.add(long, 0.0)
    order.add(short, 0.0)
    long.computed_len = 8
    order.ran(long, 8.0, 8.0)
    assert ids(order) == ["J1", "J3", "J2"], "8 tokens are left of the first"
    long.computed_len = 12
    order.ran(long, 4.0, 12.0)
    assert ids(order) == ["J1", "J2", "J3"], "4 tokens are left of it"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 10, 40]))
def test_ranks_are_those_of_a_sort_by_budget_and_level(seed: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    order = unit_mlfq(max_prompt_tokens=budget)
    known: list[Job] = []
    for i in range(30):
        job = Job(f"J{i}", float(i), int(rng.integers(1, 30)), 99, priority=int(rng.integers(2)))
        order.add(job, float(i))
        known.append(job)
        job = known[int(rng.integers(len(known)))]
        if job.output_len or rng.integers(2):
            job.computed_len = job.known_len
            job.output_len += 1
            order.ran(job, float(rng.integers(1, 20)), float(i))
        order.check_integrity()
    left, keys = budget, []
    for job in order.ranked(30.0):
        keys.append((job.urgency, job.output_len == 0 and left <= 0, order.level(job)))
        left -= 0 if job.output_len else job.prompt_len
    assert keys == sorted(keys)
    assert any(is_late for _, is_late, _ in keys), "or nothing was tried"
    assert order.among(known[::-1], 30.0) == list(order.ranked(30.0))


def test_a_job_sinks_to_where_its_next_iteration_fits() -> None:
    order = SkipJoinMlfq(StepCost(0, 1, 5, 0), SchedulerConfig(quantum_s=1.0))
    (job,) = jobs((1, 9))
    order.add(job, 0.0)
    job.computed_len, job.output_len = 1, 1
    order.ran(job, 1.0, 1.0)
    assert order.level(job) == 4, "tokens of 5 s need the quantum of 8 s"


def test_the_first_quantum_follows_what_a_step_costs_but_not_below_its_bound() -> None:
    order = SkipJoinMlfq(StepCost(0.01, 1e-4, 0, 0), SchedulerConfig(quantum_s=0.02))
    early = Job("early", 0.0, prompt_len=300, max_new_tokens=100)
    order.add(early, 0.0)
    assert (order.quantum_s(1), order.level(early)) == (0.02, 2)
    order.price(StepCost(0.1, 1e-4, 0, 0), 1000)
    late = Job("late", 0.0, prompt_len=300, max_new_tokens=100)
    order.add(late, 0.0)
    assert (order.quantum_s(1), order.quantum_s(3), order.above_s(3)) == pytest.approx((0.1, 0.4, 0.3))
    assert (order.level(early), order.level(late)) == (2, 2), "0.13 s fit the second quantum"
    order.check_integrity()
    order.price(StepCost(0.001, 1e-4, 0, 0), 1000)
    assert order.quantum_s(1) == 0.02
    config = SchedulerConfig(quantum_s=0.01)
    fixed = SkipJoinMlfq(StepCost(0.01, 1e-4, 0, 0), config, MlfqRules(follows_cost=False))
    fixed.price(StepCost(0.1, 1e-4, 0, 0), 1000)
    assert fixed.quantum_s(1) == 0.01

"""Groups by prefix hits, and what orders, hits and selection keep up to date, against plain versions of them."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from benchmarks.decisions.deep_queue import arrivals
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.costs import StepCost
from farsight.core.messages.plans import CachedRun, KVCacheEvent
from farsight.core.request import Request, SamplingParams
from farsight.kvcache.cache_journal import CacheMirror
from farsight.policies.batching.hrrn import HrrnOrder
from farsight.policies.compose import build_scheduler
from farsight.policies.interfaces import Job, Order, ScheduledRequest, make_scheduled
from farsight.policies.order import gittins, job_table
from farsight.policies.order.hit_groups import HitGroups, quotas
from farsight.policies.order.job_table import Kept, in_order
from farsight.policies.order.skip_join_mlfq import PROMOTIONS_AT_ONCE, SkipJoinMlfq
from farsight.policies.replica import mirror as replica_mirror
from farsight.policies.replica.events import Event, Instruction
from farsight.policies.replica.mirror import ReplicaHits
from farsight.policies.replica.scheduler import ReplicaScheduler, SchedulerLimits
from farsight.policies.settings import MlfqRules, PolicySettings
from farsight.simulator.cluster.latency import A100_7B
from farsight.simulator.cluster.records import Record, Recorder
from farsight.simulator.cluster.replica import Replica, ReplicaShape
from farsight.simulator.traffic.workload import as_request
from tests.unit.policies.batch_jobs import seeds

COST = StepCost(0.01, 0.0001, 0.00002, 2e-7)


@pytest.mark.parametrize("seed", range(15))
def test_rows_in_order_are_those_of_a_whole_sort(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_table, "AT_ONCE", 3)
    rng = np.random.default_rng(seed)
    num = int(rng.integers(0, 60))
    columns = [rng.integers(0, most, num).astype(np.float64) for most in rng.integers(1, 8, int(rng.integers(1, 4)))]
    wanted = np.lexsort([*reversed(columns)]).tolist() if num else []
    assert list(in_order(columns)) == wanted


def test_what_was_given_is_given_again_and_the_source_read_once() -> None:
    read: list[int] = []

    def source() -> Iterator[list[int]]:
        for run in ([0, 1], [2], [3, 4]):
            read.extend(run)
            yield run

    kept = Kept(source())
    first = iter(kept)
    assert [next(first), next(first)] == [0, 1]
    assert read == [0, 1]
    assert list(kept) == list(kept) == [0, 1, 2, 3, 4]
    assert read == [0, 1, 2, 3, 4]


def plain_hit_groups(jobs: Iterable[Job], order: HitGroups, num_slots: int, num_groups: int) -> list[Job]:
    """Preble's rule, from the start: running jobs, then by urgency what each group's free slots take, then the rest."""
    jobs = sorted(jobs, key=lambda job: (job.urgency, job.arrived_at))
    room = quotas(num_groups, num_slots)
    ranked = [job for job in jobs if job.is_resident]
    for job in ranked:
        room[order.group(job)] -= 1
    waiting = [job for job in jobs if not job.is_resident]
    for urgency in sorted({job.urgency for job in waiting}):
        rest: list[Job] = []
        for group in reversed(range(num_groups)):
            members = [job for job in waiting if job.urgency == urgency and order.group(job) == group]
            num = min(max(0, room[group]), len(members))
            room[group] -= num
            ranked += members[:num]
            rest += members[num:]
        ranked += rest
    return ranked


@pytest.mark.parametrize("seed", seeds(6, nightly=24))
def test_hit_groups_are_those_of_a_look_at_everybody(seed: int) -> None:
    rng = random.Random(seed)
    order, jobs = HitGroups(9, 4), list[Job]()
    for step in range(150):
        match rng.choice(["add", "add", "remove", "hits", "runs"]):
            case "add":
                job = Job(f"j{step}", float(rng.randrange(5)), 40, 10, rng.randrange(2), cached_len=rng.randrange(41))
                jobs.append(job)
                order.add(job, 0.0)
            case "remove" if jobs:
                gone = jobs.pop(rng.randrange(len(jobs)))
                order.remove(gone)
                order.remove(gone)  # unknown by now
            case "hits" if jobs:
                job = rng.choice(jobs)
                job.cached_len = rng.randrange(41)
                order.changed(job)
            case "runs" if jobs:
                job = rng.choice(jobs)
                job.computed_len = 0 if job.computed_len else 5
                order.changed(job)
        assert list(order.ranked(0.0)) == plain_hit_groups(jobs, order, 9, 4)
        order.check_integrity()


@pytest.mark.parametrize("seed", seeds(8, nightly=12))
def test_response_ratios_are_those_of_a_look_at_everybody(seed: int) -> None:
    rng = random.Random(seed)

    def remaining_s(cost: StepCost, job: Job) -> float:
        return cost.base_s * (job.max_new_tokens - job.output_len)

    def ratio(job: Job, now: float) -> float:
        service_s = remaining_s(cost, job)
        return 1 + (now - job.arrived_at) / service_s if service_s else math.inf

    order, jobs, cost = HrrnOrder(remaining_s, COST), list[Job](), COST
    assert not order.preemptive
    for step in range(120):
        now = float(step)
        match rng.choice(["add", "add", "remove", "runs", "price"]):
            case "add":
                jobs.append(Job(f"j{step}", now - rng.randrange(3), 1, rng.randrange(1, 30), rng.randrange(2)))
                order.add(jobs[-1], now)
            case "remove" if jobs:
                gone = jobs.pop(rng.randrange(len(jobs)))
                order.remove(gone)
                order.remove(gone)  # unknown by now
            case "runs" if jobs:
                job = rng.choice(jobs)
                assert order.slice_s(job) == math.inf
                assert order.ratio(job, now) == pytest.approx(ratio(job, now))
                job.output_len = rng.randrange(job.max_new_tokens + 1)
                order.changed(job)
            case "price":
                cost = replace(cost, base_s=rng.random())
                order.price(cost, 100)
        plain = sorted(jobs, key=lambda job: (job.urgency, -ratio(job, now), job.arrived_at))
        assert list(order.ranked(now)) == plain


class Worker:
    """A prefix cache of a few trees of blocks: a block's predecessors are cached before it and evicted after it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.seq, self.cached = rng, 0, set[int]()

    @staticmethod
    def chain(family: int, num: int) -> tuple[int, ...]:
        return tuple(family * 1000 + index for index in range(1, num + 1))

    def notice(self) -> KVCacheEvent:
        rng = self.rng
        self.seq += 1
        evicted = []
        for family in range(3):
            length = self.length(family)
            for name in reversed(self.chain(family, length)[rng.randrange(length + 1) :] if rng.random() < 0.4 else ()):
                self.cached.discard(name)
                evicted.append(name)
        runs = []
        for family in range(3):
            length = self.length(family)
            new = self.chain(family, length + rng.randrange(4))[length:]
            if new and rng.random() < 0.6:
                runs.append(CachedRun(new[0] - 1 if length else 0, new))
                self.cached.update(new)
        if rng.random() < 0.1:
            whole = [CachedRun(0, self.chain(f, self.length(f))) for f in range(3) if self.length(f)]
            return KVCacheEvent(self.seq, True, tuple(whole))
        stored = {name for run in runs for name in run.hashes}
        return KVCacheEvent(self.seq, self.seq == 1, tuple(runs), tuple(each for each in evicted if each not in stored))

    def length(self, family: int) -> int:
        return sum(name // 1000 == family for name in self.cached)


@pytest.mark.parametrize("at_once", [3, 1000])
@pytest.mark.parametrize("seed", seeds(5, nightly=20))
def test_hits_are_those_of_a_look_at_everybody(seed: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With slices, once nothing is due; without, after each notice."""
    monkeypatch.setattr(replica_mirror, "LOOK_UPS", at_once)
    rng = random.Random(seed)
    worker, cache, told = Worker(rng), CacheMirror(), list[Job]()
    hits, everyone = ReplicaHits(cache, told.append, 4), dict[str, ScheduledRequest]()
    for step in range(80):
        match rng.choice(["add", "add", "remove", "notice", "notice", "runs"]):
            case "add":
                num, own = rng.randrange(12), rng.randrange(3)
                hashes = Worker.chain(rng.randrange(3), num) + tuple(-(step * 10 + each) - 1 for each in range(own))
                request = Request(
                    f"r{step}", 0, "i", (1,) * (4 * (num + own) + 1), SamplingParams(9), prefix_hashes=hashes
                )
                everyone[request.request_id] = tracked = make_scheduled(request, 0.0)
                hits.add(tracked)
            case "remove" if everyone:
                name = rng.choice(list(everyone))
                del everyone[name]
                hits.remove(name)
            case "runs" if everyone:
                tracked = rng.choice(list(everyone.values()))
                tracked.num_blocks = 0 if tracked.num_blocks else 2
                if tracked.num_blocks:
                    tracked.cached_len += 4
                    hits.reported(tracked)
            case "notice":
                assert hits.apply([worker.notice()], everyone)
                while hits.num_due:
                    hits.apply([], everyone)
                for tracked in everyone.values():
                    if not tracked.num_blocks:
                        wanted = cache.num_cached(tracked.request.prefix_hashes) * 4
                        assert tracked.cached_len == wanted
                hits.check_integrity()


class Plain:
    """An order that ranks everybody again whenever it is asked, by what it would say of all its jobs."""

    def __init__(self, order: Order) -> None:
        self._order = order

    def __getattr__(self, name: str) -> object:
        if name == "among":
            raise AttributeError(name)
        return getattr(self._order, name)

    def ranked(self, now: float) -> Iterator[Job]:
        order = self._order
        if isinstance(order, gittins.Gittins):
            order._ranking = None
            order._rank_due()
            jobs = order._table.jobs
            for job in jobs:
                order.changed(job)
            keys = order._keys(slice(None), now)
            return iter([jobs[row] for row in np.lexsort(list(reversed(keys))).tolist()])
        return iter(list(order.ranked(now)))


@pytest.mark.parametrize(("seed", "num_requests"), [(0, 45), pytest.param(1, 90, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "preset", ["farsight-mean", "farsight", "fastserve", "fastserve-reactive", "fastserve-recompute"]
)
def test_a_scheduler_says_the_same_as_one_that_ranks_everybody_at_each_point(
    preset: str, seed: int, num_requests: int
) -> None:
    """The same requests, steps and reports; memory is short, hosts fill up, and starts are barred at times."""
    logs = []
    for is_plain in (False, True):
        settings = PolicySettings(SchedulerConfig(gamma=0.1 * (seed % 2), max_gap_ms=0.0), cost=A100_7B.cost)
        scheduler = build_scheduler(preset, SchedulerLimits(12, 3), settings)
        if is_plain:
            scheduler.order = scheduler.selector.order = Plain(scheduler.order)  # type: ignore[assignment]
        logs.append(history(scheduler, seed, num_requests))
    assert logs[0] == logs[1]


def history(scheduler: ReplicaScheduler, seed: int, num_requests: int) -> list[str]:
    """All that the scheduler says while so many requests run through a small replica."""
    said: list[str] = []
    handle = scheduler.handle

    def heard(event: Event, now: float) -> list[Instruction]:
        out = handle(event, now)
        said.extend(map(repr, out))
        scheduler.check_integrity()
        return out

    scheduler.handle = heard  # type: ignore[method-assign]
    shape = ReplicaShape(150, 16, 120, 12, 512, look_every=3)
    replica = Replica("0", scheduler, shape, A100_7B, Recorder(), lambda *_: None, lambda *_: None)
    rng, source = random.Random(seed), arrivals(seed)
    for number in range(10 * num_requests // 3):
        if number < num_requests:
            arrival = next(source)
            arrival = replace(arrival, prompt_len=min(arrival.prompt_len, 600), output_len=min(arrival.output_len, 80))
            now = replica.wakes_at if number else 0.0
            replica.submit([(as_request(arrival), Record(arrival))], now)
        for _ in range(rng.randrange(3)):
            if replica.wakes_at < float("inf"):
                replica.wake(replica.wakes_at)
    return said


def test_a_new_history_is_taken_in_by_slices_the_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 wait when the history is read; each point ranks so many of them, and in the end all are as if at once."""
    ranked: list[int] = []
    rank = gittins.gittins_rank

    def counted(costs: gittins.FloatArray, weights: gittins.FloatArray) -> gittins.FloatArray:
        ranked.append(len(costs))
        return rank(costs, weights)

    monkeypatch.setattr(gittins, "gittins_rank", counted)
    order, whole = (gittins.Gittins(gittins.DecodePrice(COST, 32, 100_000)) for _ in range(2))
    jobs = [Job(f"j{number}", float(number), 10, 200 + number % 97) for number in range(1000)]
    for job in jobs:
        order.add(job, 0.0)
        whole.add(job, 0.0)
    order.refresh(0.0)
    whole.refresh(0.0)
    best = [job.request_id for job in order.ranked(0.0)][: gittins.STALE_AT_ONCE]
    ended = [Job(f"e{number}", 0.0, 10, 900, output_len=20 + 7 * number) for number in range(50)]
    for job in ended:
        order.learn(job, censored=False)
    ranked.clear()
    order.refresh(0.0)
    assert sum(ranked) == gittins.STALE_AT_ONCE
    monkeypatch.setattr(gittins, "STALE_AT_ONCE", 1000)
    for job in ended:
        whole.learn(job, censored=False)
    whole.refresh(0.0)
    first = [job for job in jobs if job.request_id in set(best)]
    assert order.rank(first).tolist() == whole.rank(first).tolist(), "the head of the queue is up to date at once"
    monkeypatch.setattr(gittins, "STALE_AT_ONCE", 256)
    for _ in range(3):
        order.refresh(0.0)
    assert order.rank(jobs).tolist() == whole.rank(jobs).tolist()


def test_thousands_that_starve_are_promoted_some_at_each_point() -> None:
    order = SkipJoinMlfq(
        COST, SchedulerConfig(quantum_s=0.01, starve_limit_s=3.0), MlfqRules(False, starve_check_every=10)
    )
    jobs = [Job(f"j{number}", 0.0, 2000, 10) for number in range(200)]
    for job in jobs:
        order.add(job, 0.0)
    assert all(order.level(job) > 1 for job in jobs)
    promoted: list[Job] = []
    order.on_move = lambda job, kind, now: promoted.append(job)
    nums = []
    for _ in range(22):
        order.refresh(4.0)
        nums.append(len(promoted))
        order.check_integrity()
    assert nums == [0] * 9 + [min(200, PROMOTIONS_AT_ONCE * point) for point in range(1, 14)]
    assert promoted == jobs, "who has waited longest comes first"


def hit_job(name: str, cached: int = 0, prompt: int = 100, at: float = 0.0, priority: int = 0) -> Job:
    return Job(name, at, prompt, 10, priority=priority, cached_len=cached)


def filled(order: HitGroups, num: int) -> Counter[int]:
    return Counter(order.group(each) for each in itertools.islice(order.ranked(0.0), num))


@pytest.mark.parametrize(
    ("cached", "prompt", "group"), [(63, 100, 6), (100, 100, 9), (0, 100, 0), (9, 100, 0), (10, 100, 1), (99, 100, 9)]
)
def test_the_group_is_the_hit_ratio_in_tenths(cached: int, prompt: int, group: int) -> None:
    """The paper's example: 63 of 100 tokens cached, P = 10, group 6."""
    assert HitGroups(55).group(hit_job("r", cached, prompt)) == group


def test_one_free_slot_at_a_time_starves_nobody() -> None:
    """Each end frees one slot; a hundred of the highest group wait all the time."""
    order = HitGroups(10, num_groups=3)
    low, num_top = hit_job("low", 0), 0
    running: list[Job] = []
    order.add(low, 0.0)
    for _ in range(30):
        while sum(each not in running for each in order.ranked(0.0)) < 100:
            num_top += 1
            order.add(hit_job(f"top-{num_top}", 100, at=1.0), 0.0)
        while len(running) < 10:
            chosen = next(each for each in order.ranked(0.0) if not each.is_resident)
            chosen.computed_len = 1
            order.changed(chosen)
            running.append(chosen)
        if low.is_resident:
            return
        order.remove(running.pop(0))
    pytest.fail("the lowest group never got its slot")


def test_urgency_comes_before_hits() -> None:
    order = HitGroups(4)
    hit, urgent, deadline = hit_job("hit", 100), hit_job("urgent", 0, priority=-1), hit_job("deadline", 0)
    deadline.deadline_at = 5.0
    for each in (hit, urgent, deadline):
        order.add(each, 0.0)
    assert [each.request_id for each in order.ranked(0.0)] == ["urgent", "deadline", "hit"]


@pytest.mark.parametrize("seed", range(20))
def test_any_batch_holds_each_groups_share(seed: int) -> None:
    rng = random.Random(seed)
    num_groups, num_slots = rng.randint(1, 6), rng.randint(1, 40)
    order = HitGroups(num_slots, num_groups)
    jobs = [hit_job(f"r{i}", rng.randint(0, 100), at=rng.random()) for i in range(rng.randint(0, 80))]
    for each in jobs:
        order.add(each, 0.0)
    ranked = list(order.ranked(0.0))
    assert sorted(each.request_id for each in ranked) == sorted(each.request_id for each in jobs)
    waiting = Counter(order.group(each) for each in jobs)
    taken = filled(order, num_slots)
    weights = num_groups * (num_groups + 1) / 2
    shares = {group: math.floor(num_slots * (group + 1) / weights) for group in range(num_groups)}
    assert all(taken[group] >= min(waiting[group], share) for group, share in shares.items())
    beyond = [group for group, share in shares.items() if taken[group] > share]
    assert all(taken[above] == waiting[above] for group in beyond for above in range(group + 1, num_groups))
    for group in range(num_groups):
        arrivals = [each.arrived_at for each in ranked if order.group(each) == group]
        assert arrivals == sorted(arrivals)

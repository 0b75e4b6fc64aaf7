"""Fair shares on a small simulated replica: the bound between backlogged tenants, and no slot left free."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from core.costs import A100_7B, row_shares
from policies.interfaces import Job, Order
from policies.order.fcfs import Fcfs
from policies.tenancy.fair_shares import AHEAD_S, FEW, FairShares, ServiceCounters

STEP_S = 0.05
CAPACITY = 20_000
NUM_SLOTS = 8


def job_of(tenant: str, name: object, prompt_len: int = 10, priority: int = 0, weight: float = 1.0) -> Job:
    return Job(f"{tenant}/{name}", 0.0, prompt_len, 10, priority=priority, tenant=tenant, weight=weight)


class Unranked(Fcfs):
    """First come, first served, without ``among``."""

    among = None  # type: ignore[assignment]


@dataclass
class Replica:
    """Slots that run jobs step by step.

    Attributes:
        preempts: Whether a job runs only as long as the walk has it among the first; else it runs to its end.
        delay: Steps after which they are charged.
        in_flight: Charges that the scheduler does not know yet, the oldest first.
        widest: The largest difference of the counters of two tenants that both had jobs waiting.
        dearest: The largest charge of one job in all, over its tenant's weight.
    """

    order: Order = field(default_factory=Fcfs)
    shares: FairShares = field(default_factory=lambda: FairShares(NUM_SLOTS))
    preempts: bool = False
    delay: int = 0
    now: float = 0.0
    running: list[Job] = field(default_factory=list)
    jobs: dict[str, Job] = field(default_factory=dict)
    lens: dict[str, int] = field(default_factory=dict)
    charged: dict[str, float] = field(default_factory=dict)
    in_flight: list[dict[str, float]] = field(default_factory=list)
    widest: float = 0.0
    dearest: float = 0.0
    widest_share: float = 0.0
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.shares.capacity = CAPACITY

    def send(self, tenant: str, prompt_len: int, output_len: int, weight: float = 1.0, priority: int = 0) -> Job:
        job = job_of(tenant, next(self._numbers), prompt_len, priority, weight)
        self.order.add(job, self.now)
        self.shares.add(job)
        self.jobs[job.request_id] = job
        self.lens[job.request_id] = output_len
        return job

    def waiting(self, tenant: str) -> list[Job]:
        return [job for job in self.jobs.values() if job.tenant == tenant and job not in self.running]

    def served(self, tenant: str) -> float:
        return sum(value for name, value in self.charged.items() if name.startswith(f"{tenant}/"))

    def leave(self, job: Job) -> None:
        self.order.remove(job)
        self.shares.remove(job)
        del self.jobs[job.request_id]
        if job in self.running:
            self.running.remove(job)

    def step(self) -> None:
        self._choose()
        assert len(self.running) == min(NUM_SLOTS, len(self.jobs)), "a slot is free and a job waits"
        if not self.running:
            return
        self.now += STEP_S
        rows = [(job.computed_len, job.known_len - job.computed_len or 1) for job in self.running]
        step: dict[str, float] = {}
        for job, share in zip(self.running, row_shares(A100_7B, rows, NUM_SLOTS, CAPACITY), strict=True):
            self.widest_share = max(self.widest_share, self.shares.share(job) / job.weight)
            self.charged[job.request_id] = self.charged.get(job.request_id, 0.0) + share * STEP_S
            self.dearest = max(self.dearest, self.charged[job.request_id] / job.weight)
            step[job.tenant] = step.get(job.tenant, 0.0) + share * STEP_S
        self.in_flight.append(step)
        if len(self.in_flight) > self.delay:
            for tenant, gpu_s in self.in_flight.pop(0).items():
                self.shares.charge(tenant, gpu_s)
        for job in list(self.running):
            job.computed_len = job.known_len
            job.output_len += 1
            if job.output_len == self.lens[job.request_id]:
                self.leave(job)
        self.shares.check_integrity()

    def _choose(self) -> None:
        running = [] if self.preempts else self.running
        walk = self.shares.ranked(self.order, self.now, lambda job: job not in running, running)
        self.running = running + list(itertools.islice(walk, NUM_SLOTS - len(running)))

    def note(self, *tenants: str) -> None:
        """Notes the difference between these tenants, if all of them have jobs waiting."""
        if all(map(self.waiting, tenants)):
            counters = [self.shares.counters[tenant] for tenant in tenants]
            self.widest = max(self.widest, max(counters) - min(counters))

    def bound(self) -> float:
        """docs/policies/fair_shares.md."""
        unknown = self.delay * STEP_S
        kept = 0.0 if self.preempts else self.dearest
        return NUM_SLOTS * (kept + AHEAD_S * self.widest_share) + unknown + STEP_S


Draw = Callable[[], tuple[int, int]]


@pytest.mark.parametrize("preempts", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_two_backlogged_tenants_stay_within_the_bound(seed: int, preempts: bool) -> None:
    """One sends many short requests, the other few long ones; both always have jobs waiting."""
    rng = random.Random(seed)
    replica = Replica(preempts=preempts, delay=seed)
    draws: dict[str, Draw] = {
        "small": lambda: (rng.randrange(1, 200), rng.randrange(1, 20)),
        "large": lambda: (rng.randrange(500, 4000), rng.randrange(20, 100)),
    }
    for _ in range(3000):
        for tenant, draw in draws.items():
            while len(replica.waiting(tenant)) < NUM_SLOTS + 1:
                replica.send(tenant, *draw())
        replica.step()
        replica.note(*draws)
    small, large = replica.served("small"), replica.served("large")
    assert 0 < replica.widest <= replica.bound()
    assert abs(small - large) <= 2 * replica.bound()
    assert min(small, large) > replica.bound()  # the run is long enough for the bound to mean something


def test_first_come_first_served_would_break_the_bound() -> None:
    """The check can fail: with the same traffic one tenant's name for all starves the one that sends less."""
    ratios = []
    for names in (("flood", "calm"), ("all", "all")):
        replica = Replica()
        sent: dict[str, list[str]] = {"flood": [], "calm": []}
        for _ in range(1500):
            sent["flood"].append(replica.send(names[0], 100, 40).request_id)
            if len([name for name in sent["calm"] if name in replica.jobs]) < 2 * NUM_SLOTS:
                sent["calm"].append(replica.send(names[1], 100, 40).request_id)
            replica.step()
        calm, flood = (sum(replica.charged.get(name, 0.0) for name in sent[who]) for who in ("calm", "flood"))
        ratios.append(calm / flood)
    assert ratios[0] == pytest.approx(1.0, abs=0.1)
    assert ratios[1] < 0.5


@pytest.mark.parametrize("preempts", [False, True])
def test_weights_divide_the_service(preempts: bool) -> None:
    replica = Replica(preempts=preempts)
    for _ in range(3000):
        for tenant, weight in (("gold", 3.0), ("plain", 1.0)):
            while len(replica.waiting(tenant)) < NUM_SLOTS:
                replica.send(tenant, 100, 10, weight)
        replica.step()
        replica.note("gold", "plain")
    assert replica.served("gold") / replica.served("plain") == pytest.approx(3.0, rel=0.05)
    assert replica.widest <= replica.bound()


def test_who_cancels_at_once_is_charged() -> None:
    """A tenant that aborts each request after one step gets no more of the replica than the other."""
    replica = Replica()
    for _ in range(2000):
        while len(replica.waiting("honest")) < NUM_SLOTS:
            replica.send("honest", 100, 20)
        while len(replica.waiting("hostile")) < NUM_SLOTS:
            replica.send("hostile", 2000, 100)
        replica.step()
        for job in [job for job in replica.running if job.tenant == "hostile"]:
            replica.leave(job)
    assert replica.served("hostile") == pytest.approx(replica.served("honest"), rel=0.1)


def test_absent_tenants_are_charged_for_what_they_left_behind() -> None:
    """All jobs of a tenant are aborted before the worker's report tells what they took."""
    counters = ServiceCounters()
    counters.enter("other")
    for _ in range(3):
        counters.enter("hostile")
        counters.leave("hostile")
        counters.charge("hostile", 2.0)
    counters.enter("hostile")
    assert counters["hostile"] == pytest.approx(6.0)


def test_long_prompts_and_large_limits_buy_nothing() -> None:
    """What is charged is what was computed: neither ``max_tokens`` nor the number of requests changes the shares."""
    replica = Replica()
    for _ in range(2500):
        while len(replica.waiting("honest")) < NUM_SLOTS:
            replica.send("honest", 100, 20)
        while len(replica.waiting("hostile")) < 10 * NUM_SLOTS:
            replica.send("hostile", 4000, 30).max_new_tokens = 1 << 20
        replica.step()
    assert replica.served("hostile") == pytest.approx(replica.served("honest"), rel=0.1)


def test_who_was_away_has_no_credit_and_no_debt_is_forgotten() -> None:
    counters = ServiceCounters()
    counters.enter("a")
    counters.enter("b")
    counters.charge("a", 5.0)
    counters.charge("b", 3.0)
    counters.enter("c")
    assert counters["c"] == 3.0
    counters.leave("a")
    counters.enter("a")
    assert counters["a"] == 5.0
    counters.leave("b")
    counters.charge("a", 10.0)
    counters.charge("c", 10.0)
    counters.enter("b")
    assert counters["b"] == 13.0
    for tenant in ("a", "b", "c"):
        counters.leave(tenant)
    counters.enter("new")
    assert counters["new"] >= 13.0


def test_a_lone_tenant_has_everything_and_the_order_is_asked_directly() -> None:
    replica = Replica()
    for _ in range(40):
        replica.send("one", 100, 5)
    assert not replica.shares.is_shared
    for _ in range(25):
        replica.step()  # asserts that no slot is free while a job waits
    assert not replica.jobs and not replica.running


def everything(shares: FairShares, order: Order, running: tuple[Job, ...] = ()) -> list[str]:
    return [job.request_id for job in shares.ranked(order, 0.0, lambda job: job not in running, running)]


def test_classes_go_before_shares_and_the_order_decides_within_a_tenant() -> None:
    order, shares = Fcfs(), FairShares(NUM_SLOTS)
    jobs = [job_of("a", 0), job_of("a", 1), job_of("b", 0, priority=5), job_of("b", 1), job_of("a", 2, priority=-1)]
    for job in jobs:
        order.add(job, 0.0)
        shares.add(job)
    assert everything(shares, order) == ["a/2", "b/1", "a/0", "a/1", "b/0"]  # a/2 has gone before b/1's turn
    shares.charge("b", 100.0)
    assert everything(shares, order) == ["a/2", "a/0", "a/1", "b/1", "b/0"]
    assert shares.explain(jobs[2]) == {"tenant_service_s": 100.0}
    for job in jobs[2:4]:
        shares.remove(job)
    assert shares.explain(jobs[0]) == {}


def test_running_jobs_count_ahead() -> None:
    """A tenant that fills the replica waits for its next slot until the others have as many."""
    order, shares = Fcfs(), FairShares(NUM_SLOTS)
    jobs = [job_of("a", number) for number in range(6)] + [job_of("b", number) for number in range(3)]
    for job in jobs:
        order.add(job, 0.0)
        shares.add(job)
    assert everything(shares, order, tuple(jobs[:3])) == ["b/0", "b/1", "b/2", "a/3", "a/4", "a/5"]


@pytest.mark.parametrize("order_of", [Fcfs, Unranked])
def test_many_jobs_and_few_are_found_alike(order_of: Callable[[], Order]) -> None:
    """The walk is the same whether a tenant's jobs are ranked alone or found among all."""
    rng = random.Random(3)
    order, shares = order_of(), FairShares(NUM_SLOTS)
    jobs = []
    for number in range(5 * FEW):
        tenant = rng.choice(["crowd"] * 3 + ["many"] + ["few"] * (number % 40 == 0))
        jobs.append(job_of(tenant, number, prompt_len=rng.randrange(1, 500), priority=rng.randrange(2)))
        order.add(jobs[-1], 0.0)
        shares.add(jobs[-1])
    for tenant in ("crowd", "many"):
        shares.charge(tenant, rng.random())
    walk = list(shares.ranked(order, 0.0, lambda job: True))
    assert sorted(job.request_id for job in walk) == sorted(job.request_id for job in jobs)
    assert [job.priority for job in walk] == sorted(job.priority for job in jobs)
    for tenant in ("crowd", "many", "few"):
        own = [job for job in walk if job.tenant == tenant]
        assert own == [job for job in order.ranked(0.0) if job.tenant == tenant]
    assert shares.arranged(list(order.ranked(0.0))) == walk

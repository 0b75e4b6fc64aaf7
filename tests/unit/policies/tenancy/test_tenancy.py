"""Limits of tenants over several ingress replicas, and fair shares on a small simulated replica."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest

from farsight.core.costs import A100_7B, row_shares
from farsight.core.messages.tenants import TenantLimits, TenantReport
from farsight.policies.interfaces import Job, Order
from farsight.policies.order.fcfs import Fcfs
from farsight.policies.tenancy.budgets import FORGET_IN_FLIGHT_S, Bucket, LocalBudget, SharedBudgets
from farsight.policies.tenancy.fair_shares import AHEAD_S, FEW, FairShares, ServiceCounters

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
    for _ in range(900):
        for tenant, draw in draws.items():
            while len(replica.waiting(tenant)) < NUM_SLOTS + 1:
                replica.send(tenant, *draw())
        replica.step()
        replica.note(*draws)
    small, large = replica.served("small"), replica.served("large")
    assert 0 < replica.widest <= replica.bound()
    assert abs(small - large) <= 2 * replica.bound()
    assert min(small, large) > replica.bound()  # the run is long enough for the bound to mean something


@pytest.mark.parametrize("preempts", [False, True])
def test_weights_divide_the_service(preempts: bool) -> None:
    replica = Replica(preempts=preempts)
    for _ in range(800):
        for tenant, weight in (("gold", 3.0), ("plain", 1.0)):
            while len(replica.waiting(tenant)) < NUM_SLOTS:
                replica.send(tenant, 100, 10, weight)
        replica.step()
        replica.note("gold", "plain")
    assert replica.served("gold") / replica.served("plain") == pytest.approx(3.0, rel=0.05)
    assert replica.widest <= replica.bound()


def test_first_come_first_served_would_break_the_bound() -> None:
    """The check can fail: one tenant's name for all starves the one that sends less."""
    replica = Replica()
    sent: dict[str, list[str]] = {"flood": [], "calm": []}
    for _ in range(800):
        sent["flood"].append(replica.send("all", 100, 40).request_id)
        if sum(name in replica.jobs for name in sent["calm"]) < 2 * NUM_SLOTS:
            sent["calm"].append(replica.send("all", 100, 40).request_id)
        replica.step()
    calm, flood = (sum(replica.charged.get(name, 0.0) for name in sent[who]) for who in ("calm", "flood"))
    assert calm < 0.5 * flood


@pytest.mark.parametrize(("prompt_len", "output_len", "cancels"), [(2000, 100, True), (4000, 30, False)])
def test_no_trick_buys_service(prompt_len: int, output_len: int, cancels: bool) -> None:
    """Aborting each request after one step, long prompts, large limits and many requests: what is computed counts."""
    replica = Replica()
    for _ in range(800):
        while len(replica.waiting("honest")) < NUM_SLOTS:
            replica.send("honest", 100, 20)
        while len(replica.waiting("hostile")) < 3 * NUM_SLOTS:
            replica.send("hostile", prompt_len, output_len).max_new_tokens = 1 << 20
        replica.step()
        for job in [job for job in replica.running if cancels and job.tenant == "hostile"]:
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


EXCHANGE_S = 0.25


class IngressReplica:
    """One ingress replica, as far as one tenant goes."""

    def __init__(self, name: str, limits: TenantLimits, now: float = 0.0) -> None:
        self.name = name
        self.budget = LocalBudget("t", limits, now)
        self.epoch = ""

    def exchange(self, shared: SharedBudgets, now: float, *, lost: bool = False) -> None:
        counts = self.budget.counts(now)
        answer = shared.report(TenantReport(self.name, self.epoch, (counts,)), now)
        if not lost:
            self.epoch = answer.epoch
            self.budget.correct(answer.budgets[0], counts, now)


def test_a_bucket_fills_at_its_rate_and_no_further() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(60, 0.0)
    assert bucket.wait_s(1, 0.0) == pytest.approx(1.0)
    assert bucket.wait_s(1, 1.0) == 0
    bucket.take(31, 1.0)
    assert bucket.level == pytest.approx(-30)
    assert bucket.wait_s(1, 1.0) == pytest.approx(31.0)
    bucket.refill(1000.0)
    assert bucket.level == 60


def test_a_changed_limit_keeps_what_was_used() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(50, 0.0)
    bucket.set_limit(100, 0.0)
    assert bucket.level == 50
    bucket.set_limit(20, 0.0)
    assert bucket.level == -30
    bucket.set_limit(0, 0.0)
    assert bucket.wait_s(1, 0.0) == 0
    bucket.set_limit(5, 0.0)
    assert bucket.level == 5


def test_one_replica_admits_exactly_the_limit() -> None:
    budget = LocalBudget("t", TenantLimits(requests_per_minute=60), 0.0)
    assert [budget.admit(0.0) for _ in range(60)] == [None] * 60
    excess = budget.admit(0.0)
    assert excess is not None
    assert (excess.what, excess.limit) == ("requests", 60)
    assert excess.retry_after_s == pytest.approx(1.0)
    assert budget.admit(1.0) is None
    assert budget.counts(1.0).rejected == 1


def test_tokens_are_owed_and_paid_back() -> None:
    budget = LocalBudget("t", TenantLimits(tokens_per_minute=600), 0.0)
    assert budget.admit(0.0) is None
    budget.spend(0.0, prompt=500, output=400)
    excess = budget.admit(0.0)
    assert excess is not None
    assert excess.what == "tokens"
    assert excess.retry_after_s == pytest.approx(30.1)
    assert budget.admit(30.2) is None


def test_requests_in_flight_count_everywhere() -> None:
    limits = TenantLimits(max_in_flight=3)
    shared = SharedBudgets("life")
    first, second = IngressReplica("a", limits), IngressReplica("b", limits)
    assert first.budget.admit(0.0) is None
    assert first.budget.admit(0.0) is None
    first.exchange(shared, 0.1)
    second.exchange(shared, 0.2)
    assert second.budget.admit(0.2) is None
    excess = second.budget.admit(0.2)
    assert excess is not None
    assert (excess.what, excess.limit) == ("in_flight", 3)
    first.budget.done(0.3)
    first.exchange(shared, 0.3)
    second.exchange(shared, 0.4)
    assert second.budget.admit(0.4) is None


def test_what_ran_on_a_dead_replica_is_no_longer_in_flight() -> None:
    shared = SharedBudgets("life")
    dead, living = (IngressReplica(name, TenantLimits(max_in_flight=1)) for name in "ab")
    dead.budget.admit(0.0)
    dead.exchange(shared, 0.0)
    living.exchange(shared, 0.1)
    assert living.budget.admit(0.1) is not None
    living.exchange(shared, 0.1 + FORGET_IN_FLIGHT_S)
    assert living.budget.admit(0.1 + FORGET_IN_FLIGHT_S) is None


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_over_all_replicas(num_replicas: int, seed: int) -> None:
    """Five minutes of five times the limit, at replicas drawn at random, with lost answers."""
    rng = random.Random(seed)
    limit, rate, minutes = 120, 10.0, 5
    shared = SharedBudgets("life")
    replicas = [IngressReplica(str(number), TenantLimits(requests_per_minute=limit)) for number in range(num_replicas)]
    now, admitted, most_in_an_exchange = 0.0, 0, 0
    while now < 60 * minutes:
        arrived = 0
        for _ in range(round(rate * EXCHANGE_S) + rng.randrange(3)):
            arrived += 1
            admitted += rng.choice(replicas).budget.admit(now) is None
            now += EXCHANGE_S / 5
        most_in_an_exchange = max(most_in_an_exchange, arrived)
        for replica in replicas:
            replica.exchange(shared, now, lost=rng.random() < 0.05)
    # A lost answer makes an exchange longer; three in a row do not come with these seeds.
    slack = 0 if num_replicas == 1 else 3 * most_in_an_exchange
    assert admitted <= limit * (minutes + 1) + slack
    assert admitted >= limit * minutes  # and what is there is not refused


def test_a_burst_at_every_replica_is_paid_back() -> None:
    """The worst case: each of four replicas admits the whole limit before the first exchange."""
    limit = 60
    shared = SharedBudgets("life")
    replicas = [IngressReplica(str(number), TenantLimits(requests_per_minute=limit)) for number in range(4)]
    assert sum(replica.budget.admit(0.0) is None for replica in replicas for _ in range(100)) == 4 * limit
    for replica in replicas + replicas:
        replica.exchange(shared, 0.25)
    later = [replica.budget.admit(100.0) for replica in replicas]
    assert all(excess is not None and excess.retry_after_s == pytest.approx(80.25 + 1, abs=0.3) for excess in later)


def test_a_report_that_comes_twice_counts_once() -> None:
    shared = SharedBudgets("life")
    replica = IngressReplica("a", TenantLimits(requests_per_minute=60))
    for _ in range(10):
        replica.budget.admit(0.0)
    replica.exchange(shared, 0.0, lost=True)
    replica.exchange(shared, 0.0)
    assert replica.budget.requests.level == 50
    assert shared.usage(0.0)[0].requests == 10


def test_a_new_supervisor_begins_with_what_replicas_know() -> None:
    replica = IngressReplica("a", TenantLimits(requests_per_minute=60))
    first, second = SharedBudgets("first"), SharedBudgets("second")
    for _ in range(60):
        replica.budget.admit(0.0)
    replica.exchange(first, 0.0)
    replica.exchange(second, 0.1)
    assert replica.epoch == "second"
    assert replica.budget.admit(0.1) is not None
    assert second.usage(0.1)[0].requests == 60  # replicas report sums since their own start
    replica.exchange(second, 2.0)
    assert replica.budget.admit(2.0) is None


def test_usage_is_summed_by_tenant() -> None:
    shared = SharedBudgets("life")
    for name, count in (("a", 2), ("b", 3)):
        replica = IngressReplica(name, TenantLimits())
        for _ in range(count):
            assert replica.budget.admit(0.0) is None
            replica.budget.spend(0.0, prompt=10, output=5, cached=4)
        replica.budget.done(0.0)
        replica.exchange(shared, 0.0)
    (usage,) = shared.usage(1.0)
    assert (usage.requests, usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (5, 50, 25, 20)
    assert usage.in_flight == 3

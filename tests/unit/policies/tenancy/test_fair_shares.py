"""Fair shares on a small simulated replica: the bound between backlogged tenants, and no slot left free."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from core.costs import A100_7B
from core.errors import ConfigError, InvalidValueError
from policies.interfaces import Job, ReplicaContext
from policies.order.fcfs import Fcfs
from policies.settings import PolicySettings
from policies.tenancy.fair_shares import AHEAD_S, FairShares, ServiceCounters, fair_order

STEP_S = 0.05
CAPACITY = 20_000
NUM_SLOTS = 8


def tenant_of(job: Job) -> str:
    return job.request_id.partition("/")[0]


@dataclass
class Replica:
    """Slots that run jobs step by step; a job that was admitted runs to its end."""

    order: FairShares
    tenant_of: Callable[[Job], str] = tenant_of
    now: float = 0.0
    running: list[Job] = field(default_factory=list)
    waiting: dict[str, Job] = field(default_factory=dict)
    lens: dict[str, int] = field(default_factory=dict)
    charged: dict[str, float] = field(default_factory=dict)
    widest_share: float = 0.0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def send(self, tenant: str, prompt_len: int, output_len: int) -> None:
        job = Job(f"{tenant}/{next(self._numbers)}", self.now, prompt_len, output_len)
        self.order.add(job, self.now)
        self.waiting[job.request_id] = job
        self.lens[job.request_id] = output_len

    def num_waiting(self, tenant: str) -> int:
        return sum(tenant_of(job) == tenant for job in self.waiting.values())

    def step(self) -> None:
        self.order.refresh(self.now)
        for job in self.order.ranked(self.now):
            if len(self.running) == NUM_SLOTS:
                break
            if self.waiting.pop(job.request_id, None) is not None:
                self.running.append(job)
        assert len(self.running) == NUM_SLOTS or not self.waiting, "a slot is free and a job waits"
        self.now += STEP_S
        for job in list(self.running):
            job.computed_len = job.known_len
            job.output_len += 1
            self.widest_share = max(self.widest_share, self.order.share(job))
            before = self.order.counters[self.tenant_of(job)]
            self.order.ran(job, STEP_S, self.now)
            charge = self.order.counters[self.tenant_of(job)] - before
            self.charged[job.request_id] = self.charged.get(job.request_id, 0.0) + charge
            if job.output_len == self.lens[job.request_id]:
                self.running.remove(job)
                self.order.remove(job)


def fair(weights: dict[str, float] | None = None) -> FairShares:
    order = FairShares(Fcfs, tenant_of, NUM_SLOTS, weights)
    order.price(A100_7B, CAPACITY)
    return order


def served(tenant: str, replica: Replica) -> float:
    return sum(value for name, value in replica.charged.items() if name.startswith(f"{tenant}/"))


@pytest.mark.parametrize("seed", range(5))
def test_two_backlogged_tenants_stay_within_the_bound(seed: int) -> None:
    """One sends many short requests, the other few long ones; both always have jobs waiting."""
    rng = random.Random(seed)
    replica = Replica(fair())
    draws: dict[str, Callable[[], tuple[int, int]]] = {
        "small": lambda: (rng.randrange(1, 200), rng.randrange(1, 20)),
        "large": lambda: (rng.randrange(500, 4000), rng.randrange(20, 200)),
    }
    widest = 0.0
    for _ in range(4000):
        for tenant, draw in draws.items():
            while replica.num_waiting(tenant) < NUM_SLOTS + 1:
                replica.send(tenant, *draw())
        replica.step()
        widest = max(widest, abs(replica.order.counters["small"] - replica.order.counters["large"]))
    bound = NUM_SLOTS * (max(replica.charged.values()) + AHEAD_S * replica.widest_share)
    assert widest <= bound
    small, large = served("small", replica), served("large", replica)
    assert abs(small - large) <= 2 * bound
    assert min(small, large) > bound  # the run is long enough for the bound to mean something


def test_first_come_first_served_would_break_the_bound() -> None:
    """The check can fail: with the same traffic one order over all jobs starves the tenant that sends less."""
    ratios = []
    for tenant in (tenant_of, lambda job: "all"):
        replica = Replica(FairShares(Fcfs, tenant, NUM_SLOTS), tenant)
        for _ in range(2000):
            replica.send("flood", 100, 40)
            if replica.num_waiting("calm") < 2 * NUM_SLOTS:
                replica.send("calm", 100, 40)
            replica.step()
        ratios.append(served("calm", replica) / served("flood", replica))
    assert ratios[0] == pytest.approx(1.0, abs=0.1)
    assert ratios[1] < 0.5


def test_weights_divide_the_service() -> None:
    replica = Replica(fair({"gold": 3.0}))
    for _ in range(4000):
        for tenant in ("gold", "plain"):
            while replica.num_waiting(tenant) < NUM_SLOTS:
                replica.send(tenant, 100, 10)
        replica.step()
    done = {tenant: sum(name.startswith(tenant) for name in replica.charged) for tenant in ("gold", "plain")}
    assert done["gold"] / done["plain"] == pytest.approx(3.0, rel=0.1)


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


def test_a_lone_tenant_has_everything() -> None:
    replica = Replica(fair())
    for _ in range(40):
        replica.send("one", 100, 5)
    for _ in range(25):
        replica.step()  # asserts that no slot is free while a job waits
    assert not replica.waiting and not replica.running
    assert not list(replica.order.ranked(replica.now))


def test_the_order_of_a_tenant_decides_among_its_jobs() -> None:
    order = fair()
    jobs = [Job(f"a/{number}", float(number), 10, 10, priority=-number) for number in range(3)]
    for job in [*jobs, Job("b/0", 9.0, 10, 10, priority=100)]:
        order.add(job, 9.0)
    ranked = [job.request_id for job in order.ranked(9.0)]
    assert [name for name in ranked if name.startswith("a/")] == ["a/2", "a/1", "a/0"]
    assert ranked.index("b/0") <= 1  # a priority of one tenant is nothing to another
    order.remove(Job("unknown/0", 0.0, 1, 1))
    assert order.explain(jobs[0], 9.0)["tenant_service_s"] == 0.0


def test_any_registered_order_can_be_below() -> None:
    context = ReplicaContext(PolicySettings(), 4)
    for name in ("fcfs", "skip-join-mlfq"):
        order = fair_order(name, context, tenant_of)
        order.price(A100_7B, CAPACITY)
        for number in range(6):
            order.add(Job(f"{'ab'[number % 2]}/{number}", 0.0, 50, 20), 0.0)
        order.refresh(0.0)
        assert len(list(order.ranked(0.0))) == 6
    with pytest.raises(ConfigError, match=r"scheduler\.order"):
        fair_order("none", context, tenant_of)
    with pytest.raises(InvalidValueError, match=r"weights\.a"):
        FairShares(Fcfs, tenant_of, 4, {"a": 0.0})

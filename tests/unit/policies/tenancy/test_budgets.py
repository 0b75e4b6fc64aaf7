"""Limits of tenants over several ingress replicas, under virtual time."""

from __future__ import annotations

import random

import pytest

from core.messages.tenants import TenantLimits, TenantReport
from policies.tenancy.budgets import FORGET_IN_FLIGHT_S, Bucket, LocalBudget, SharedBudgets

EXCHANGE_S = 0.25


class Replica:
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
    first, second = Replica("a", limits), Replica("b", limits)
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
    dead, living = Replica("a", TenantLimits(max_in_flight=1)), Replica("b", TenantLimits(max_in_flight=1))
    dead.budget.admit(0.0)
    dead.exchange(shared, 0.0)
    living.exchange(shared, 0.1)
    assert living.budget.admit(0.1) is not None
    living.exchange(shared, 0.1 + FORGET_IN_FLIGHT_S)
    assert living.budget.admit(0.1 + FORGET_IN_FLIGHT_S) is None


@pytest.mark.parametrize("num_replicas", [1, 2, 5])
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_holds_over_all_replicas(num_replicas: int, seed: int) -> None:
    """Ten minutes of five times the limit, at replicas drawn at random, with lost answers."""
    rng = random.Random(seed)
    limit, rate, minutes = 120, 10.0, 10
    shared = SharedBudgets("life")
    replicas = [Replica(str(number), TenantLimits(requests_per_minute=limit)) for number in range(num_replicas)]
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
    replicas = [Replica(str(number), TenantLimits(requests_per_minute=limit)) for number in range(4)]
    assert sum(replica.budget.admit(0.0) is None for replica in replicas for _ in range(100)) == 4 * limit
    for replica in replicas + replicas:
        replica.exchange(shared, 0.25)
    later = [replica.budget.admit(100.0) for replica in replicas]
    assert all(excess is not None and excess.retry_after_s == pytest.approx(80.25 + 1, abs=0.3) for excess in later)


def test_a_report_that_comes_twice_counts_once() -> None:
    shared = SharedBudgets("life")
    replica = Replica("a", TenantLimits(requests_per_minute=60))
    for _ in range(10):
        replica.budget.admit(0.0)
    replica.exchange(shared, 0.0, lost=True)
    replica.exchange(shared, 0.0)
    assert replica.budget.requests.level == 50
    assert shared.usage(0.0)[0].requests == 10


def test_a_new_supervisor_begins_with_what_replicas_know() -> None:
    replica = Replica("a", TenantLimits(requests_per_minute=60))
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
        replica = Replica(name, TenantLimits())
        for _ in range(count):
            assert replica.budget.admit(0.0) is None
            replica.budget.spend(0.0, prompt=10, output=5, cached=4)
        replica.budget.done(0.0)
        replica.exchange(shared, 0.0)
    (usage,) = shared.usage(1.0)
    assert (usage.requests, usage.prompt_tokens, usage.output_tokens, usage.cached_tokens) == (5, 50, 25, 20)
    assert usage.in_flight == 3

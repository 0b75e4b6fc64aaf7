"""The Gittins order: its rank against brute force, and who goes first."""

from __future__ import annotations

import math

import numpy as np
import pytest

from farsight.core.costs import StepCost
from farsight.core.forecast import Forecast
from farsight.policies.interfaces import Job
from farsight.policies.order.gittins import DecodePrice, Gittins, gittins_rank

STEP = StepCost(base_s=0.01, prefill_token_s=0.00011, decode_seq_s=0.00002, context_token_s=2e-7)


def exact(length: float) -> Forecast:
    return Forecast(mean=length, quantiles=(length,) * 6, num_samples=1, source="test", version=0)


def job(name: str, length: float, **fields: object) -> Job:
    values = {"arrived_at": 0.0, "prompt_len": 100, "max_new_tokens": 4096, "forecast": exact(length)} | fields
    return Job(request_id=name, **values)  # type: ignore[arg-type]


def names(order: Gittins, now: float = 0.0) -> list[str]:
    order.check_integrity()
    return [each.request_id for each in order.ranked(now)]


def order_of(*jobs: Job, **options: object) -> Gittins:
    unit = options.pop("unit", "volume")
    order = Gittins(DecodePrice(STEP, 64, 10_000, unit), **options)  # type: ignore[arg-type]
    for each in jobs:
        order.add(each, 0.0)
    return order


def rank(costs: list[float], weights: list[float]) -> float:
    return float(gittins_rank(np.array([costs], float), np.array([weights], float))[0])


@pytest.mark.parametrize("unit", ["volume", "time"])
def test_rank_equals_a_loop_over_tokens(unit: str) -> None:
    rng = np.random.default_rng(4)
    for _ in range(60):
        seqs, capacity, context = (int(rng.integers(low, high)) for low, high in ((1, 40), (100, 3000), (1, 300)))
        tokens = np.sort(rng.integers(1, 200, 6))
        weights = rng.dirichlet(np.ones(6))

        def cost(num: int, seqs: int = seqs, capacity: int = capacity, context: int = context) -> float:
            total = 0.0
            for y in range(context, context + num):
                share = max(1 / seqs, y / capacity) if unit == "volume" else 1.0
                total += STEP.base_s * share + STEP.decode_seq_s + STEP.context_token_s * y
            return total

        expected = [cost(int(num)) for num in tokens]
        price = DecodePrice(STEP, seqs, capacity, unit)  # type: ignore[arg-type]
        costs = price.seconds(np.array([context * 1.0]), tokens.astype(float))
        assert np.allclose(costs, expected)
        best = min(
            sum(w * min(c, at) for w, c in zip(weights, expected, strict=True))
            / sum(w for w, c in zip(weights, expected, strict=True) if c <= at)
            for at in expected
        )
        assert np.isclose(rank(list(costs), list(weights)), best)


def test_deterministic_laws_go_shortest_remaining_cost_first() -> None:
    rng = np.random.default_rng(5)
    jobs = [job(str(n), float(length)) for n, length in enumerate(rng.permutation(np.arange(20, 60)))]
    assert names(order_of(*jobs)) == [j.request_id for j in sorted(jobs, key=lambda j: j.forecast.mean)]  # type: ignore[union-attr]


def test_a_long_prompt_costs() -> None:
    assert names(order_of(job("long", 50, prompt_len=4000), job("short", 50))) == ["short", "long"]


def test_unit_matters() -> None:
    """Few tokens of a large context against many of a small one."""
    large, small = job("large", 100, prompt_len=5000, cached_len=5000), job("small", 200, prompt_len=10, cached_len=10)
    assert names(order_of(large, small)) == ["small", "large"]
    assert names(order_of(large, small, unit="time")) == ["large", "small"]


def test_urgency_goes_first() -> None:
    late, soon = job("late", 10), job("soon", 500, deadline_at=9.0)
    high = job("high", 900, priority=-1)
    assert names(order_of(late, soon, high)) == ["high", "soon", "late"]


def test_a_resident_gives_way_only_to_a_clearly_better_job() -> None:
    def first(newcomer: float) -> str:
        resident = job("resident", 400, computed_len=100, output_len=1)
        return names(order_of(resident, job("new", newcomer)))[0]

    assert first(200) == "resident"
    assert first(20) == "new"


def test_ranks_are_due_after_the_prefill_and_every_sixteen_tokens() -> None:
    running = job("a", 100)
    order = order_of(running)
    order.refresh(0.0)
    seen, before = [], order.rank([running])[0]
    running.computed_len = 100
    for output_len in range(1, 40):
        running.output_len, running.computed_len = output_len, 99 + output_len
        order.ran(running, 0.01, 0.0)
        if (rank := order.rank([running])[0]) != before:
            seen.append(output_len)
            before = rank
        order.check_integrity()
    assert seen == [1, 17, 33]


def test_repricing_ranks_anew() -> None:
    large, small = job("large", 100, prompt_len=5000, cached_len=5000), job("small", 200, prompt_len=10, cached_len=10)
    order = order_of(large, small)
    assert names(order)[0] == "small"
    order.price(StepCost(0.01, 0.0, 0.0, 0.0), 10_000_000)
    assert names(order)[0] == "large"


def mean_completion(told: list[float] | None, lengths: list[float]) -> float:
    """One server, all there at once, 100 jobs to learn from first; mean instant of completion in tokens."""
    order = Gittins(DecodePrice(StepCost(1.0, 0.0, 0.0, 0.0), 1, 10**9, "time"), theta=1.0)
    jobs = []
    for index, length in enumerate(lengths):
        guess = None if told is None else exact(told[index])
        jobs.append(job(str(index), 1, forecast=guess, prompt_len=1, output_len=0))
        if index < 100:
            jobs[-1].output_len = int(length)
            order.learn(jobs[-1], censored=False)
        else:
            order.add(jobs[-1], 0.0)
    clock, ends = 0.0, []
    for _ in range(100_000):
        best = next(order.ranked(clock), None)
        if best is None:
            break
        length = int(lengths[int(best.request_id)])
        steps = min(16, length - best.output_len)
        clock += steps
        best.output_len += steps
        order.ran(best, steps, clock)
        if best.output_len == length:
            ends.append(clock)
            order.remove(best)
            order.learn(best, censored=False)
    assert len(ends) == len(lengths) - 100
    return math.fsum(ends) / len(ends)


@pytest.mark.parametrize("num_workloads", [4, pytest.param(12, marks=pytest.mark.nightly)])
def test_shuffled_forecasts_cost_little_and_good_ones_gain(num_workloads: int) -> None:
    """Ratios to no forecasts at all, of paired workloads."""
    shuffled, good = [], []
    for seed in range(num_workloads):
        rng = np.random.default_rng(seed)
        lengths = np.ceil(rng.lognormal(4.0, 1.0, 180 if num_workloads < 12 else 260)).clip(1, 2000).tolist()
        none = mean_completion(None, lengths)
        shuffled.append(mean_completion(rng.permutation(lengths).tolist(), lengths) / none)
        good.append(mean_completion(lengths, lengths) / none)
    spread = float(np.std(shuffled, ddof=1)) / math.sqrt(len(shuffled))
    assert np.mean(shuffled) <= 1.02
    assert spread < 0.01 or num_workloads < 12, "the mean of the ratios says little"
    assert max(good) < 0.95


def test_history_counts_from_the_twentieth_output_on() -> None:
    unknown = job("unknown", 0, forecast=None)
    order = order_of(unknown)
    before = order.rank([unknown])[0]
    for index in range(20):
        assert order.rank([unknown])[0] == before
        order.learn(job(str(index), 500, output_len=500), censored=False)
    assert order.rank([unknown])[0] != before


def test_ageing_counts_waiting_in_expected_cost() -> None:
    wide = Forecast(mean=1300, quantiles=(5, 5, 5, 5, 4000, 4000), num_samples=1, source="test", version=0)
    old, new = job("old", 0, forecast=wide), job("new", 5, arrived_at=0.2)
    assert names(order_of(old, new, gamma=0.5), 0.2) == ["new", "old"]


def test_what_is_explained_is_what_the_order_goes_by() -> None:
    old, new = job("old", 50), job("new", 20, arrived_at=90.0)
    order = order_of(old, new, gamma=0.5)
    assert names(order, 100.0) == ["old", "new"], "ageing brings a long job forward"
    told = {each.request_id: order.explain(each, 100.0) for each in (old, new)}
    assert float(told["old"]["rank_s"]) > float(told["new"]["rank_s"])
    assert float(told["old"]["aged_rank_s"]) < float(told["new"]["aged_rank_s"])
    plain = order_of(old, new)
    assert names(plain, 100.0) == ["new", "old"]
    assert plain.explain(old, 100.0).keys() >= {"rank_s"} and "aged_rank_s" not in plain.explain(old, 100.0)


def test_a_forecast_that_comes_late_counts_like_one_that_was_there() -> None:
    late, early = job("late", 50, forecast=None), job("early", 50)
    order = order_of(late, early, job("longer", 80))
    assert order.rank([late])[0] != order.rank([early])[0]
    late.forecast = exact(50)
    order.foreseen(late)
    assert order.rank([late])[0] == order.rank([early])[0]
    order.remove(late)
    order.remove(late)
    order.foreseen(late)  # it has ended meanwhile
    order.ran(late, 1.0, 0.0)
    assert names(order) == ["early", "longer"]

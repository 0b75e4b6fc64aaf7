"""Tenants' turns in batch mode: no request waits behind all of another tenant's, and no worker without reason."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from farsight.core.config.scheduling import BatchConfig
from farsight.policies.batching.base import BatchPolicy
from farsight.policies.compose import build_batcher
from farsight.policies.fleet.batch_turns import BatchTurns
from farsight.policies.interfaces import Job
from farsight.policies.settings import BatchSettings
from tests.unit.policies.batch_jobs import make_job, names

PRESETS = ("magnus", "magnus-vs", "magnus-glp", "magnus-abp", "multi-bin")
SETTINGS = BatchSettings(
    memory_tokens=4000,
    serving_time_s=lambda jobs, prompt, output: output,
    batch=BatchConfig(batch_size=8, max_wait_s=math.inf),
    edges=(0.0, 100.0, math.inf),
)


def job(tenant: str, number: int, now: float = 0.0) -> Job:
    made = make_job(f"{tenant}{number}", 50, 20.0 + 7 * (number % 20), arrived_at=now, max_new_tokens=200)
    return replace(made, tenant=tenant)


class Driver:
    """One worker that pulls batch after batch, each of which takes a second."""

    def __init__(self, preset: str) -> None:
        self.batcher: BatchPolicy = build_batcher(preset, SETTINGS)
        self.turns = BatchTurns(self.batcher)
        self.now = 0.0
        self.done: list[str] = []

    def serve(self) -> list[str]:
        batch = self.turns.pull(self.now)
        if batch is None:
            return []
        self.turns.begin(batch, self.now)
        self.now += 1.0
        for each in batch.jobs:
            self.turns.remove(each.request_id, self.now)
        self.turns.check_integrity()
        self.done += names(batch)
        return names(batch)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_flood_does_not_delay_the_other_tenant(preset: str) -> None:
    """300 requests of one tenant wait already; the other's 8 are served within the window, not behind them. What fills
    their batches takes no time of its own."""
    driver = Driver(preset)
    for number in range(300):
        driver.turns.add(job("flood", number), driver.now)
    driver.serve()
    for number in range(8):
        driver.turns.add(job("calm", number, driver.now), driver.now)
    driver.turns.check_integrity()
    calm: set[str] = set()
    num_batches = 0
    while len(calm) < 8:
        batch = driver.serve()
        assert batch, "requests wait and the worker gets nothing"
        num_batches += 1
        calm |= {name for name in batch if name.startswith("calm")}
    assert num_batches <= 9, "as many as without what fills them"
    while driver.serve():
        pass
    if preset == "multi-bin":  # its last bins are not full
        assert driver.turns.num_waiting == 308 - len(driver.done)
        driver.batcher.flush(driver.now)
        while driver.serve():
            pass
    assert sorted(driver.done) == sorted(
        {*(f"flood{number}" for number in range(300)), *(f"calm{n}" for n in range(8))}
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_room_that_the_window_leaves_is_filled_by_what_makes_the_batch_no_longer(preset: str) -> None:
    """A long request of the calm tenant has its turn; all of the flood that there is room for goes with it."""
    driver = Driver(preset)
    for number in range(200):
        driver.turns.add(replace(make_job(f"flood{number}", 50, 150.0), tenant="flood"), 0.0)
    driver.serve()
    driver.turns.add(replace(make_job("calm", 50, 150.0), tenant="calm"), driver.now)
    batch = driver.serve()
    while "calm" not in batch:
        assert len(batch) == 8
        batch = driver.serve()
    assert len(batch) == 8


def test_company_is_what_the_rule_of_the_batch_takes() -> None:
    batcher = build_batcher("magnus", SETTINGS)
    batcher.add(make_job("first", 50, 100.0), 0.0)
    batch = batcher.pull(0.0)
    assert batch is not None
    longer = [make_job("prompt", 51, 100.0), make_job("output", 50, 101.0)]
    others = [make_job(f"short{number}", 50, 20.0 + number) for number in range(6)] + [make_job("alike", 50, 100.0)]
    found = batcher.company(batch, longer + others)
    assert [job.request_id for job in found] == ["alike", *(f"short{number}" for number in range(5, -1, -1))]
    assert len(batcher.company(batch, longer + others * 2)) == SETTINGS.batch.batch_size - 1
    strict = build_batcher("magnus", replace(SETTINGS, batch=replace(SETTINGS.batch, wma_threshold=50 * 20 + 1)))
    strict.add(make_job("first", 50, 100.0), 0.0)
    first = strict.pull(0.0)
    assert first is not None
    assert [job.request_id for job in strict.company(first, others)] == ["alike"]


def test_a_story_says_why_a_batch_holds_no_more_and_ran_first() -> None:
    batcher = build_batcher("magnus", SETTINGS)
    for name, prompt_len, predicted in (("a", 50, 100.0), ("b", 40, 90.0), ("far", 50, 3000.0)):
        batcher.add(make_job(name, prompt_len, predicted), 0.0)
    batch = batcher.pull(5.0)
    assert batch is not None and [job.request_id for job in batch.jobs] == ["a", "b"]
    story = batcher.story(batch, 5.0)
    reads = [50 * 100 + 100 * 99 // 2, 40 * 90 + 90 * 89 // 2, 50 * 3000 + 3000 * 2999 // 2]
    assert story["waste_tokens"] == reads[0] - reads[1]
    assert (story["next_waste_tokens"], story["waste_limit_tokens"]) == (reads[2] - reads[1], 50_000)
    assert (story["next_memory_tokens"], story["memory_limit_tokens"]) == (3 * (50 + 3000), 4000)
    assert (story["queued_s"], story["service_s"], story["response_ratio"]) == (5.0, 100, 1.05)
    assert (story["num_rivals"], story["rival_ratios"]) == (1, "1.00")


def test_a_bin_tells_its_edges() -> None:
    bins = build_batcher("multi-bin", replace(SETTINGS, batch=replace(SETTINGS.batch, batch_size=1)))
    bins.add(make_job("short", 50, 20.0), 0.0)
    bins.add(make_job("long", 50, 200.0), 0.0)
    stories = [bins.story(batch, 0.0) for batch in (bins.pull(0.0), bins.pull(0.0)) if batch is not None]
    assert stories[0] == {"bin": 1, "num_bins": 2, "full_size": 1, "bin_from_tokens": 0.0, "bin_to_tokens": 100.0}
    assert stories[1] == {"bin": 2, "num_bins": 2, "full_size": 1, "bin_from_tokens": 100.0}, "it has no upper edge"


def test_company_in_a_bin_is_of_the_bin_as_far_as_it_has_room() -> None:
    bins = build_batcher("multi-bin", replace(SETTINGS, batch=replace(SETTINGS.batch, batch_size=3)))
    for number in range(3):
        bins.add(make_job(f"short{number}", 50, 20.0), 0.0)
    batch = bins.pull(0.0)
    waiting = [make_job("long", 50, 100.0), make_job("a", 50, 99.0), make_job("b", 50, 1.0), make_job("c", 50, 1.0)]
    assert batch is not None
    assert bins.company(batch, waiting) == []
    batch.drop("short1")
    batch.drop("short2")
    assert [job.request_id for job in bins.company(batch, waiting)] == ["a", "b"]


@pytest.mark.parametrize("preset", PRESETS)
def test_one_tenant_is_batched_as_without_turns(preset: str) -> None:
    driver, plain = Driver(preset), build_batcher(preset, SETTINGS)
    batches: list[list[str]] = []
    for number in range(100):
        driver.turns.add(job("one", number), 0.0)
        plain.add(job("one", number), 0.0)
        if number % 9 == 0:
            batches.append(names(plain.pull(driver.now)))
            assert driver.serve() == batches[-1]
    assert sum(map(len, batches)) > 50


def test_a_request_that_leaves_is_in_no_place() -> None:
    driver = Driver("magnus-vs")
    jobs = [job(tenant, number) for number in range(60) for tenant in ("a", "b")]
    for each in jobs:
        driver.turns.add(each, 0.0)
    for each in jobs[::3]:
        driver.batcher.remove(each.request_id)
        driver.turns.remove(each.request_id, 0.0)
        driver.turns.check_integrity()
    while driver.serve():
        pass
    assert len(driver.done) == len(jobs) - len(jobs[::3])
    assert driver.turns.num_waiting == 0

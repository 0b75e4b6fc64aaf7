"""Tenants' turns in batch mode: no request waits behind all of another tenant's, and no worker without reason."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from policies.batching.base import Batcher
from policies.compose import build_batcher
from policies.fleet.batch_turns import WINDOW, BatchTurns
from policies.interfaces import Job
from policies.settings import BatchSettings
from tests.unit.policies.batch_jobs import make_job, names

PRESETS = ("magnus", "magnus-vs", "magnus-glp", "magnus-abp", "multi-bin")
SETTINGS = BatchSettings(
    memory_tokens=4000, serving_time_s=lambda jobs, prompt, output: output, edges=(0.0, 100.0, math.inf), batch_size=8
)


def job(tenant: str, number: int, now: float = 0.0) -> Job:
    made = make_job(f"{tenant}{number}", 50, 20.0 + 7 * (number % 20), arrived_at=now, max_new_tokens=200)
    return replace(made, tenant=tenant)


class Desk:
    """One worker that pulls batch after batch, each of which takes a second."""

    def __init__(self, preset: str) -> None:
        self.batcher: Batcher = build_batcher(preset, SETTINGS)
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
    """300 requests of one tenant wait already; the other's 8 are served within the window, not behind them."""
    desk = Desk(preset)
    for number in range(300):
        desk.turns.add(job("flood", number), desk.now)
    desk.serve()
    for number in range(8):
        desk.turns.add(job("calm", number, desk.now), desk.now)
    desk.turns.check_integrity()
    calm: set[str] = set()
    served = 0
    while len(calm) < 8:
        batch = desk.serve()
        assert batch, "requests wait and the worker gets nothing"
        served += len(batch)
        calm |= {name for name in batch if name.startswith("calm")}
    assert served <= 2 * WINDOW + 8
    while batch := desk.serve():
        served += len(batch)
    if preset == "multi-bin":  # its last bins are not full
        assert desk.turns.num_waiting == 308 - len(desk.done)
        desk.batcher.flush(desk.now)
        while desk.serve():
            pass
    assert sorted(desk.done) == sorted({*(f"flood{number}" for number in range(300)), *(f"calm{n}" for n in range(8))})


@pytest.mark.parametrize("preset", PRESETS)
def test_one_tenant_is_batched_as_without_turns(preset: str) -> None:
    desk, plain = Desk(preset), build_batcher(preset, SETTINGS)
    batches: list[list[str]] = []
    for number in range(100):
        desk.turns.add(job("one", number), 0.0)
        plain.add(job("one", number), 0.0)
        if number % 9 == 0:
            batches.append(names(plain.pull(desk.now)))
            assert desk.serve() == batches[-1]
    assert sum(map(len, batches)) > 50


def test_a_request_that_leaves_is_in_no_place() -> None:
    desk = Desk("magnus-vs")
    jobs = [job(tenant, number) for number in range(60) for tenant in ("a", "b")]
    for each in jobs:
        desk.turns.add(each, 0.0)
    for each in jobs[::3]:
        desk.batcher.remove(each.request_id)
        desk.turns.remove(each.request_id, 0.0)
        desk.turns.check_integrity()
    while desk.serve():
        pass
    assert len(desk.done) == len(jobs) - len(jobs[::3])
    assert desk.turns.num_waiting == 0

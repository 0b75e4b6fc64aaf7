"""Jobs for tests of batchers, and the operations of every batcher in random order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from farsight.core.forecast import QUANTILES, Forecast
from farsight.policies.batching.base import BatchPolicy, FormedBatch
from farsight.policies.interfaces import Job


def seeds(daily: int, *, nightly: int) -> list[Any]:
    """The first ones by day, so many more by night."""
    return [*range(daily), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(daily, daily + nightly))]


def make_job(
    request_id: str,
    prompt_len: int,
    predicted: float | None,
    *,
    arrived_at: float = 0.0,
    priority: int = 0,
    deadline_at: float = math.inf,
    max_new_tokens: int = 100_000,
    output_len: int = 0,
) -> Job:
    """A job whose forecast has this mean; None for no forecast."""
    forecast = None if predicted is None else made_forecast(predicted)
    return Job(
        request_id, arrived_at, prompt_len, max_new_tokens, priority, deadline_at, forecast, output_len=output_len
    )


def made_forecast(mean: float) -> Forecast:
    """A forecast that is sure of its mean."""
    return Forecast(mean, (mean,) * len(QUANTILES), 1, "test", 1)


def names(batch: FormedBatch | None) -> list[str]:
    """Ids in the batch; none for no batch."""
    return [] if batch is None else [job.request_id for job in batch.jobs]


def drain(batcher: BatchPolicy, now: float) -> list[list[str]]:
    """Ids of all batches that are ready, in the order of pulling."""
    batches = []
    while (batch := batcher.pull(now)) is not None:
        batches.append(names(batch))
    return batches


def exercise(batcher: BatchPolicy, seed: int, steps: int = 150) -> None:
    """All that a batcher hears, at random: no job is lost or doubled, and the bookkeeping holds throughout."""
    rng = np.random.default_rng(seed)
    waiting: set[str] = set()
    jobs: dict[str, Job] = {}
    pulled: list[FormedBatch] = []
    now = 0.0
    for step in range(steps):
        now += float(rng.exponential())
        actions = ["add", "remove", "pull", "split", "restore", "hold", "foresee"]
        action = rng.choice(actions, p=[0.5, 0.1, 0.15, 0.05, 0.05, 0.05, 0.1])
        if action == "add":
            request_id = f"r{step}"
            priority = int(rng.integers(0, 2))
            prompt_len, predicted = int(rng.integers(1, 40)), float(rng.integers(1, 40))
            jobs[request_id] = make_job(request_id, prompt_len, predicted, arrived_at=now, priority=priority)
            batcher.add(jobs[request_id], now)
            waiting.add(request_id)
        elif action == "remove" and waiting:
            request_id = str(rng.choice(sorted(waiting)))
            batcher.remove(request_id)
            waiting.discard(request_id)
        elif action == "pull":
            due_at = batcher.next_due_at()
            batch = batcher.pull(now)
            if due_at is not None and due_at <= now:
                assert batch is not None
            if batch is not None:
                assert set(names(batch)) <= waiting
                assert batch.sealed_at is not None
                assert batch.sealed_at <= now
                waiting -= set(names(batch))
                pulled.append(batch)
        elif action == "split" and pulled:
            batch = pulled.pop(int(rng.integers(len(pulled))))
            if (failed := batcher.split(batch, now)) is None:
                waiting |= set(names(batch))
            else:
                assert [failed] == batch.jobs
        elif action == "restore" and pulled:
            batch = pulled.pop(int(rng.integers(len(pulled))))
            batcher.restore(batch)
            waiting |= set(names(batch))
        elif action == "foresee" and waiting:
            chosen = rng.choice(sorted(waiting), size=min(4, len(waiting)), replace=False)
            batcher.foresee([(jobs[str(name)], made_forecast(float(rng.integers(1, 40)))) for name in chosen], now)
        elif action == "hold":
            batcher.hold(float(rng.integers(50, 1000)), now)
        assert batcher.num_waiting == len(waiting)
        batcher.check_integrity()
    batcher.flush(now)
    rest = [name for batch in drain(batcher, now) for name in batch]
    assert sorted(rest) == sorted(waiting)
    assert batcher.num_waiting == 0
    batcher.check_integrity()

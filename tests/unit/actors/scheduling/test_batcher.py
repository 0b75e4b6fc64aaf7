"""The Batcher's shell: wakes its machine, logs what ran, learns from it, and goes on where another one stopped."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from farsight.actors.learning.serving_time_estimator import KIND, ServingTimeEstimator
from farsight.actors.log.log_store import LogStore
from farsight.actors.runtime.component import ComponentContext
from farsight.actors.runtime.peer import Site
from farsight.actors.scheduling.batcher import Batcher
from farsight.core.codec import decode, encode
from farsight.core.config.learning import LogConfig, PredictorConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.config.scheduling import BatchConfig, SchedulerConfig
from farsight.core.forecast import QUANTILES, Forecast
from farsight.core.messages.fleet import ReplicaNews, ReplicaState
from farsight.core.messages.live import SessionsQuery
from farsight.core.messages.log import Artefact, ArtefactName, FinishedBatch, LogQuery
from farsight.core.messages.plans import FinishedSequence, WorkerReady
from farsight.core.messages.requests import Keys, Refusals, Submit
from farsight.core.messages.status import ComponentCounts
from farsight.core.messages.step_times import StepSample, StepSamples
from farsight.core.request import Origin, Request, SamplingParams, SequenceStatus
from farsight.estimator.knn import MIN_BATCHES, BatchTimes, ServedBatch
from farsight.policies.presets import PRESETS
from farsight.policies.settings import PRIOR_COST
from tests.unit.actors.components import LONG_S, opened, until

READY = WorkerReady("w1", 1000, 16, 4000, False, 100)


class FakeScheduler:
    """Takes what is placed and lets the test say when it ends."""

    def __init__(self) -> None:
        self.batches: list[tuple[Request, ...]] = []

    async def answer(self, method: str, data: bytes) -> bytes:
        if method == "submit":
            self.batches.append(decode(data, Submit).requests)
            return encode(Refusals(()))
        return b""


class FakePredictor:
    """Knows the lengths of the past only."""

    async def answer(self, method: str, data: bytes) -> bytes:
        return encode(Forecast(40.0, (40.0,) * len(QUANTILES), 100, "history", 1))


class FakeSupervisor:
    async def answer(self, method: str, data: bytes) -> bytes:
        return encode(ComponentCounts(1, 1, 1, 0))


@dataclasses.dataclass
class Shop:
    batcher: Batcher
    scheduler: FakeScheduler
    estimator: ServingTimeEstimator
    registry: CollectorRegistry
    local: dict[str, Any]

    async def up(self) -> None:
        await self.batcher.replica_state(ReplicaState("0", READY, ()))

    async def submit(self, *names: str) -> None:
        requests = tuple(Request(name, 0, "i", (1,) * 8, SamplingParams(64)) for name in names)
        await self.batcher.submit(Submit(requests))

    async def end(self, *names: str, output_len: int = 5) -> None:
        ends = tuple(FinishedSequence(name, 0, SequenceStatus.FINISHED_STOPPED, output_len) for name in names)
        await self.batcher.replica_news(ReplicaNews("0", "w1", finished=ends))

    def placed(self) -> list[list[str]]:
        return [[request.request_id for request in batch] for batch in self.scheduler.batches]

    def metric(self, name: str) -> float | None:
        return self.registry.get_sample_value(name, {"model_name": "m"})


@asynccontextmanager
async def shop(preset: str, log_store: Any, **batch: Any) -> AsyncIterator[Shop]:
    scheduler = FakeScheduler()
    config = FarsightConfig(
        scheduler=SchedulerConfig(preset=preset),
        batch=BatchConfig(**batch),
        log=LogConfig(),
        predictor=PredictorConfig(from_traffic=False),
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, name="m"))
    site = Site(config, "", "fused")
    registry = CollectorRegistry()
    local: dict[str, Any] = {"scheduler-0": scheduler, "length-predictor-0": FakePredictor(), "log-store": log_store}
    local["supervisor"] = FakeSupervisor()
    name = "serving-time-estimator-0"
    estimator = local[name] = ServingTimeEstimator(ComponentContext(name, site, 0, site.peers(local), registry))
    batcher = Batcher(ComponentContext("router", site, 0, site.peers(local), registry))
    await estimator.start()
    await batcher.start()
    try:
        yield Shop(batcher, scheduler, estimator, registry, local)
        assert not batcher.failed.done(), batcher.failed.exception()
    finally:
        await batcher.stop()
        await estimator.stop()


def waiting_s(shop: Shop) -> list[float]:
    """Estimated seconds of the batches that wait."""
    times, batches = shop.batcher._times, shop.batcher._batches.timed()
    return [times(len(batch), batch.prompt_len, batch.predicted_len) for batch in batches]


async def first_batch(log_store: LogStore) -> FinishedBatch:
    """Once it is in the log."""
    async with asyncio.timeout(LONG_S):
        while True:
            page = await log_store.read_batches(LogQuery(0, 10))
            if page.records:
                return page.records[0]
            await asyncio.sleep(0.02)


async def test_an_idle_worker_pulls_the_next_batch_and_every_batch_is_logged() -> None:
    async with opened() as log_store, shop("magnus", log_store) as found:
        await found.submit("a", "b")
        assert found.placed() == []
        await found.up()
        assert found.placed() == [["a", "b"]]
        await found.submit("c")
        await found.end("a")
        assert found.placed() == [["a", "b"]], "the batch runs to its end"
        await found.end("b", output_len=9)
        assert found.placed() == [["a", "b"], ["c"]]

        record = await first_batch(log_store)
        assert (record.worker, record.num_requests, record.batch_len, record.generation_len) == ("0", 2, 8, 9)
        assert record.estimated_time_s > 0 and record.serving_time_s > 0
        await until(lambda: found.metric("farsight:batch_queue_requests") == 0)
        assert found.metric("farsight:batch_size_count") == 2
        assert found.metric("farsight:batch_size_sum") == 3
        assert b"farsight:batch_splits_total" in generate_latest(found.registry)

        view = await found.batcher.sessions(SessionsQuery(2))
        assert (view.num_sessions, len(view.rows)) == (3, 2), "none continues another"
        assert [(row.counts.turns, row.counts.answers) for row in view.applications] == [(3, 2)]
        shown = generate_latest(found.registry).decode()
        assert 'farsight:session_turns_total{application=""} 3.0' in shown
        assert 'farsight:session_tokens_total{application="",kind="output"}' in shown


async def test_a_request_whose_client_left_while_it_waited_is_among_those_that_ended() -> None:
    async with opened() as log_store, shop("magnus", log_store) as found:
        own = Request("b", 1, "i", (1,) * 8, SamplingParams(64), origin=Origin("cmpl-b", 2))
        await found.batcher.submit(Submit((own,)))
        await found.submit("a", "c")
        await found.batcher.abort(Keys((("a", 0), ("b", 0), ("unknown", 0))))
        assert (await found.batcher.left_waiting()).requests == (), "it has a later attempt, or cannot be explained"
        await found.batcher.abort(Keys((("b", 1),)))
        (left,) = (await found.batcher.left_waiting()).requests
        assert (left.response_id, left.choice, left.reason, left.output_len) == ("cmpl-b", 2, "abort", 0)
        assert left.took_s >= 0 and left.ago_s >= 0


@pytest.mark.parametrize("preset", [name for name, preset in PRESETS.items() if preset.mode == "batch"])
async def test_every_preset_of_batch_mode_starts_serves_and_stops(preset: str) -> None:
    async with opened() as log_store, shop(preset, log_store, max_wait_s=0.01) as found:
        await found.up()
        await found.submit("a", "b")
        await until(lambda: found.placed() != [])
        while found.batcher.queue:
            await found.end(*found.placed()[-1])
            await asyncio.sleep(0)  # a bin that waits for its time is woken by the loop


async def test_a_bin_that_is_not_full_goes_when_its_time_has_come() -> None:
    async with opened() as log_store, shop("multi-bin", log_store, max_wait_s=0.1, batch_size=4) as found:
        await found.up()
        began = time.monotonic()
        await found.submit("a")
        await until(lambda: found.placed() == [["a"]])
        assert time.monotonic() - began > 0.099, "not before"


async def test_what_was_learned_outlives_the_estimator_and_estimates_come_from_it() -> None:
    """A stored version of known batches is what the next estimator answers from; a batch that waits is asked about."""
    known = BatchTimes(PRIOR_COST, [ServedBatch(1, 8, 10 + i % 50, 77.0) for i in range(MIN_BATCHES)])
    async with opened() as log_store:
        await log_store.put_artefact(Artefact(KIND, 3, 0.0, None, MIN_BATCHES, "", known.to_bytes()))
        await log_store.set_current(ArtefactName(KIND, 3))
        async with shop("magnus", log_store) as found:
            await found.submit("a")
            await until(lambda: waiting_s(found) == [pytest.approx(77.0)])
            await found.up()
            await found.end("a")
            assert (await first_batch(log_store)).estimated_time_s == pytest.approx(77.0)


async def test_an_estimator_that_is_away_delays_no_batch_and_its_successor_is_asked() -> None:
    async with opened() as log_store, shop("magnus", log_store) as found:
        peers = found.local
        estimator = peers.pop("serving-time-estimator-0")
        await found.up()
        await found.submit("a")
        assert found.placed() == [["a"]]
        await found.submit("b")
        (before_s,) = waiting_s(found)
        samples = tuple(StepSample(0, seqs, 100 * seqs, 0.5) for seqs in (1, 2, 4, 8) for _ in range(50))
        await estimator.observe(StepSamples("0", samples))
        peers["serving-time-estimator-0"] = estimator
        await until(lambda: waiting_s(found)[0] > 10 * before_s)
        await found.end("a")
        assert found.placed() == [["a"], ["b"]]


async def test_estimates_follow_the_measured_steps_until_batches_are_known() -> None:
    async with opened() as log_store, shop("magnus", log_store) as found:
        before_s = found.batcher._times(4, 100, 50)
        samples = tuple(StepSample(0, seqs, 100 * seqs, 0.5) for seqs in (1, 2, 4, 8) for _ in range(50))
        await found.estimator.observe(StepSamples("0", samples))
        await until(lambda: found.batcher._times(4, 100, 50) > 10 * before_s)


async def test_every_so_often_a_version_is_stored_with_the_error_of_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("farsight.actors.learning.serving_time_estimator.LOOK_S", 0.01)
    async with opened() as log_store, shop("magnus", log_store, learn_every_s=0.05) as found:
        await found.up()
        await found.submit("a")
        await found.end("a")
        stored = await current(log_store)
        record = await first_batch(log_store)
        assert stored.version == 1 and stored.num_examples == 1
        assert stored.score == pytest.approx(abs(record.estimated_time_s - record.serving_time_s))
        assert BatchTimes.from_bytes(stored.data, PRIOR_COST).num_batches == 1


async def current(log_store: LogStore) -> Artefact:
    """The version that is current, once there is one."""
    async with asyncio.timeout(LONG_S):
        while True:
            found = await log_store.read_artefact(ArtefactName(KIND))
            if found is not None:
                return found
            await asyncio.sleep(0.02)

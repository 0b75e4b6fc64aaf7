"""The learners: what they say follows the log and the measured steps."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from farsight.actors.learning import length_predictor
from farsight.actors.learning.length_predictor import PAGE, WINDOW, LengthPredictor
from farsight.actors.learning.serving_time_estimator import ServingTimeEstimator
from farsight.actors.log.log_store import LogStore
from farsight.actors.runtime.names import LOG_STORE
from farsight.actors.runtime.peer import PeerLost
from farsight.core.codec import decode, encode
from farsight.core.config.engine import EngineConfig
from farsight.core.errors import FarsightError
from farsight.core.forecast import Forecast
from farsight.core.messages.log import LogPage, LogQuery
from farsight.core.messages.step_times import BatchShape, BatchShapes, StepSample, StepSamples
from farsight.estimator.knn import padded_batch_s
from farsight.estimator.profile_file import A100_7B, DEVICE_PROFILES
from farsight.policies.settings import PRIOR_COST
from farsight.predictor.history import PRIOR_MEAN
from tests.unit.actors.components import append, component_context, finished, until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_predictor, "PERIOD_S", 0.005)


class Log:
    """A log store in memory that can fail on demand."""

    def __init__(self) -> None:
        self.output_lens: list[int] = []
        self.failure: Exception | None = None
        self.num_reads = 0
        self.num_records_read = 0

    async def answer(self, method: str, data: bytes) -> bytes:
        assert method == "read"
        self.num_reads += 1
        if self.failure is not None:
            raise self.failure
        query = decode(data, LogQuery)
        records = tuple(
            finished(f"{i}", self.output_lens[i])
            for i in range(query.after_row, min(query.after_row + query.limit, len(self.output_lens)))
        )
        self.num_records_read += len(records)
        return encode(LogPage(min(query.after_row + len(records), len(self.output_lens)), records))


@asynccontextmanager
async def following(log: Any) -> AsyncIterator[LengthPredictor]:
    component = LengthPredictor(component_context("length-predictor-0", {LOG_STORE: log}))
    await component.start()
    try:
        yield component
    finally:
        await component.stop()


async def forecast(component: LengthPredictor) -> Forecast:
    return await component.forecast()


async def until_samples(component: LengthPredictor, num_samples: int) -> Forecast:
    await until(lambda: component._predictor.current().num_samples == num_samples)
    return await forecast(component)


async def until_read_again(log: Log, times: int = 2) -> None:
    enough = log.num_reads + times
    await until(lambda: log.num_reads >= enough)


def gauge(component: LengthPredictor) -> float | None:
    return component.context.registry.get_sample_value("farsight:forecast_mean_tokens")


async def test_a_forecast_is_there_before_anything_is_known() -> None:
    log = Log()
    async with following(log) as component:
        assert (await forecast(component)).num_samples == 0
        assert gauge(component) == (await forecast(component)).mean == PRIOR_MEAN
        assert (component.kind, component.state, component.last_step_age_s) == ("LengthPredictor", "ready", None)
        await until_read_again(log)
        assert component.last_step_age_s is not None


async def test_it_learns_what_is_written_and_only_outputs_that_came_to_their_own_end(tmp_path: Any) -> None:
    store = LogStore(component_context(LOG_STORE, path=str(tmp_path / "log")))
    await store.start()
    await append(store, finished("a", 10), finished("b", 20, "length"))
    async with following(store) as component:
        assert (await until_samples(component, 2)).mean == 15
        await append(store, finished("c", 500, "abort"), finished("d", 600, "error"), finished("e", 30))
        after = await until_samples(component, 3)
        assert (after.mean, after.version, after.source) == (20, 2, "history")
        assert gauge(component) == 20
    await store.stop()


async def test_outputs_of_requests_that_came_before_the_weights_are_not_learned() -> None:
    """``finished`` gives every request the same time of receipt."""
    came_at = finished("0").received_at
    log = Log()
    log.output_lens = [7, 8, 9]
    for since, num_samples in ((came_at, 3), (came_at + 0.1, 0)):
        context = component_context("length-predictor-0", {LOG_STORE: log})
        context = dataclasses.replace(context, site=dataclasses.replace(context.site, model_since=since))
        component = LengthPredictor(context)
        await component._catch_up()
        assert (await forecast(component)).num_samples == num_samples


async def test_of_a_long_log_only_the_end_is_read() -> None:
    log = Log()
    log.output_lens = list(range(50 * WINDOW))
    async with following(log) as component:
        assert (await until_samples(component, WINDOW)).num_samples == WINDOW
        await until(lambda: component._row == 50 * WINDOW)
        assert (await forecast(component)).mean == 49.5 * WINDOW - 0.5
        assert log.num_records_read == 2 * WINDOW


async def test_what_piles_up_is_read_page_by_page_without_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log()
    async with following(log) as component:
        await until(lambda: component._row == 0)
        monkeypatch.setattr(length_predictor, "PERIOD_S", 1e9)
        log.output_lens = [3] * (4 * PAGE + 1)
        await component._catch_up()
        assert component._row == 4 * PAGE + 1


@pytest.mark.parametrize("failure", [PeerLost("log-store"), FarsightError("the disk is gone"), ValueError("a defect")])
async def test_it_survives_a_log_that_cannot_be_read(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    log = Log()
    log.output_lens = [10]
    async with following(log) as component:
        await until_samples(component, 1)
        log.failure = failure
        await until_read_again(log, 5)
        read_at = component._read_at
        assert (await forecast(component)).mean == 10
        log.output_lens.append(20)
        await until_read_again(log, 1)
        assert component._read_at == read_at, "a failed read makes it no younger"
        log.failure = None
        assert (await until_samples(component, 2)).mean == 15
    assert len(caplog.records) == (0 if isinstance(failure, PeerLost) else 1), "told once"


async def test_it_starts_over_with_a_log_that_has_lost_rows() -> None:
    log = Log()
    log.output_lens = [10] * 5
    async with following(log) as component:
        await until_samples(component, 5)
        log.output_lens = [70, 90]
        assert (await until_samples(component, 2)).mean == 80
        assert gauge(component) == 80


async def test_it_waits_for_a_log_store_that_is_not_there_yet() -> None:
    log = Log()
    log.failure = PeerLost("log-store")
    async with following(log) as component:
        await until_read_again(log, 3)
        assert component.last_step_age_s is None
        log.output_lens, log.failure = [4], None
        assert (await until_samples(component, 1)).mean == 4


def samples(replica: str, factor: float) -> StepSamples:
    measured = tuple(
        StepSample(p, d, 100 * d * d, factor * (0.01 + 1e-4 * p + 1e-3 * d + 1e-6 * 100 * d * d))
        for p in (0, 100, 500)
        for d in range(1, 30)
    )
    return StepSamples(replica, measured * 5)


async def test_each_replica_has_a_profile_of_its_own() -> None:
    component = ServingTimeEstimator(component_context("serving-time-estimator-0"))
    assert (component.kind, component.state, component.last_step_age_s) == ("ServingTimeEstimator", "ready", None)
    assert (await component.profile()).profiles == ()
    few = StepSamples("0", samples("0", 1.0).samples[:8])
    assert await component.observe(few) is None
    told = await component.observe(samples("0", 1.0))
    assert told is not None
    assert told.replica == "0" and told.base_s == pytest.approx(0.01, rel=0.01)
    assert await component.observe(samples("1", 2.0))
    assert component.last_step_age_s is not None
    one, two = (await component.profile()).profiles
    assert (one.replica, two.replica, one.num_samples) == ("0", "1", 443)
    for profile, factor in ((one, 1), (two, 2)):
        prices = (profile.base_s, profile.prefill_token_s, profile.decode_seq_s, profile.context_token_s)
        assert prices == pytest.approx([factor * each for each in (0.01, 1e-4, 1e-3, 1e-6)], rel=0.01)
    value = component.context.registry.get_sample_value
    assert value("farsight:step_profile_seconds", {"replica": "1", "term": "step"}) == two.base_s
    assert value("farsight:step_profile_seconds", {"replica": "0", "term": "context_token"}) == one.context_token_s


async def test_two_estimators_may_share_a_process() -> None:
    context = component_context("serving-time-estimator-0")
    for replica in ("0", "1"):
        await ServingTimeEstimator(context).observe(samples(replica, 1.0))
        labels = {"replica": replica, "term": "step"}
        assert context.registry.get_sample_value("farsight:step_profile_seconds", labels) == pytest.approx(0.01, 0.01)


async def test_every_replica_of_an_estimator_is_useful_from_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before any step or batch, it adds up the steps of a batch by the profile of the emulated device."""
    slow = dataclasses.replace(A100_7B, cost=dataclasses.replace(A100_7B.cost, base_s=1.0))
    monkeypatch.setitem(DEVICE_PROFILES, "slow", slow)
    shape = BatchShape(8, 100, 50)
    answers: list[float] = []
    for index in (0, 1):
        context = component_context(f"serving-time-estimator-{index}", {LOG_STORE: Log()})
        config = dataclasses.replace(context.config, engine=EngineConfig(device="emulated:slow"))
        context = dataclasses.replace(context, site=dataclasses.replace(context.site, config=config))
        answers += (await ServingTimeEstimator(context).estimate_batches(BatchShapes((shape,)))).seconds
    expected = padded_batch_s(slow.cost, 8, 100, 50)
    assert answers == pytest.approx([expected, expected])
    assert expected != pytest.approx(padded_batch_s(PRIOR_COST, 8, 100, 50))

"""A length predictor with an artefact: what it answers, what it logs, and how it learns on."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from farsight.actors.learning import length_learner, text_forecasts
from farsight.actors.learning.length_predictor import LengthPredictor
from farsight.actors.log import log_outbox
from farsight.actors.log.log_store import LogStore
from farsight.actors.runtime.names import LOG_STORE
from farsight.core.config.learning import PredictorConfig
from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import ConfigError, FarsightError
from farsight.core.forecast import Example, Forecast, ForecastQuestion, ForecastQuestions
from farsight.predictor.applications.reading import SECRET_BYTES
from farsight.predictor.shedding import Effort
from farsight.predictor.trainer import ForestOptions
from farsight.predictor.training import Recipe, train
from farsight.predictor.words import NUM_FEATURES
from tests.unit.actors.components import append, component_context, finished, opened, read_examples, until
from tests.unit.engine.encoders.test_encoders import make_labse

LENGTHS = {"Translate:": 20, "Explain:": 200}
"""Output lengths of two applications, in tokens."""


def question(number: int, instruction: str) -> ForecastQuestion:
    return ForecastQuestion(f"r{number}", instruction, "word " * (1 + number % 7), 1 + number % 7, 12, 1000)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    examples = [
        Example(question(i, instruction), int(length + rng.integers(0, 5)))
        for i in range(60)
        for instruction, length in LENGTHS.items()
    ]
    forest = ForestOptions(num_trees=20, min_samples_leaf=5)
    recipe = Recipe(reads="words", d_user=None, d_app=None, forest=forest)
    return train(examples, None, recipe).save(tmp_path_factory.mktemp("artefact")).parent


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (log_outbox, "SEND_S", 0.01),
        (text_forecasts, "KEEP_UP_S", 0.05),
        (length_learner, "LOOK_S", 0.02),
        (length_learner, "POLL_S", 0.02),
    ):
        monkeypatch.setattr(module, name, seconds)


@asynccontextmanager
async def predicting(
    store: LogStore, artefact: Path | None, index: int = 0, since: float = 0.0, **settings: object
) -> AsyncIterator[LengthPredictor]:
    """Without an artefact: under a preset that reads forecasts, on weights that have served since ``since``."""
    context = component_context(f"length-predictor-{index}", {LOG_STORE: store})
    predictor = PredictorConfig("" if artefact is None else str(artefact), learn_every_s=0.2, **settings)  # type: ignore[arg-type]
    config = replace(context.config, predictor=predictor, scheduler=SchedulerConfig(preset="farsight"))
    context = replace(context, site=replace(context.site, config=config, model_since=since))
    component = LengthPredictor(context)
    await component.start()
    try:
        yield component
    finally:
        await component.stop()


async def predict(component: LengthPredictor, *questions: ForecastQuestion) -> tuple[Forecast, ...]:
    return (await component.predict(ForecastQuestions(questions))).forecasts


def sample(component: LengthPredictor, name: str) -> float | None:
    return component.context.registry.get_sample_value(name)


async def test_each_question_gets_its_forecast_and_the_log_what_it_rests_on(tmp_path: Path, artefact: Path) -> None:
    async with opened(path=str(tmp_path / "log")) as store, predicting(store, artefact) as component:
        short, long = await predict(component, question(1, "Translate:"), question(2, "Explain:"))
        assert short.mean == pytest.approx(22, abs=4) and long.mean == pytest.approx(202, abs=15)
        assert short.source == long.source == "forest" and short.rank is not None and long.rank is not None
        assert short.rank < long.rank
        await append(store, finished("r1", 25), finished("r2", 190))
        await until(lambda: not component._reader._outbox)  # type: ignore[union-attr]
        examples = (await read_examples(store)).examples
        assert {each.finished.request_id: each.forecast.mean for each in examples} == {
            "r1": short.mean,
            "r2": long.mean,
        }
        assert all(len(each.forecast.features) == 4 * NUM_FEATURES for each in examples)


async def test_beyond_its_share_of_a_core_nothing_is_looked_at(tmp_path: Path, artefact: Path) -> None:
    async with opened(path=str(tmp_path / "log")) as store, predicting(store, artefact, cpu_share=1e-9) as component:
        assert component._reader is not None
        component._reader._server._budget.spend(Effort.FULL, 10.0)
        (answer,) = await predict(component, question(1, "Explain:"))
        assert answer.source == "history" and answer.num_samples == 0
        assert component.context.registry.get_sample_value("farsight:forecasts_total", {"source": "history"}) == 1


async def test_it_learns_on_from_what_it_foresaw_badly_and_others_follow(tmp_path: Path, artefact: Path) -> None:
    """The answers of one application become five times as long; a later life begins with what was learned."""
    path = str(tmp_path / "log")
    async with (
        opened(path=path) as store,
        predicting(store, artefact, cpu_share=100.0) as component,
        predicting(store, artefact, 1) as other,
    ):
        for i in range(150):
            await predict(component, question(i, "Translate:"))
            await append(store, finished(f"r{i}", 100 + i % 5))
        await until(lambda: (sample(component, "farsight:forecast_version") or 0) >= 2)
        await until(lambda: (sample(other, "farsight:forecast_version") or 0) >= 2)
        for each in (component, other):
            (again,) = await predict(each, question(1, "Translate:"))
            assert again.mean > 50 and again.version >= 2
        kept = (await store.artefacts()).artefacts
        (current,) = (each for each in kept if each.current)  # the newest may have come without its mark yet
        assert current.version >= 2 and current.score is not None and current.num_examples > 120
    async with opened(path=path) as store, predicting(store, artefact, learn=False) as component:
        assert (await predict(component, question(1, "Translate:")))[0].version >= 2


async def test_a_damaged_version_gives_way_to_the_one_before(tmp_path: Path, artefact: Path) -> None:
    path = tmp_path / "log"
    async with opened(path=str(path)) as store, predicting(store, artefact) as component:
        reader = component._reader
        assert reader is not None
        first = reader._artefact
        for version in (2, 3):
            await reader._registry.put(replace(first, metadata={**first.metadata, "version": version}), 1.0)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE artefacts SET data = zeroblob(100) WHERE version = 3")
    async with opened(path=str(path)) as store, predicting(store, artefact) as component:
        assert sample(component, "farsight:forecast_version") == 2
        assert sample(component, "farsight:forecast_artefact_errors_total") == 1


async def test_without_an_artefact_it_learns_applications_from_the_first_hundred_requests(tmp_path: Path) -> None:
    """A later life, and a second predictor, begin with what was learned; other weights begin with nothing."""
    path, names = str(tmp_path / "log"), list(LENGTHS)
    async with opened(path=path) as store, predicting(store, None, cpu_share=100.0) as component:
        first = await predict(component, question(0, "Translate:"))
        assert first[0].source == "history" and first[0].version == 0
        for i in range(1, 130):
            await predict(component, question(i, names[i % 2]))
            reason = ("stop", "length")[i % 3 == 0]
            await append(store, finished(f"r{i}", LENGTHS[names[i % 2]] + i % 5, finish_reason=reason))
        await until(lambda: (sample(component, "farsight:forecast_version") or 0) >= 1)
        short, long = await predict(component, question(3, "Translate:"), question(3, "Explain:"))
        assert short.source == long.source == "applications"
        assert short.mean < 40 and long.mean > 150
    async with opened(path=path) as store, predicting(store, None, 1, learn=False) as component:
        assert (await predict(component, question(3, "Explain:")))[0].mean > 150
    async with opened(path=path) as store, predicting(store, None, since=2e9, learn=False) as component:
        (unknown,) = await predict(component, question(3, "Explain:"))
        assert (unknown.source, unknown.num_samples) == ("history", 0)


@pytest.mark.torch
async def test_with_an_encoder_alone_it_grows_magnuss_forest_from_its_traffic(tmp_path: Path) -> None:
    """A random encoder of LaBSE's modules; another one under the same name begins with nothing."""
    path, folder = str(tmp_path / "log"), make_labse(tmp_path / "labse")
    lengths = {"w5 w6": 20, "w7": 200}
    names, encoder = list(lengths), str(folder)
    async with opened(path=path) as store, predicting(store, None, encoder=encoder, cpu_share=100.0) as component:
        assert (await predict(component, question(0, names[0])))[0].source == "history"
        for i in range(1, 130):
            await predict(component, question(i, names[i % 2]))
            await append(store, finished(f"r{i}", lengths[names[i % 2]] + i % 5))
        await until(lambda: (sample(component, "farsight:forecast_version") or 0) >= 1)
        short, long = await predict(component, question(3, names[0]), question(3, names[1]))
        assert short.source == long.source == "forest" and short.mean < 60 < 150 < long.mean
    make_labse(folder, num_hidden_layers=1)
    async with (
        opened(path=path) as store,
        predicting(store, None, learn=False, encoder=encoder, cpu_share=100.0) as component,
    ):
        assert (await predict(component, question(3, names[0])))[0].source == "history"


async def test_who_wants_no_forecaster_from_traffic_has_none(tmp_path: Path) -> None:
    async with opened(path=str(tmp_path / "log")) as store, predicting(store, None, from_traffic=False) as component:
        with pytest.raises(FarsightError, match="no policy reads forecasts"):
            await predict(component, question(1, "Explain:"))


async def test_an_artefact_that_is_not_there_is_named(tmp_path: Path) -> None:
    async with opened(path=str(tmp_path / "log")) as store:
        with pytest.raises(ConfigError, match=r"predictor\.artefact.*nowhere.*farsight train"):
            async with predicting(store, tmp_path / "nowhere"):
                pass
        plain = LengthPredictor(component_context("length-predictor-0", {LOG_STORE: store}))
        await plain.start()
        with pytest.raises(FarsightError, match=r"no predictor\.artefact"):
            await predict(plain, question(1, "Explain:"))
        await plain.stop()


async def test_predictors_of_one_log_key_applications_by_one_secret_that_outlives_them(tmp_path: Path) -> None:
    path = str(tmp_path / "log")
    found = []
    for _ in range(2):
        async with opened(path=path) as store, predicting(store, None) as one, predicting(store, None, 1) as other:
            for component in (one, other):
                assert component._reader is not None
                found.append(component._reader._feature_set)
            (kept,) = [each for each in (await store.artefacts()).artefacts if each.kind == text_forecasts.SECRET_KIND]
            assert kept.num_bytes == SECRET_BYTES
    assert len(set(found)) == 1
    async with opened(path=str(tmp_path / "another")) as store, predicting(store, None) as component:
        assert component._reader is not None and component._reader._feature_set not in found


async def test_without_a_log_a_predictor_takes_a_secret_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Away:
        async def read_artefact(self, name: object) -> None:
            raise FarsightError("the log is away")

    monkeypatch.setattr(text_forecasts, "PAUSE_S", 0.0)
    found = {await text_forecasts.application_secret(Away()) for _ in range(2)}  # type: ignore[arg-type]
    assert {len(each) for each in found} == {SECRET_BYTES} and len(found) == 2

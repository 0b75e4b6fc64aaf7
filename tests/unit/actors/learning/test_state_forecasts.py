"""A length predictor that is told the states of prompts: it learns from them, saves that, and goes on with it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from farsight.actors.learning import length_predictor, state_forecasts
from farsight.actors.learning.length_predictor import LengthPredictor
from farsight.core.forecast import Forecast, ForecastQuestions, StateQuestion
from tests.unit.actors.components import append, finished, opened, until
from tests.unit.actors.learning.test_text_forecasts import predicting
from tests.unit.predictor.test_states import ended

DIM = 16


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(length_predictor, "PERIOD_S", 0.02)
    monkeypatch.setattr(state_forecasts, "SAVE_S", 0.02)


async def ask(component: LengthPredictor, questions: Sequence[StateQuestion]) -> tuple[Forecast, ...]:
    return (await component.predict(ForecastQuestions((), tuple(questions)))).prefilled


async def test_states_are_learned_from_at_the_ends_of_their_requests(tmp_path: Path) -> None:
    path, examples = str(tmp_path / "log"), ended(260, DIM, 0.9)
    asked = [question for question, _ in examples[240:]]
    async with opened(path=path) as store, predicting(store, None) as component:
        assert component._reader is not None
        states = component._reader.states
        assert await ask(component, asked) == ()
        for begin in range(0, 240, 40):
            batch = examples[begin : begin + 40]
            await ask(component, [question for question, _ in batch])
            await append(store, *(finished(question.request_id, length) for question, length in batch))
            await append(store, finished(f"left-{begin}", 3, finish_reason="abort"))
            seen = begin + 40
            await until(lambda seen=seen: states._regression.num_examples == seen)  # type: ignore[misc, union-attr]
        made = await ask(component, asked)
        assert [each.source for each in made] == ["states"] * 20
        await until(lambda: states._saved_at == 240)
    async with opened(path=path) as store, predicting(store, None, 1) as component:
        assert await ask(component, asked) == made
        assert await ask(component, [wide for wide, _ in ended(1, DIM + 1, 0.0)]) == (), "another model's states"
    async with opened(path=path) as store, predicting(store, None, since=2e9) as component:
        assert await ask(component, asked) == (), "other weights"

    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE artefacts SET data = zeroblob(100) WHERE kind LIKE 'state-%'")
    async with opened(path=path) as store, predicting(store, None) as component:
        assert await ask(component, asked) == (), "what is damaged is learned again"

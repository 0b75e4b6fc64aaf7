"""Malformed records are refused by field, wherever the log is kept, and nothing of them is written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from core.codec import encode
from core.errors import MessageError
from core.messages.log import (
    MAX_FEATURE_BYTES,
    ArtefactName,
    FinishedBatches,
    ForecastRecords,
)
from tests.unit.actors.components import (
    append,
    artefact,
    example_ids,
    finished,
    finished_batch,
    forecast_record,
    list_artefacts,
    opened,
)
from tests.unit.actors.log.log_calls import read_batches

BAD_FORECASTS: dict[str, list[Any]] = {
    "quantiles": [(), (1.0,) * 5, (1.0, 2.0, 3.0, 2.9, 5.0, 6.0)],
    "features": [bytes(MAX_FEATURE_BYTES + 1)],
    "version": [2**63],
    "mean": [float("nan"), float("inf")],
    "request_id": [7],
}
BAD_BATCHES: dict[str, list[Any]] = {
    "num_requests": [0, 2**63],
    "batch_len": [-1],
    "generation_len": [-1, 2**64 - 1],
    "predicted_len": [-1],
    "estimated_time_s": [-0.1],
    "serving_time_s": [-0.1, "long"],
    "finished_at": [float("inf")],
}
BAD_ARTEFACTS: dict[str, list[Any]] = {
    "kind": [""],
    "version": [0, -1, 2**53 + 1],
    "num_examples": [-1, 2**63],
    "data": [bytes(1001), "text"],
    "score": [float("nan")],
}


def unchecked(record: object, field: str, value: object) -> object:
    """A record as another sender might make it."""
    changed = object.__new__(type(record))
    for each in dataclasses.fields(record):  # type: ignore[arg-type]
        object.__setattr__(changed, each.name, value if each.name == field else getattr(record, each.name))
    return changed


async def test_what_is_wrong_is_refused_by_the_name_of_its_field_and_nothing_is_written(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("core.messages.log.MAX_ARTEFACT_BYTES", 1000)
    async with opened(path=path) as store:
        for message, make, method, fields in (
            (ForecastRecords, forecast_record, "append_forecasts", BAD_FORECASTS),
            (FinishedBatches, finished_batch, "append_batches", BAD_BATCHES),
        ):
            for field, value in ((field, value) for field, values in fields.items() for value in values):
                bad = unchecked(make("b"), field, value)
                with pytest.raises(MessageError) as caught:
                    await store.answer(method, encode(message((make("a"), bad))))  # type: ignore[arg-type]
                assert caught.value.field.startswith(f"{message.__name__}.records[1].{field}")
        for field, value in ((field, value) for field, values in BAD_ARTEFACTS.items() for value in values):
            with pytest.raises(MessageError) as caught:
                await store.answer("put_artefact", encode(unchecked(artefact(1), field, value)))
            assert caught.value.field == f"Artefact.{field}"
        for version in (0, 2**53 + 1):
            for method in ("read_artefact", "set_current"):
                with pytest.raises(MessageError) as caught:
                    await store.answer(method, encode(unchecked(ArtefactName("forest", 1), "version", version)))
                assert caught.value.field == "ArtefactName.version"
        await append(store, finished("a"), finished("b"))
        assert await example_ids(store) == []
        assert (await read_batches(store)).records == ()
        assert await list_artefacts(store) == ()

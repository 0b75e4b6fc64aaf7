"""Learned artefacts, wherever the log is kept, and records that are refused by field, of which nothing is written."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from farsight.core.codec import encode
from farsight.core.errors import MessageError
from farsight.core.messages.log import MAX_FEATURE_BYTES, ArtefactInfo, ArtefactName, LogRecords
from tests.unit.actors.components import (
    append,
    artefact,
    example_ids,
    finished,
    finished_batch,
    forecast_record,
    list_artefacts,
    num_counted,
    opened,
    put,
    read_artefact,
    read_batches,
    set_current,
    versions,
)


async def test_an_artefact_is_read_by_version_and_listed_without_its_data(path: str) -> None:
    first, second = artefact(1), dataclasses.replace(artefact(7, bytes(5_000_000)), score=None, note="ü: 'x'\0")
    async with opened(path=path) as store:
        assert await list_artefacts(store) == ()
        await put(store, first, second, artefact(3, kind="knn:all"))
        assert (await read_artefact(store, 1), await read_artefact(store, 7)) == (first, second)
        assert (
            await read_artefact(store, 2) is await read_artefact(store) is await read_artefact(store, 1, "none") is None
        )
        assert await read_artefact(store, 3, "knn:all") == artefact(3, kind="knn:all")
        assert num_counted(store, "artefacts") == 3
        assert store.last_step_age_s is not None
        await set_current(store, 7)
    async with opened(path=path) as store:
        assert await read_artefact(store) == second
        assert await read_artefact(store, kind="knn:all") is None
        assert await list_artefacts(store) == (
            ArtefactInfo("forest", 1, 1.7e9 + 0.1, 0.1 + 0.2, 500, "of tests", len(first.data), False),
            ArtefactInfo("forest", 7, 1.7e9 + 0.1, None, 500, "ü: 'x'\0", 5_000_000, True),
            ArtefactInfo("knn:all", 3, 1.7e9 + 0.1, 0.1 + 0.2, 500, "of tests", len(first.data), False),
        )


async def test_a_version_is_never_changed_and_may_be_repeated(path: str) -> None:
    async with opened(path=path, max_artefacts=2) as store:
        await put(store, artefact(2), artefact(3), artefact(3), artefact(2))
        assert num_counted(store, "artefacts") == 2
        for refused in (artefact(3, b"other"), dataclasses.replace(artefact(3), score=0.5), artefact(1)):
            with pytest.raises(MessageError, match=r"Artefact.version: got \d, expected a version above 3"):
                await put(store, refused)
        await put(store, artefact(10))
        assert (await versions(store))[0] == [3, 10]
        with pytest.raises(MessageError, match="above 10"):  # it is gone and does not come back
            await put(store, artefact(2))
        assert await read_artefact(store, 3) == artefact(3)
        await put(store, artefact(1, kind="another"))


async def test_the_newest_artefacts_stay_and_the_current_one(path: str) -> None:
    async with opened(path=path, max_artefacts=2) as store:
        await put(store, artefact(1), artefact(1, kind="another"))
        await set_current(store, 1)
        await put(store, artefact(2), artefact(3), artefact(4))
        assert await versions(store) == ([1, 3, 4], 1)
        await set_current(store, 4)
        assert await versions(store) == ([3, 4], 4)
        await set_current(store, 3)
        assert await versions(store) == ([3, 4], 3), "an earlier one may be used again"
        for unknown in (1, 5):
            with pytest.raises(MessageError, match=rf"ArtefactName.version: got {unknown}, expected .*kept"):
                await set_current(store, unknown)
        with pytest.raises(MessageError, match=r"ArtefactName.version: got None"):
            await set_current(store, None)
        assert await versions(store) == ([3, 4], 3)
        assert await versions(store, "another") == ([1], None)
    async with opened(path=path, max_artefacts=1) as store:
        await put(store, artefact(2**53))
        assert await versions(store) == ([3, 2**53], 3)
        await set_current(store, 2**53)
        assert await versions(store) == ([2**53], 2**53)


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
    monkeypatch.setattr("farsight.core.messages.log.MAX_ARTEFACT_BYTES", 1000)
    async with opened(path=path) as store:
        kinds = ("forecasts", forecast_record, BAD_FORECASTS), ("batches", finished_batch, BAD_BATCHES)
        for kind, make, fields in kinds:
            for field, value in ((field, value) for field, values in fields.items() for value in values):
                bad = unchecked(make("b"), field, value)
                with pytest.raises(MessageError) as caught:
                    records: dict[str, Any] = {kind: (make("a"), bad)}
                    await store.answer("append", encode(LogRecords(**records)))
                assert caught.value.field.startswith(f"LogRecords.{kind}[1].{field}")
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

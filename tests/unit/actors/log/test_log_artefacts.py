"""Learned artefacts, wherever the log is kept: versions, the current one, retention."""

from __future__ import annotations

import dataclasses

import pytest

from core.errors import MessageError
from core.messages.log import (
    ArtefactInfo,
)
from tests.unit.actors.components import (
    artefact,
    list_artefacts,
    opened,
    put,
    read_artefact,
    set_current,
    versions,
)
from tests.unit.actors.log.log_calls import num_counted


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

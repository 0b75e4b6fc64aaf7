"""When garbage is looked for."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from farsight.actors.runtime import garbage
from farsight.actors.runtime.garbage import LATEST_S, collect_when_quiet, is_due, leave_full_collections_to_us


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()


def outlive_the_young() -> None:
    gc.collect(1)


def test_python_begins_no_full_collection_however_much_grows() -> None:
    leave_full_collections_to_us()
    before = gc.get_stats()[2]["collections"]
    kept: list[list[list[int]]] = [[[] for _ in range(100)] for _ in range(5000)]
    assert len(kept) == 5000
    assert gc.get_stats()[1]["collections"] > 0
    assert gc.get_stats()[2]["collections"] == before


def test_it_is_due_in_a_quiet_moment_or_after_a_while_where_something_has_grown() -> None:
    gc.disable()
    try:
        gc.collect()
        assert not is_due(LATEST_S, quiet=True)
        outlive_the_young()
        assert is_due(0.0, quiet=True)
        assert not is_due(LATEST_S - 1, quiet=False)
        assert is_due(LATEST_S, quiet=False)
    finally:
        gc.enable()


async def test_cyclic_garbage_goes_when_it_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "LOOK_S", 0.001)
    leave_full_collections_to_us()
    quiet = False
    collecting = asyncio.create_task(collect_when_quiet(lambda: quiet))
    before = gc.get_stats()[2]["collections"]
    outlive_the_young()
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert gc.get_stats()[2]["collections"] == before
    quiet = True
    async with asyncio.timeout(120):
        while gc.get_stats()[2]["collections"] == before:
            outlive_the_young()
            await asyncio.sleep(0.001)
    collecting.cancel()

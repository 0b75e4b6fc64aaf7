"""Examples and batches, wherever the log is kept: pairs of request and forecast, pages, limits."""

from __future__ import annotations

import asyncio
import random

from farsight.actors.log.log_store import MAX_EXAMPLES, MAX_PAGE
from farsight.core.messages.log import (
    MAX_FEATURE_BYTES,
    BatchPage,
    ForecastRecord,
)
from tests.unit.actors.components import (
    append,
    append_batches,
    append_forecasts,
    example_ids,
    finished,
    finished_batch,
    forecast_record,
    num_counted,
    opened,
    read,
    read_batches,
    read_examples,
    read_ids,
)


async def test_examples_are_requests_with_an_end_and_a_forecast_in_order_of_finishing(path: str) -> None:
    async with opened(path=path) as store:
        assert (await read_examples(store)).last_row == 0
        await append_forecasts(store, *(forecast_record(each) for each in "abcde"))
        await append(store, finished("d", 4), finished("stranger"), finished("b", 2))
        await append(store, finished("a", 1))
        page = await read_examples(store)
        assert [(each.finished, each.forecast) for each in page.examples] == [
            (finished(name, length), forecast_record(name)) for name, length in (("d", 4), ("b", 2), ("a", 1))
        ]
        first = await read_examples(store, 0, 2)
        assert [each.finished.request_id for each in first.examples] == ["d", "b"]
        assert await example_ids(store, first.last_row, 2) == ["a"]
        assert await read_examples(store, page.last_row) == await read_examples(store, 2**63 - 1, 0)
        assert (await read_examples(store, page.last_row)).last_row == page.last_row
        assert num_counted(store, "forecasts") == 5


async def test_what_was_forecast_comes_back_bit_by_bit(path: str) -> None:
    odd = ForecastRecord("ü\0", 0.1 + 0.2, "", -1, 1e-300, (-0.0, 0, 0.1, 1e300, 1e300, 1e301), -5e-324, "v", b"")
    large = forecast_record("large", features=bytes(range(256)) * (MAX_FEATURE_BYTES // 256))
    async with opened(path=path) as store:
        await append_forecasts(store, odd, large)
        await append(store, finished(odd.request_id), finished("large"))
        assert [each.forecast for each in (await read_examples(store)).examples] == [odd, large]


async def test_what_comes_together_is_one_commit_with_forecasts_first(path: str) -> None:
    async with opened(path=path) as store:
        tasks = [
            asyncio.create_task(each)
            for each in (
                append(store, finished("b"), finished("a")),
                append_forecasts(store, forecast_record("a"), forecast_record("b")),
                append_batches(store, finished_batch("0")),
            )
        ]
        await asyncio.gather(*tasks)
        assert await example_ids(store) == ["b", "a"]
        assert (await read_batches(store)).records == (finished_batch("0"),)


async def test_the_first_forecast_of_a_request_is_kept(path: str) -> None:
    async with opened(path=path) as store:
        await append_forecasts(store, forecast_record("a", 1.0), forecast_record("a", 2.0))
        await append_forecasts(store, forecast_record("a", 3.0))
        await append(store, finished("a"))
        await append(store, finished("a"))
        await append_forecasts(store, forecast_record("a", 4.0))
        assert [each.forecast.mean for each in (await read_examples(store)).examples] == [1.0]
        assert num_counted(store, "forecasts") == 1


async def test_a_limit_that_was_lowered_holds_for_all_kinds(path: str) -> None:
    async with opened(path=path) as store:
        await append(store, *(finished(f"{i}") for i in range(9)))
        await append_forecasts(store, *(forecast_record(f"{i}") for i in range(9)))
        await append_batches(store, *(finished_batch(f"{i}") for i in range(9)))
    async with opened(path=path, max_rows=3) as store:
        await append_batches(store, finished_batch("new"))
        assert [each.batch_id for each in (await read_batches(store)).records] == ["7", "8", "new"]
        assert await read_ids(store) == await example_ids(store) == ["6", "7", "8"]


async def test_examples_are_what_a_plain_list_says(path: str) -> None:
    """Against a model of lists, over messages at random, repeated ids and a small limit."""
    rng = random.Random(7)
    kept: dict[str, list[str]] = {"requests": [], "forecasts": []}
    examples: list[str] = []
    made: list[str] = []
    seen: list[str] = []
    last_row = 0
    async with opened(path=path, max_rows=6) as store:
        for _ in range(120):
            ids = [f"{rng.randrange(25)}" for _ in range(rng.randrange(1, 5))]
            kind, other = rng.sample(["requests", "forecasts"], 2)
            if kind == "requests":
                await append(store, *(finished(each) for each in ids))
            else:
                await append_forecasts(store, *(forecast_record(each) for each in ids))
            num_before = len(examples)
            for each in ids:
                if each not in kept[kind]:
                    kept[kind].append(each)
                    examples += [each] * (each in kept[other])
            new = examples[num_before:]
            kept[kind] = kept[kind][-6:]
            gone = set(examples) - (set(kept["requests"]) & set(kept["forecasts"]))
            examples = [each for each in examples if each not in gone]
            made += [each for each in new if each not in gone]
            assert await example_ids(store) == examples
            assert await example_ids(store, limit=1) == examples[:1], "pages stay full"
            assert await read_ids(store) == kept["requests"]
            page = await read_examples(store, last_row)
            seen += [each.finished.request_id for each in page.examples]
            last_row = page.last_row
            assert seen == made, "a reader that goes on misses nothing and sees nothing twice"
    assert len(seen) > 30


async def test_batches_come_back_in_pages_each_once(path: str) -> None:
    batches = [finished_batch(f"{i}", i) for i in range(5)]
    async with opened(path=path) as store:
        assert await read_batches(store, 7) == BatchPage(0, ())
        await append_batches(store, *batches[:3])
        await append_batches(store, *batches[2:], batches[0])
        first = await read_batches(store, 0, 3)
        rest = await read_batches(store, first.last_row, 3)
        assert [*first.records, *rest.records] == batches
        assert num_counted(store, "batches") == 5
        assert (await read(store)).last_row == 0, "each kind has rows of its own"


async def test_pages_of_examples_and_batches_have_their_limits(path: str) -> None:
    async with opened(path=path) as store:
        await append_forecasts(store, *(forecast_record(f"{i}") for i in range(MAX_EXAMPLES + 1)))
        await append(store, *(finished(f"{i}") for i in range(MAX_EXAMPLES + 1)))
        assert len((await read_examples(store, 0, 10**9)).examples) == MAX_EXAMPLES
        assert (await read_examples(store, 0, -1)).examples == ()
        await append_batches(store, *(finished_batch(f"{i}") for i in range(MAX_PAGE + 1)))
        assert len((await read_batches(store, 0, 10**9)).records) == MAX_PAGE

"""Series of many things: rows that come and go, two tiers of time, and a bound on the memory."""

from __future__ import annotations

import tracemalloc

from core.codec import decode, encode
from core.messages.series import SeriesQuery, TableReply
from core.series.table import MINUTES, SECONDS, SeriesTable

NOW = 1_800_000_000.0
SECOND, MINUTE = SeriesQuery(), SeriesQuery(by_minute=True)


def lines(reply: TableReply) -> dict[tuple[str, str], tuple[float | None, ...]]:
    return {(row.name, column.name): column.values for row in reply.rows for column in row.columns}


def test_a_row_that_comes_later_has_no_values_before() -> None:
    table = SeriesTable(4, 3)
    table.tick({"a": {"load": 1.0}}, NOW)
    table.tick({"a": {"load": 2.0}, "b": {"load": 5.0, "kv": 0.5}}, NOW + 1)
    table.tick({"b": {"load": 6.0}}, NOW + 2)
    reply = table.since(SECOND, table.names, 9)
    assert reply.at == (NOW, NOW + 1, NOW + 2)
    assert lines(reply) == {
        ("a", "load"): (1.0, 2.0, None),
        ("b", "load"): (None, 5.0, 6.0),
        ("b", "kv"): (None, 0.5, None),
    }
    assert table.since(SeriesQuery(after=NOW + 1), ["b", "unknown"], 9).at == (NOW + 2,)
    assert decode(encode(reply), TableReply) == reply


def test_a_minute_is_a_mean_or_the_peak() -> None:
    table = SeriesTable(1, 2, peaks=("restarts",))
    for second in range(61):
        table.tick({"a": {"load": float(second), "restarts": float(second > 30)}}, NOW + second)
    reply = table.since(MINUTE, ["a"], 9)
    assert reply.at == (NOW + 60,)
    assert lines(reply) == {("a", "load"): (30.0,), ("a", "restarts"): (1.0,)}


def test_both_tiers_keep_the_newest_points() -> None:
    table = SeriesTable(1, 1)
    for number in range(MINUTES + 5):
        table.tick({"a": {"load": float(number)}}, NOW + 60 * number)
    second, minute = table.since(SECOND, ["a"], 1), table.since(MINUTE, ["a"], 1)
    assert (len(second.at), len(minute.at)) == (SECONDS, MINUTES)
    assert lines(second)["a", "load"][-1] == MINUTES + 4
    assert list(minute.at) == sorted(minute.at)


def test_a_row_that_is_silent_gives_its_place_to_another() -> None:
    table = SeriesTable(2, 1)
    table.tick({"a": {"x": 1.0}, "b": {"x": 1.0}, "c": {"x": 1.0}}, NOW)
    assert table.names == ("a", "b")
    assert table.since(SECOND, table.names, 9).num_left_out == 1
    table.tick({"b": {"x": 2.0}, "c": {"x": 2.0}}, NOW + SECONDS)
    assert table.names == ("b", "c")
    assert lines(table.since(SECOND, table.names, 9))["c", "x"] == (None, 2.0)
    assert table.since(SECOND, table.names, 1).num_left_out == 1  # by the limit of the answer


def test_memory_is_bounded_whatever_comes() -> None:
    table = SeriesTable(64, 9)
    tracemalloc.start()
    for number in range(30):
        names = (f"row {each}" for each in range(40 * number, 40 * number + 200))
        table.tick({name: {f"column {each}": 1.0 for each in range(20)} for name in names}, NOW + 60 * number)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 6.5e6  # 64 rows of 9 columns, of 9,360 bytes each

"""The history of a service: rings, percentiles from buckets, counts that come twice or late, two tiers of time."""

from __future__ import annotations

import dataclasses
import random
import sys
import tracemalloc

import pytest

from farsight.core.codec import decode, encode
from farsight.core.messages.series import (
    Activity,
    ComponentsQuery,
    ComponentsReply,
    Count,
    SeriesQuery,
    SeriesReply,
    TableReply,
    TrafficCounts,
)
from farsight.core.messages.status import ComponentStatus
from farsight.core.messages.tenants import TenantUsage
from farsight.core.series.components import MAX_EVENTS, MAX_SHOWN, ComponentHistory, SeriesTable
from farsight.core.series.service import (
    COLUMNS,
    FORGET_S,
    MAX_TENANTS,
    MINUTES,
    OTHERS,
    SECONDS,
    Instant,
    Ring,
    ServiceSeries,
)
from farsight.core.series.tally import NUM_BUCKETS, TrafficTally, add_counts, bucket_of, percentile_s

NOW = 1_800_000_000.0
SECOND = SeriesQuery()
MINUTE = SeriesQuery(by_minute=True)


def column(reply: SeriesReply, name: str) -> tuple[float | None, ...]:
    return next(each.values for each in reply.columns if each.name == name)


def usage(name: str, gpu_s: float, rejected: int = 0) -> TenantUsage:
    return TenantUsage(name, 1, 1, 1, 0, rejected, 0, gpu_s)


def test_a_ring_keeps_the_newest_points() -> None:
    ring = Ring(3, ("a", "b"))
    assert ring.after(0.0) == []
    for at in range(1, 6):
        if at == 5:
            ring.drop("b")
            ring.open("c")
        ring.add(float(at), {"a": 10.0 * at, "c": None if at < 5 else 1.0})
    places = ring.after(0.0)
    assert ring.instants(places) == (3.0, 4.0, 5.0)
    assert (ring.values("a", places), ring.values("c", places)) == ((30.0, 40.0, 50.0), (None, None, 1.0))
    assert ring.instants(ring.after(4.0)) == (5.0,)
    assert ring.after(5.0) == []


def test_percentiles_of_buckets_are_close() -> None:
    draw = random.Random(7)
    durations = sorted(draw.lognormvariate(-2.0, 1.5) for _ in range(20_000))
    counts: dict[int, int] = {}
    add_counts(counts, ((bucket_of(each), 1) for each in durations))
    for level in (0.5, 0.9, 0.99):
        assert percentile_s(counts, level) == pytest.approx(durations[int(level * len(durations))], rel=0.095)
    assert percentile_s({}, 0.5) is None
    assert (bucket_of(0.0), bucket_of(1e-4), bucket_of(1e9)) == (0, 0, NUM_BUCKETS - 1)


def test_counts_become_rates_and_percentiles() -> None:
    series, tally = ServiceSeries(), TrafficTally()
    series.report(tally.counts("a"), NOW)
    series.tick(Instant(prompt_tokens={"0": 1_000_000}), NOW)
    tally.prompt(30, outside=False)  # counted by its Scheduler
    tally.prompt(12, outside=True)
    tally.first_token(0.2, 1)
    tally.tokens(0.1, 5)
    tally.finished("stop", 0.8)
    tally.finished("error", 9.0)
    tally.finished("abort", 9.0)
    tally.rejected += 3
    assert tally.counts("a").abandoned == 1
    counts = decode(encode(tally.counts("a")), TrafficCounts)
    series.report(counts, NOW + 1)
    series.report(counts, NOW + 1.5)  # comes twice, counts once
    instant = Instant(running=2, waiting=1, kv_used=0.25, kv_peak=0.5, prompt_tokens={"0": 1_000_020, "1": 500})
    series.tick(instant, NOW + 2)
    reply = decode(encode(series.since(SeriesQuery(after=NOW))), SeriesReply)
    assert reply.at == (NOW + 2,)
    shown = {each.name: each.values[0] for each in reply.columns}
    assert (shown["output_tokens"], shown["prompt_tokens"]) == (3.0, 16.0)  # 6, and 12 + 20, tokens in two seconds
    assert (shown["ended"], shown["failed"], shown["rejected"]) == (1.5, 0.5, 1.5)
    assert (shown["running"], shown["waiting"], shown["kv_used"], shown["kv_peak"]) == (2.0, 1.0, 0.25, 0.5)
    assert shown["ttft_p50"] == pytest.approx(0.2, rel=0.1)
    assert shown["itl_p99"] == pytest.approx(0.02, rel=0.1)
    assert shown["jct_p90"] == pytest.approx(0.8, rel=0.1)
    assert shown["queue_delay_s"] is None


def test_what_comes_after_a_death_is_no_spike_and_a_clock_that_stands_adds_nothing() -> None:
    """After the death of a Supervisor the ingress replicas' counts are large; a restarted worker's are small."""
    series = ServiceSeries()
    for at, ended, moved in ((0, 1_000_000, 500), (1, 1_000_002, 800), (2, 1_000_002, 20), (2, 9, 9), (1, 9, 9)):
        if ended > 9:
            series.report(TrafficCounts("old", ended=ended), NOW + at)
        series.tick(Instant(moved_bytes=moved), NOW + at)
    assert series.since(SECOND).at == (NOW, NOW + 1, NOW + 2)
    assert column(series.since(SECOND), "ended") == (0.0, 2.0, 0.0)
    assert column(series.since(SECOND), "moved_bytes") == (0.0, 300.0, 0.0)


def test_prompt_tokens_are_booked_while_they_are_computed_and_an_abort_books_none() -> None:
    series, tally = ServiceSeries(), TrafficTally()
    series.report(tally.counts("a"), NOW)
    for second, computed in enumerate((0, 512, 1024, 1024, 100)):  # the last by a new Scheduler
        if second == 3:
            tally.finished("abort", 3.0)
            series.report(tally.counts("a"), NOW + second)
        series.tick(Instant(prompt_tokens={"0": computed}), NOW + second)
    assert column(series.since(SECOND), "prompt_tokens") == (0.0, 512.0, 512.0, 0.0, 0.0)
    assert tally.counts("a").prompt_tokens == 0


def test_a_minute_holds_what_its_seconds_held() -> None:
    series, tally = ServiceSeries(), TrafficTally()
    series.report(tally.counts("a"), NOW)
    for second in range(1, 121):
        tally.finished("stop", 0.5 if second <= 60 else 2.0)
        series.report(tally.counts("a"), NOW + second)
        series.tick(Instant(running=second, kv_peak=0.9 if second == 30 else 0.1), NOW + second)
    reply = series.since(MINUTE)
    assert reply.at == (NOW + 60, NOW + 120)
    assert column(reply, "ended") == (1.0, 1.0)
    assert column(reply, "running") == (30.5, 90.5)
    assert column(reply, "kv_peak") == pytest.approx((0.9, 0.1))
    assert column(reply, "jct_p50") == pytest.approx((0.5, 2.0), rel=0.1)


def test_memory_is_bounded_however_long_it_runs() -> None:
    series = ServiceSeries()
    for second in range(2 * SECONDS):
        usages = tuple(usage(f"t{number}", second * 0.01) for number in range(40))
        series.report(TrafficCounts(f"ingress-{second}"), NOW + 10.0 * second)
        series.tick(Instant(tenants=usages), NOW + 10.0 * second)
    reply = series.since(SECOND)
    assert len(reply.at) == SECONDS
    assert len(reply.tenants) == MAX_TENANTS + 1 and reply.tenants[-1].name == OTHERS
    assert len(series._last) <= FORGET_S / 10 + 1
    rings = (series._seconds, series._minutes)
    stored = sum(sys.getsizeof(each) for ring in rings for each in (ring._at, *ring._columns.values()))
    assert stored < 20e6
    assert len(COLUMNS) * 4 * (SECONDS + MINUTES) < stored


def test_the_first_tokens_of_a_span_are_counted_once_in_whole_minutes() -> None:
    """61 minutes have a first token each, and those of the first twenty are slow."""
    series, tally = ServiceSeries(), TrafficTally()
    series.report(tally.counts("a"), NOW)
    for minute in range(61):
        tally.first_token(8.0 if minute < 20 else 1.0, 1)
        series.report(tally.counts("a"), NOW + 60.0 * minute + 1)
        series.tick(Instant(gpu_s={"0": 0.5 * minute}), NOW + 60.0 * minute + 2)
    assert series.since(SECOND).ttft_s == ()
    assert series.since(SeriesQuery(span_s=120.0)).ttft_s == pytest.approx((1.0, 1.0, 1.0), rel=0.1)
    assert series.since(SeriesQuery(span_s=86_400.0)).ttft_s == pytest.approx((1.0, 8.0, 8.0), rel=0.1)
    assert ServiceSeries().since(SeriesQuery(span_s=60.0)).ttft_s == (None, None, None)
    assert column(series.since(SECOND), "gpu_s")[-1] == pytest.approx(0.5 / 60, rel=1e-3)


def test_cost_of_tenants_and_their_refusals() -> None:
    series = ServiceSeries()
    series.tick(Instant(tenants=(usage("a", 5.0, rejected=7),)), NOW)
    series.tick(Instant(tenants=(usage("a", 5.5, rejected=9), usage("<b>", 0.25))), NOW + 1)
    reply = series.since(SeriesQuery(after=NOW))
    assert {each.name: each.values for each in reply.tenants} == {"a": (0.5,), "<b>": (0.25,)}
    assert column(reply, "rejected") == (2.0,)


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


def test_both_tiers_keep_the_newest_points_and_a_minute_is_a_mean_or_the_peak() -> None:
    table = SeriesTable(1, 2, peaks=("restarts",))
    for at in range(61):
        table.tick({"a": {"load": float(at), "restarts": float(at > 30)}}, NOW + at)
    reply = table.since(MINUTE, ["a"], 9)
    assert reply.at == (NOW + 60,)
    assert lines(reply) == {("a", "load"): (30.0,), ("a", "restarts"): (1.0,)}
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


ROW = ComponentStatus("worker-0", "ModelWorker", 4711, "node-a", "ready", 3, 0.1, 0, 0)
DEAD = dataclasses.replace(ROW, pid=0, node="", state="dead", queue=0, restarts=0)


def activity(row: ComponentStatus, **counts: float) -> Activity:
    return Activity(row, tuple(Count(name, value) for name, value in counts.items()))


def reply(history: ComponentHistory, kind: str = "ModelWorker") -> ComponentsReply:
    return history.since(ComponentsQuery(kind, SeriesQuery()))


def lines_of(history: ComponentHistory) -> dict[str, tuple[float | None, ...]]:
    (row,) = reply(history).lines.rows
    return {column.name: column.values for column in row.columns}


def test_counts_become_rates() -> None:
    history = ComponentHistory()
    history.tick([activity(ROW, steps=100)], NOW)
    history.tick([activity(ROW, steps=150)], NOW + 1)
    history.tick([activity(ROW, steps=250)], NOW + 3)
    history.tick([activity(ROW, steps=7)], NOW + 4)  # a new process counts from 0
    history.tick([activity(ROW, steps=9)], NOW + 4)  # no later instant: left out
    assert lines_of(history)["steps"] == (0.0, 50.0, 50.0, 7.0)
    assert lines_of(history)["queue"] == (3.0,) * 4
    history.tick([activity(DEAD)], NOW + 5)  # late: what it did meanwhile counts over both seconds
    history.tick([activity(ROW, steps=27)], NOW + 6)
    assert lines_of(history)["steps"][4:] == (None, 10.0)


def test_a_death_is_seen_with_its_reason_and_counted_once() -> None:
    history = ComponentHistory()
    back = dataclasses.replace(ROW, pid=4712, restarts=1, last_end="its process died")
    for second, row in enumerate((ROW, DEAD, DEAD, DEAD, dataclasses.replace(back, state="starting"), back)):
        history.tick([activity(row)], NOW + second)
    assert lines_of(history)["health"] == (0.0, 1.0, 1.0, 2.0, 1.0, 0.0)
    assert lines_of(history)["restarts"] == (0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert lines_of(history)["queue"][1:4] == (None, None, None)
    events = [(each.at - NOW, each.state, each.reason) for each in reply(history).events]
    assert events == [(5, "ready", ""), (4, "starting", ""), (4, "restarted", "its process died"), (3, "dead", "")]


BACK = dataclasses.replace(ROW, pid=5, restarts=1)


@pytest.mark.parametrize(
    ("rows", "health", "states"),
    [
        ((DEAD, DEAD, ROW), (1.0, 1.0, 0.0), ["ready"]),
        ((BACK, DEAD, DEAD, BACK), (0.0, 1.0, 1.0, 0.0), []),
        ((ROW, DEAD, BACK), (0.0, 1.0, 0.0), ["restarted"]),
    ],
    ids=["never answered: starting", "only late", "died and came back at once"],
)
def test_one_that_does_not_answer_is_not_dead_at_once(
    rows: tuple[ComponentStatus, ...], health: tuple[float, ...], states: list[str]
) -> None:
    history = ComponentHistory()
    for second, row in enumerate(rows):
        history.tick([activity(row)], NOW + second)
    assert lines_of(history)["health"] == health
    assert [each.state for each in reply(history).events] == states
    history.tick([], NOW + 9)
    assert reply(history).lines.rows == (), "one that is no longer wanted is forgotten"


def test_a_kind_that_nobody_knows_is_kept_like_the_others() -> None:
    history = ComponentHistory()
    image = dataclasses.replace(ROW, name="image-encoder-0", kind="ImageEncoder")
    history.tick([activity(ROW, steps=1), activity(image, messages=4)], NOW)
    (row,) = reply(history, "ImageEncoder").lines.rows
    assert row.name == "image-encoder-0"
    assert reply(history, "<script>") == ComponentsReply(dataclasses.replace(reply(history).lines, rows=()), ())
    found = reply(history)
    assert decode(encode(found), ComponentsReply) == found


def test_answers_and_events_are_bounded() -> None:
    history = ComponentHistory()
    rows = [dataclasses.replace(ROW, name=f"worker-{number}", pid=number + 1) for number in range(MAX_SHOWN + 3)]
    for second in range(50):
        states = "ready" if second % 2 else "waiting"
        history.tick([activity(dataclasses.replace(row, state=states)) for row in rows], NOW + second)
    found = reply(history)
    assert (len(found.lines.rows), found.lines.num_left_out) == (MAX_SHOWN, 3)
    assert len(found.events) == MAX_EVENTS

"""The history of a service: rings, percentiles from buckets, counts that come twice or late, two tiers of time."""

from __future__ import annotations

import random
import sys

import pytest

from core.codec import decode, encode
from core.errors import InvalidValueError
from core.messages.series import SeriesQuery, SeriesReply, TrafficCounts
from core.messages.tenants import TenantUsage
from core.series.durations import NUM_BUCKETS, add_counts, bucket_of, percentile_s
from core.series.ring import Ring
from core.series.service import COLUMNS, FORGET_S, MAX_TENANTS, MINUTES, OTHERS, SECONDS, Instant, ServiceSeries
from core.series.tally import TrafficTally

NOW = 1_800_000_000.0
SECOND = SeriesQuery()
MINUTE = SeriesQuery(by_minute=True)


def column(reply: SeriesReply, name: str) -> tuple[float | None, ...]:
    return next(each.values for each in reply.columns if each.name == name)


def usage(name: str, gpu_s: float, rejected: int = 0) -> TenantUsage:
    return TenantUsage(name, 1, 1, 1, 0, rejected, 0, gpu_s)


def test_a_ring_keeps_the_newest_points() -> None:
    ring = Ring(("a", "b"), 3)
    assert ring.after(0.0) == ([], {"a": [], "b": []})
    for at in range(1, 6):
        ring.add(float(at), {"a": 10.0 * at})
    assert len(ring) == 3
    assert ring.after(0.0) == ([3.0, 4.0, 5.0], {"a": [30.0, 40.0, 50.0], "b": [None, None, None]})
    assert ring.after(4.0) == ([5.0], {"a": [50.0], "b": [None]})
    assert ring.after(5.0)[0] == []


def test_a_ring_without_room_is_refused() -> None:
    with pytest.raises(InvalidValueError, match="capacity"):
        Ring(("a",), 0)


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


def test_the_first_report_of_a_replica_is_what_later_ones_are_compared_with() -> None:
    """After the death of a Supervisor the ingress replicas' counts are large: they must be no spike."""
    series = ServiceSeries()
    series.report(TrafficCounts("old", ended=1_000_000), NOW)
    series.tick(Instant(), NOW)
    series.report(TrafficCounts("old", ended=1_000_002), NOW + 1)
    series.tick(Instant(), NOW + 1)
    assert column(series.since(SECOND), "ended") == (0.0, 2.0)


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
    for second in range(3 * SECONDS):
        usages = tuple(usage(f"t{number}", second * 0.01) for number in range(40))
        series.report(TrafficCounts(f"ingress-{second}"), NOW + 10.0 * second)
        series.tick(Instant(tenants=usages), NOW + 10.0 * second)
    reply = series.since(SECOND)
    assert len(reply.at) == SECONDS
    assert len(reply.tenants) == MAX_TENANTS + 1 and reply.tenants[-1].name == OTHERS
    assert len(series._last) <= FORGET_S / 10 + 1
    rings = [series._seconds, series._minutes, *(ring for pair in series._tenant_rings.values() for ring in pair)]
    stored = sum(sys.getsizeof(each) for ring in rings for each in (ring._at, *ring._columns.values()))
    assert stored < 20e6
    assert len(COLUMNS) * 4 * (SECONDS + MINUTES) < stored


def test_cost_of_tenants_and_their_refusals() -> None:
    series = ServiceSeries()
    series.tick(Instant(tenants=(usage("a", 5.0, rejected=7),)), NOW)
    series.tick(Instant(tenants=(usage("a", 5.5, rejected=9), usage("<b>", 0.25))), NOW + 1)
    reply = series.since(SeriesQuery(after=NOW))
    assert {each.name: each.values for each in reply.tenants} == {"a": (0.5,), "<b>": (0.25,)}
    assert column(reply, "rejected") == (2.0,)


def test_a_clock_that_stands_or_goes_back_adds_nothing() -> None:
    series = ServiceSeries()
    for at in (NOW, NOW, NOW - 5):
        series.tick(Instant(), at)
    assert series.since(SECOND).at == (NOW,)


def test_a_restarted_worker_moves_no_negative_bytes() -> None:
    series = ServiceSeries()
    for at, moved in ((0, 500), (1, 800), (2, 20)):
        series.tick(Instant(moved_bytes=moved), NOW + at)
    assert column(series.since(SECOND), "moved_bytes") == (0.0, 300.0, 0.0)

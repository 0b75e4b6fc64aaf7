"""Why a component works less well is said as long as it is so, and no longer."""

from __future__ import annotations

from core.degraded import FORECASTS_SHED, LOG_WRITE, MAX_REASON, Degraded


def test_what_lasts_is_said_until_it_is_over() -> None:
    degraded = Degraded()
    assert degraded.reason(0.0) == ""
    degraded.clear(LOG_WRITE)
    assert not list(degraded.causes(0.0))
    degraded.note(LOG_WRITE, "the disk is full")
    degraded.note(LOG_WRITE, "the disk is away")
    assert degraded.reason(1e9) == "the disk is away"
    degraded.clear(LOG_WRITE)
    assert degraded.reason(0.0) == ""
    assert list(degraded.causes(0.0)) == [(LOG_WRITE, False)]


def test_single_events_are_said_for_a_while_beside_others() -> None:
    degraded = Degraded()
    degraded.note(FORECASTS_SHED, "shed", 5.0, 10.0)
    degraded.note(LOG_WRITE, "x" * 10_000)
    assert degraded.reason(14.9) == "shed; " + "x" * MAX_REASON
    degraded.note(FORECASTS_SHED, "shed again", 14.9, 10.0)
    assert degraded.reason(24.8).startswith("shed again; ")
    assert dict(degraded.causes(24.9)) == {FORECASTS_SHED: False, LOG_WRITE: True}

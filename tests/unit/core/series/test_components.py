"""The history of components: rates from counts, health from states, restarts with their reasons."""

from __future__ import annotations

import dataclasses

from core.codec import decode, encode
from core.messages.series import Activity, ComponentsQuery, ComponentsReply, Count, SeriesQuery
from core.messages.status import ComponentStatus
from core.series.components import MAX_EVENTS, MAX_SHOWN, ComponentHistory

NOW = 1_800_000_000.0
ROW = ComponentStatus("worker-0", "ModelWorker", 4711, "node-a", "ready", 3, 0.1, 0, 0)
DEAD = dataclasses.replace(ROW, pid=0, node="", state="dead", queue=0, restarts=0)


def activity(row: ComponentStatus, **counts: float) -> Activity:
    return Activity(row, tuple(Count(name, value) for name, value in counts.items()))


def reply(history: ComponentHistory, kind: str = "ModelWorker") -> ComponentsReply:
    return history.since(ComponentsQuery(kind, SeriesQuery()))


def lines(history: ComponentHistory) -> dict[str, tuple[float | None, ...]]:
    (row,) = reply(history).lines.rows
    return {column.name: column.values for column in row.columns}


def test_counts_become_rates() -> None:
    history = ComponentHistory()
    history.tick([activity(ROW, steps=100)], NOW)
    history.tick([activity(ROW, steps=150)], NOW + 1)
    history.tick([activity(ROW, steps=250)], NOW + 3)
    history.tick([activity(ROW, steps=7)], NOW + 4)  # a new process counts from 0
    history.tick([activity(ROW, steps=9)], NOW + 4)  # no later instant: left out
    assert lines(history)["steps"] == (0.0, 50.0, 50.0, 7.0)
    assert lines(history)["queue"] == (3.0,) * 4
    history.tick([activity(DEAD)], NOW + 5)  # late: what it did meanwhile counts over both seconds
    history.tick([activity(ROW, steps=27)], NOW + 6)
    assert lines(history)["steps"][4:] == (None, 10.0)


def test_a_death_is_seen_with_its_reason_and_counted_once() -> None:
    history = ComponentHistory()
    back = dataclasses.replace(ROW, pid=4712, restarts=1, last_end="its process died")
    for second, row in enumerate((ROW, DEAD, DEAD, DEAD, dataclasses.replace(back, state="starting"), back)):
        history.tick([activity(row)], NOW + second)
    assert lines(history)["health"] == (0.0, 1.0, 1.0, 2.0, 1.0, 0.0)
    assert lines(history)["restarts"] == (0.0, 0.0, 0.0, 0.0, 1.0, 1.0)
    assert lines(history)["queue"][1:4] == (None, None, None)
    events = [(each.at - NOW, each.state, each.reason) for each in reply(history).events]
    assert events == [(5, "ready", ""), (4, "starting", ""), (4, "restarted", "its process died"), (3, "dead", "")]


def test_one_that_has_never_answered_is_starting() -> None:
    history = ComponentHistory()
    for second, row in enumerate((DEAD, DEAD, ROW)):
        history.tick([activity(row)], NOW + second)
    assert lines(history)["health"] == (1.0, 1.0, 0.0)
    assert [each.state for each in reply(history).events] == ["ready"]


def test_one_that_was_only_late_has_neither_died_nor_restarted() -> None:
    history = ComponentHistory()
    again = dataclasses.replace(ROW, restarts=2)
    for second, row in enumerate((again, DEAD, DEAD, again)):
        history.tick([activity(row)], NOW + second)
    assert reply(history).events == ()
    assert lines(history)["restarts"] == (2.0,) * 4
    assert lines(history)["health"] == (0.0, 1.0, 1.0, 0.0)


def test_one_that_died_and_came_back_at_once_has_restarted() -> None:
    history = ComponentHistory()
    for second, row in enumerate((ROW, DEAD, dataclasses.replace(ROW, pid=5, restarts=1))):
        history.tick([activity(row)], NOW + second)
    assert [each.state for each in reply(history).events] == ["restarted"]


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


def test_one_that_is_no_longer_wanted_is_forgotten() -> None:
    history = ComponentHistory()
    history.tick([activity(ROW)], NOW)
    history.tick([], NOW + 1)
    assert reply(history).lines.rows == ()

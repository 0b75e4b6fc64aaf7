"""Requests of the class ``core.request.FLEX`` take what the others leave.

While one of the others waits for its first token, or stands still, no flex request computes: only the step that is
under way when the other comes may hold work of flex requests. What KV these hold counts as free for the others. A flex
request whose KV is in the way loses it at once and computes it again later: a copy to the host would take longer than a
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.interfaces import Job, ScheduledRequest


def with_room(flex: Sequence[ScheduledRequest], used: int, capacity: int) -> list[ScheduledRequest]:
    """The first of these resident jobs that have room for a token more beside what is used; tokens."""
    kept = []
    for job in flex:
        used += job.known_len + 1
        if used > capacity:
            break
        kept.append(job)
    return kept


def all_stream(running: Iterable[Job]) -> bool:
    """Whether all of these have had their first tokens and go on."""
    return all(job.decodes for job in running)

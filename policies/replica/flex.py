"""Requests of the class ``core.request.FLEX`` take what the others leave.

While one of the others waits for its first token, or stands still, no flex request computes: only the step that is
under way when the other comes may hold work of flex requests. What KV these hold counts as free for the others. A flex
request whose KV is in the way loses it at once and computes it again later: a copy to the host would take longer than a
step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policies.interfaces import Job, ScheduledRequest


def with_room(flex: Sequence[ScheduledRequest], free_blocks: int, block_size: int) -> list[ScheduledRequest]:
    """The first of these resident jobs that have room for a token more in what the firm ones leave."""
    kept = []
    for job in flex:
        free_blocks -= next_blocks(job, block_size)
        if free_blocks < 0:
            break
        kept.append(job)
    return kept


def next_blocks(job: Job, block_size: int) -> int:
    """Blocks that it holds with a token more."""
    return -(-(job.known_len + 1) // block_size)


def all_stream(running: Iterable[Job]) -> bool:
    """Whether all of these have had their first tokens and go on."""
    return all(job.decodes for job in running)

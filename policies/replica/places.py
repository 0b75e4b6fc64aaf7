"""How many requests of a replica execute at once, and the room that the class ``core.request.FLEX`` takes of others.

While another request waits for its first token, or stands still, no flex request computes: only the step that is under
way when the other request comes may hold work of flex requests. The KV of flex requests counts as free for the others.
A flex request whose KV is in the way loses it at once and computes it again later: a copy to the host would take longer
than a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from farsight.policies.interfaces import Job, ScheduledRequest


@dataclass(slots=True)
class PlaceLimit:
    """Places of a replica.

    Attributes:
        most: The engine's limit.
        num: As the order decided last (``Order.num_places``).
    """

    most: int
    num: int


def with_room(flex: Sequence[ScheduledRequest], free_blocks: int, block_size: int) -> list[ScheduledRequest]:
    """Returns the first of these resident jobs that fit, with a token more each, into the blocks left by firm jobs."""
    kept = []
    for job in flex:
        free_blocks -= next_blocks(job, block_size)
        if free_blocks < 0:
            break
        kept.append(job)
    return kept


def next_blocks(job: Job, block_size: int) -> int:
    """Returns the blocks that the job holds with one token more."""
    return -(-(job.known_len + 1) // block_size)


def all_stream(running: Iterable[Job]) -> bool:
    """Returns whether all of these jobs have had their first tokens and decode."""
    return all(job.decodes for job in running)

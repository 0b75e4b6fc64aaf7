"""How many requests of a replica execute at once, which step aside for those that are due, and what flex requests take.

While another request waits for its first token, or stands still, no request of the class ``core.request.FLEX``
computes: only the step that is under way when the other request comes may hold work of flex requests. The KV of flex
requests counts as free for the others. A flex request whose KV is in the way loses it at once and computes it again
later: a copy to the host would take longer than a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

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


def due_first(residents: list[Job]) -> list[Job]:
    """Returns jobs in the order of their deadlines, the others as they were."""
    if all(job.deadline_at == math.inf for job in residents):
        return residents
    return sorted(residents, key=attrgetter("deadline_at"))


def step_aside(residents: Iterable[Job], due: Iterable[Job], room: int) -> tuple[list[Job], list[Job]]:
    """Lets residents step aside for waiting jobs of their tenant that are due, while there is no place.

    Args:
        room: Places that are free.

    Returns:
        Residents and due jobs, best first; and the jobs that stepped aside, which keep their KV and go on as soon as
        there is a place.
    """
    first, aside = list(residents), list[Job]()
    for job in sorted(due, key=attrgetter("deadline_at"))[room:]:
        victims = (each for each in reversed(first) if _may_step_aside(each, job))
        victim = next(victims, None)
        if victim is not None:
            first.remove(victim)
            first.append(job)
            aside.append(victim)
    return first, aside[::-1]


def _may_step_aside(job: Job, due: Job) -> bool:
    return job.tenant == due.tenant and job.priority >= due.priority and job.deadline_at == math.inf and job.is_resident


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

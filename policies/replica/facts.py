"""What a replica's scheduler has booked and decided, one fact at a time, for the observer of it (``DecisionTrace``)."""

from __future__ import annotations

from dataclasses import dataclass

from core.request import Request, SequenceStatus
from policies.interfaces import Job, ScheduledRequest


@dataclass(slots=True, eq=False)
class Fact:
    """Something that the scheduler has booked or decided about a request, as it happens.

    What the parts say of it is asked when it is observed: an ``Evicted`` before its KV is ordered away.
    """


@dataclass(slots=True, eq=False)
class Arrived(Fact):
    """A request has come, at ``at``: before now where it has waited through a change of workers."""

    scheduled: ScheduledRequest
    placement: bytes
    at: float


@dataclass(slots=True, eq=False)
class TurnedAway(Fact):
    """A request came that will never run here."""

    request: Request
    placement: bytes
    reason: str
    at: float


@dataclass(slots=True, eq=False)
class Adopted(Fact):
    """The worker had it before this scheduler came; how it got there is not known any more."""

    scheduled: ScheduledRequest


@dataclass(slots=True, eq=False)
class Predicted(Fact):
    """Its forecast has come after it."""

    scheduled: ScheduledRequest


@dataclass(slots=True, eq=False)
class NotAdmitted(Fact):
    """Admission has said no to these; noted once a wait."""

    jobs: list[Job]


@dataclass(slots=True, eq=False)
class Admitted(Fact):
    """It has a place.

    Attributes:
        returns: Its KV comes back from the host ...
        ahead: ... ahead of its turn, for the KV policy has called it back.
    """

    scheduled: ScheduledRequest
    returns: bool
    ahead: bool


@dataclass(slots=True, eq=False)
class StartedAlone(Fact):
    """The worker has started it by itself, as a standby."""

    scheduled: ScheduledRequest


@dataclass(slots=True, eq=False)
class TurnsChanged(Fact):
    """Who was to execute until now, and who is from now on: a place alone is no turn."""

    before: list[str]
    after: list[str]


@dataclass(slots=True, eq=False)
class Evicted(Fact):
    """It is about to lose its place; its KV is moved to the host, or dropped."""

    scheduled: ScheduledRequest
    to_host: bool
    short_blocks: int


@dataclass(slots=True, eq=False)
class HostFull(Fact):
    """The worker had no room on the host for its KV, or none to move."""

    scheduled: ScheduledRequest


@dataclass(slots=True, eq=False)
class Left(Fact):
    """It is here no more, though it had not ended; ``why`` is the kind of the decision."""

    scheduled: ScheduledRequest
    why: str


@dataclass(slots=True, eq=False)
class EndReached(Fact):
    """It has reached its end in the worker."""

    scheduled: ScheduledRequest
    status: SequenceStatus

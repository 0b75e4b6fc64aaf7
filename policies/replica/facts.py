"""Facts that a replica's scheduler has booked or decided, one at a time, for their observer (``DecisionTrace``)."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.decisions import Facts
from farsight.core.messages.kv import Brought
from farsight.core.request import Request, SequenceStatus
from farsight.policies.interfaces import Job, ScheduledRequest


@dataclass(slots=True, eq=False)
class Fact:
    """A fact that the scheduler has booked or decided about a request, as it happens.

    The parts are asked for their numbers when the fact is observed: of an ``Evicted`` before its KV is ordered away.
    """


@dataclass(slots=True, eq=False)
class Arrived(Fact):
    """A request came at the instant ``at``: before now if it has waited through a change of workers."""

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
    """The worker had the request before this scheduler came; how it got there is no longer known."""

    scheduled: ScheduledRequest


@dataclass(slots=True, eq=False)
class Predicted(Fact):
    """The forecast of a request has come after the request."""

    scheduled: ScheduledRequest


@dataclass(slots=True, eq=False)
class NotAdmitted(Fact):
    """Admission has refused these jobs; noted once a wait."""

    jobs: list[Job]


@dataclass(slots=True, eq=False)
class Admitted(Fact):
    """A request has got a place.

    Attributes:
        returns: Its KV comes back from the host ...
        ahead: ... ahead of its turn, as the KV policy has called it back.
        room: The numbers by which all requests here fit; None if admission was asked.
    """

    scheduled: ScheduledRequest
    returns: bool
    ahead: bool
    room: Facts | None = None


@dataclass(slots=True, eq=False)
class StartedAlone(Fact):
    """The worker has started a standby by itself."""

    scheduled: ScheduledRequest


@dataclass(slots=True, eq=False)
class TurnsChanged(Fact):
    """The requests that were to execute until now, and those from now on: a place alone is no turn."""

    before: list[str]
    after: list[str]


@dataclass(slots=True, eq=False)
class Evicted(Fact):
    """A request is about to lose its place; its KV is moved to the host, or dropped."""

    scheduled: ScheduledRequest
    to_host: bool
    short_blocks: int


@dataclass(slots=True, eq=False)
class HostFull(Fact):
    """The worker had no room on the host for the request's KV, or no KV to move."""

    scheduled: ScheduledRequest


@dataclass(slots=True, eq=False)
class Left(Fact):
    """A request has left before its end; ``why`` is the kind of the decision."""

    scheduled: ScheduledRequest
    why: str


@dataclass(slots=True, eq=False)
class EndReached(Fact):
    """A request has reached its end in the worker; ``brought`` is what came back from tiers at its start."""

    scheduled: ScheduledRequest
    status: SequenceStatus
    brought: Brought | None = None

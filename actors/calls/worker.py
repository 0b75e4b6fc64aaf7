"""Messages to a ModelWorker, or to the backend of an external server in its place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from actors.calls.message import message
from core.messages.plans import Plan, ReportPoll, StepReport, WorkerState
from core.messages.tokens import TokenBatches, TokenPoll


@dataclass(frozen=True, slots=True)
class RankTicket:
    """ModelWorker -> Rank: rank 0's address, and the key that the other ranks need to connect."""

    host: str
    port: int
    key: str


class TokenCalls(Protocol):
    """What ingress replicas fetch tokens from."""

    @message(long=True)
    async def poll_tokens(self, poll: TokenPoll) -> TokenBatches:
        """Acknowledges tokens and waits for more; returns none after a while without new tokens."""


class WorkerCalls(TokenCalls, Protocol):
    """The ModelWorker of one replica."""

    @message(long=True)
    async def gather(self) -> RankTicket:
        """Waits until rank 0 listens; returns the address to which the other ranks of the replica connect."""

    @message(long=True)
    async def connect(self) -> WorkerState:
        """Gives the calling Scheduler a new lease; returns when the model is loaded."""

    @message(long=True)
    async def push_plan(self, plan: Plan) -> None:
        """Applies a plan at the next step boundary."""

    @message(long=True)
    async def poll_report(self, poll: ReportPoll) -> StepReport:
        """Acknowledges reports and waits for the next one."""

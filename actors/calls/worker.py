"""What computes answers: the ModelWorker, and the backend of another server in its place."""

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
    """Where ingress replicas fetch tokens."""

    @message(long=True)
    async def poll_tokens(self, poll: TokenPoll) -> TokenBatches:
        """Acknowledges tokens and waits for more; after a while it answers with none."""


class WorkerCalls(TokenCalls, Protocol):
    """The ModelWorker of one replica."""

    @message(long=True)
    async def gather(self) -> RankTicket:
        """Where the other ranks of the replica are to come to; waits until rank 0 listens."""

    @message(long=True)
    async def connect(self) -> WorkerState:
        """A Scheduler takes over, and waits until the model is loaded."""

    @message(long=True)
    async def push_plan(self, plan: Plan) -> None:
        """Applies at the next step boundary."""

    @message(long=True)
    async def poll_report(self, poll: ReportPoll) -> StepReport:
        """Acknowledges reports and waits for the next one."""

"""What the Router, the replicas' Schedulers and their KV offload managers answer."""

from __future__ import annotations

from typing import Protocol

from actors.calls.message import message
from core.load_snapshot import LoadSnapshot
from core.messages.cache import CacheReply
from core.messages.fleet import InFlight, ReplicaName, ReplicaNews, ReplicaState, ServedModel
from core.messages.forecasts import ForecastsMade
from core.messages.kv import KVUsage, OffloadOrders, OffloadQuestion
from core.messages.live import LeftWaiting, LiveQuery, ReplicaLive
from core.messages.log import RequestTraces, TraceQuery
from core.messages.placement import PlacementView, ReplicaLoads
from core.messages.plans import StepReport
from core.messages.requests import Announce, AnnounceReply, Keys, Refusals, Submit, SubmitReply
from core.messages.status import ComponentRows, ComponentStatus


class RouterCalls(Protocol):
    """The Router, or in batch mode the Batcher under its name."""

    @message(packed=True)
    async def submit(self, submit: Submit) -> SubmitReply:
        """New or resumed requests of one ingress replica; answers where each of them is, or why it is refused."""

    @message()
    async def foresee(self, forecasts: ForecastsMade) -> None:
        """Predicted output lengths of requests that were submitted before."""

    @message()
    async def outlook(self) -> LoadSnapshot:
        """What is in flight and what the replicas can take."""

    @message()
    async def explain(self, query: TraceQuery) -> RequestTraces:
        """The decisions behind an answer that the Router and every Scheduler know."""

    @message()
    async def abort(self, aborted: Keys) -> None:
        """Attempts whose clients are gone."""

    @message()
    async def left_waiting(self) -> LeftWaiting:
        """Requests whose clients left before a replica took them, for the operator's pages."""

    @message()
    async def announce(self, announced: Announce) -> AnnounceReply:
        """All that is open at an ingress replica; answers what of it is lost, refused or newly placed."""

    @message()
    async def introduce(self, row: ComponentStatus) -> None:
        """An ingress replica's own row in the status."""

    @message()
    async def ingress_rows(self) -> ComponentRows:
        """The ingress replicas that the Router has heard of lately."""

    @message()
    async def model(self) -> ServedModel | None:
        """What the replicas serve; None before any replica is up."""

    @message()
    async def replica_state(self, state: ReplicaState) -> None:
        """A Scheduler's replica: whether it is up, and what it refused or lost late."""

    @message()
    async def replica_news(self, news: ReplicaNews) -> None:
        """What has started, ended or been cached on a replica."""

    @message()
    async def replica_loads(self) -> ReplicaLoads:
        """What is on each replica, for the history of the service."""

    @message()
    async def placement(self) -> PlacementView:
        """How requests are placed, for the operator's page."""

    @message()
    async def drain(self, name: ReplicaName) -> InFlight:
        """Nothing new goes to that replica; answers how many requests are still on it."""

    @message()
    async def end_drain(self, name: ReplicaName) -> None:
        """That replica takes requests again."""

    @message()
    async def forget(self, name: ReplicaName) -> None:
        """That replica will not come back."""


class ReplicaCalls(Protocol):
    """What stands for a replica, as the Router sees it: a Scheduler, or the backend of another server."""

    @message()
    async def submit(self, submit: Submit) -> Refusals:
        """Requests placed on this replica; answers those that it refuses at once, usually none."""

    @message()
    async def foresee(self, forecasts: ForecastsMade) -> None:
        """Predicted output lengths of requests that were placed here."""

    @message()
    async def abort(self, aborted: Keys) -> None:
        """These attempts and earlier ones of the same requests are forgotten."""

    @message()
    async def unknown(self, asked: Keys) -> Keys:
        """Those of these attempts that are not here."""

    @message()
    async def explain(self, query: TraceQuery) -> RequestTraces:
        """Decisions behind an answer: of requests that are here, and of those whose record is not in the log yet."""


class SchedulerCalls(ReplicaCalls, Protocol):
    """The Scheduler of a replica of our own engine."""

    @message()
    async def cached(self) -> CacheReply:
        """All that the replica's worker caches."""

    @message()
    async def live(self, query: LiveQuery) -> ReplicaLive:
        """What is on the replica now, for the operator's pages."""


class KVOffloadCalls(Protocol):
    """The KVOffloadManager of one replica."""

    @message()
    async def observe(self, report: StepReport) -> None:
        """A report of the replica's worker, from its Scheduler."""

    @message()
    async def decide(self, question: OffloadQuestion) -> OffloadOrders:
        """Whose KV goes out and comes back; asked by the replica's Scheduler."""

    @message()
    async def usage(self) -> KVUsage:
        """Where the KV of the replica is, and how much has moved."""

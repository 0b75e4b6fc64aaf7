"""Messages to the components on a request's way: Router, Scheduler, worker, learners and ImageEncoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from farsight.actors.calls.message import message
from farsight.core.forecast import Forecast, ForecastQuestions, Forecasts, ForecastsMade
from farsight.core.images import EncodedImages, EncodeImages
from farsight.core.messages.fleet import InFlight, ReplicaName, ReplicaNews, ReplicaState, ServedModel
from farsight.core.messages.kv import KVUsage, OffloadOrders, OffloadQuestion
from farsight.core.messages.live import LeftWaiting, LiveQuery, ReplicaLive, SessionsQuery, SessionsView
from farsight.core.messages.log import RequestTraces, TraceQuery
from farsight.core.messages.placement import PlacementView, ReplicaLoads
from farsight.core.messages.plans import CacheReply, Plan, ReportPoll, StepReport, WorkerState
from farsight.core.messages.requests import Announce, AnnounceReply, Keys, LoadSnapshot, Refusals, Submit, SubmitReply
from farsight.core.messages.status import ComponentRows, ComponentStatus
from farsight.core.messages.step_times import (
    BatchEstimates,
    BatchShapes,
    ReplicaStepProfile,
    ServedBatchTimes,
    StepProfileReply,
    StepSamples,
)
from farsight.core.messages.tokens import TokenBatches, TokenPoll


class RouterCalls(Protocol):
    """The Router, or in batch mode the Batcher under its name."""

    @message(packed=True)
    async def submit(self, submit: Submit) -> SubmitReply:
        """Takes new or resumed requests of one ingress replica; returns the place of each, or why it is refused."""

    @message()
    async def foresee(self, forecasts: ForecastsMade) -> None:
        """Takes predicted output lengths of requests that were submitted before."""

    @message()
    async def outlook(self) -> LoadSnapshot:
        """Returns the requests in flight and the capacity of the replicas."""

    @message()
    async def explain(self, query: TraceQuery) -> RequestTraces:
        """Returns the decisions behind one response that the Router and the Schedulers know."""

    @message()
    async def abort(self, aborted: Keys) -> None:
        """Aborts attempts whose clients have disconnected."""

    @message()
    async def left_waiting(self) -> LeftWaiting:
        """Returns the last requests whose clients left before any replica took them, for the operator's pages."""

    @message()
    async def sessions(self, query: SessionsQuery) -> SessionsView:
        """Returns the conversations that requests are turns of, for the operator's page."""

    @message()
    async def announce(self, announced: Announce) -> AnnounceReply:
        """Takes all open streams of an ingress replica; returns which are lost, refused or newly placed."""

    @message()
    async def introduce(self, row: ComponentStatus) -> None:
        """Takes an ingress replica's own row of the status."""

    @message()
    async def ingress_rows(self) -> ComponentRows:
        """Returns the status rows of the ingress replicas that the Router has heard from lately."""

    @message()
    async def model(self) -> ServedModel | None:
        """Returns the limits of the served model; None before any replica is up."""

    @message()
    async def replica_state(self, state: ReplicaState) -> None:
        """Takes a replica's state: whether it is up, and requests that it refused or lost after their placement."""

    @message()
    async def replica_news(self, news: ReplicaNews) -> None:
        """Takes the requests that started or ended on a replica, and changes of its prefix cache."""

    @message()
    async def replica_loads(self) -> ReplicaLoads:
        """Returns the load of each replica, for the history of the service."""

    @message()
    async def placement(self) -> PlacementView:
        """Returns how requests are placed, for the operator's page."""

    @message()
    async def drain(self, name: ReplicaName) -> InFlight:
        """Stops new placements on a replica; returns the number of requests still on it."""

    @message()
    async def end_drain(self, name: ReplicaName) -> None:
        """Resumes placements on a replica."""

    @message()
    async def forget(self, name: ReplicaName) -> None:
        """Drops a replica that will not come back."""


class ReplicaCalls(Protocol):
    """What the Router asks of a replica: of its Scheduler, or of the backend of an external server."""

    @message()
    async def submit(self, submit: Submit) -> Refusals:
        """Takes requests placed on this replica; returns the ones that it refuses at once, usually none."""

    @message()
    async def foresee(self, forecasts: ForecastsMade) -> None:
        """Takes predicted output lengths of requests that were placed on this replica."""

    @message()
    async def abort(self, aborted: Keys) -> None:
        """Aborts these attempts and earlier attempts of the same requests."""

    @message()
    async def unknown(self, asked: Keys) -> Keys:
        """Returns which of these attempts are not on this replica."""

    @message()
    async def explain(self, query: TraceQuery) -> RequestTraces:
        """Returns the decisions behind one response: of requests on this replica and of traces not yet in the log."""


class SchedulerCalls(ReplicaCalls, Protocol):
    """The Scheduler of a replica of our own engine."""

    @message()
    async def recall(self, asked: Keys) -> Submit:
        """Gives back those of these attempts that no plan has named yet, with the decisions about each so far."""

    @message()
    async def cached(self) -> CacheReply:
        """Returns the whole prefix cache of the replica's worker."""

    @message()
    async def live(self, query: LiveQuery) -> ReplicaLive:
        """Returns the requests on the replica now, for the operator's pages."""


class KVOffloadCalls(Protocol):
    """The KVOffloadManager of one replica."""

    @message()
    async def observe(self, report: StepReport) -> None:
        """Takes a report of the replica's worker, from its Scheduler."""

    @message()
    async def decide(self, question: OffloadQuestion) -> OffloadOrders:
        """Chooses the requests whose KV is offloaded, dropped or uploaded; asked by the replica's Scheduler."""

    @message()
    async def usage(self) -> KVUsage:
        """Returns where the KV of the replica is, and how much KV has moved."""


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


class LengthPredictorCalls(Protocol):
    """A LengthPredictor."""

    @message(long=True)
    async def predict(self, questions: ForecastQuestions) -> Forecasts:
        """Returns one forecast per question; raises FarsightError if the predictor has no model or the model fails."""

    @message()
    async def forecast(self) -> Forecast:
        """Returns the distribution of output lengths in the log as last read; never waits for the log."""


class ServingTimeEstimatorCalls(Protocol):
    """A ServingTimeEstimator."""

    @message()
    async def observe(self, samples: StepSamples) -> ReplicaStepProfile | None:
        """Takes measured steps of one replica; returns the cost of its steps, None until enough are measured."""

    @message()
    async def profile(self) -> StepProfileReply:
        """Returns the step costs of each replica, in the order in which the replicas first sent steps."""

    @message()
    async def estimate_batches(self, shapes: BatchShapes) -> BatchEstimates:
        """Returns the estimated duration of each batch, in seconds (Magnus III-D)."""

    @message()
    async def observe_batches(self, batches: ServedBatchTimes) -> None:
        """Takes batches that have ended, as training examples."""


class ImageEncoderCalls(Protocol):
    """An ImageEncoder."""

    @message(long=True)
    async def encode(self, order: EncodeImages) -> EncodedImages:
        """Returns the rows of each picture, or why the picture has none."""

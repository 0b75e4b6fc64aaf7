"""The interface between the HTTP layer and the rest of the system."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from core.abilities import Abilities
from core.messages.images import EncodedImage, ImageFile
from core.messages.live import LiveView
from core.messages.log import LoggedWindow, RequestTrace
from core.messages.placement import PlacementView
from core.messages.series import ComponentsQuery, ComponentsReply, RecentDecisions, SeriesQuery, SeriesReply, TableReply
from core.messages.status import ComponentCounts, StatusReply
from core.messages.tokens import TokenDelta
from core.messages.weights import ServedWeights, Upgrade
from core.request import Request
from services.api.pictures.placing import Sight
from services.api.text.prompts import PromptText


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Public facts about the served model.

    Attributes:
        name: What clients call it.
        aliases: Further names that they may use.
        end_ids: Token ids that end an output.
        created: Creation time in Unix seconds.
        max_model_len: Limit of prompt plus output, in tokens.
        pool_limited: Whether the KV pool, not the model, sets that limit.
        vocab_size: Token ids are 0 to ``vocab_size - 1``.
        benchmark_mode: Whether a request may set its exact output length.
        emulated: Profile name of an emulated device, whose answers are made up; empty if a model computes.
        no_forecasts: Why requests get no forecasts of their own, and what makes them; empty if they get them.
        version: Version of the weights that new requests run on.
        abilities: What it can do.
        sight: How it sees; None if it reads text alone.
        root: Directory or file of the model and its tokenizer on the server's machine, for clients that may know it;
            empty where there is none.
    """

    name: str
    created: int
    max_model_len: int
    pool_limited: bool
    vocab_size: int
    benchmark_mode: bool = False
    emulated: str = ""
    no_forecasts: str = ""
    version: int = 0
    abilities: Abilities = field(default_factory=Abilities)
    aliases: tuple[str, ...] = ()
    end_ids: tuple[int, ...] = ()
    sight: Sight | None = None
    root: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class GenerationBackend(Protocol):
    """Runs requests somewhere."""

    @property
    def model(self) -> ModelInfo: ...

    def stream(
        self, request: Request, text: PromptText | None = None, key: str = ""
    ) -> AsyncGenerator[TokenDelta, None]:
        """Yields the deltas of one request; the last has ``finish_reason`` set.

        Closing the generator early, or cancelling the task that iterates over it, aborts the request.
        Closing it after the last delta aborts nothing.

        Args:
            request: Without a name (``requests.unnamed_request``); the backend gives it one. ``explain`` finds its
                decisions by its ``origin``.
            text: Its prompt, which the length predictor reads; None if it came as token ids.
            key: Name of the client's tenant, by which requests in flight are counted; empty where no keys are in use.

        Raises:
            CapacityError: Before the first delta: the service is full.
            InvalidValueError: Before the first delta: the request can never run.
        """
        ...

    async def see(self, files: Sequence[ImageFile], salt: str) -> tuple[EncodedImage, ...]:
        """What the model reads of these pictures, in their order.

        Args:
            salt: Only requests of the same salt share what is kept of a picture.

        Raises:
            InvalidValueError: One of them cannot be read.
            CapacityError: Too many wait.
            ApiError: 503: they could not be encoded, or not in time.
        """
        ...

    async def status(self) -> StatusReply:
        """One row for each running component."""
        ...

    async def last_status(self) -> StatusReply:
        """The same, at most some seconds old, for pages that ask again and again."""
        ...

    async def metrics(self, *, open_metrics: bool) -> str:
        """The metrics of every reachable process, merged into one exposition (``metrics_page``)."""
        ...

    async def placement(self) -> PlacementView:
        """The Router's statistics of its placements.

        Raises:
            FarsightError: The Router cannot be reached now.
        """
        ...

    async def series(self, query: SeriesQuery) -> SeriesReply:
        """The history of the service.

        Raises:
            FarsightError: The Supervisor cannot be reached now.
        """
        ...

    async def replica_series(self, query: SeriesQuery) -> TableReply:
        """The loads of the replicas over time.

        Raises:
            FarsightError: The Supervisor cannot be reached now.
        """
        ...

    async def component_series(self, query: ComponentsQuery) -> ComponentsReply:
        """What the components of a kind did over time.

        Raises:
            FarsightError: The Supervisor cannot be reached now.
        """
        ...

    async def recent_decisions(self, kind: str) -> tuple[RecentDecisions, ...]:
        """The last decisions of the components of a kind, of those that answer."""
        ...

    async def live(self, max_rows: int) -> LiveView:
        """What is on the replicas now; at most so many requests of each."""
        ...

    async def explain(self, response_id: str) -> tuple[RequestTrace, ...]:
        """The decision traces behind an answer; empty if the answer is unknown or too old.

        Raises:
            FarsightError: The decision log cannot be read now.
        """
        ...

    async def logged_around(self, request_id: str) -> LoggedWindow | None:
        """The log around a request that has ended; None if the log does not hold it any more.

        Raises:
            FarsightError: The log cannot be read now, or steps have not been measured.
        """
        ...

    async def drain(self, replica: str, *, cancel: bool) -> ComponentCounts:
        """Takes a replica out once its requests have ended or moved, or takes it back.

        Raises:
            InvalidValueError: There is no such replica, or no other one would be left.
            FarsightError: The change failed.
        """
        ...

    async def upgrade(self, order: Upgrade) -> ServedWeights:
        """Replaces the weights of all replicas, or the settings of their workers.

        Raises:
            InvalidValueError: The model cannot take the place of the running one, or a setting cannot roll.
            FarsightError: The change failed; all replicas run the old weights.
        """
        ...

    async def scale(self, kind: str, count: int) -> ComponentCounts:
        """Sets the number of components of a kind; returns when the added ones run or the removed ones are gone.

        Raises:
            InvalidValueError: The kind or the number is wrong.
            FarsightError: The change was not made, or only in part.
        """
        ...

    async def healthy(self) -> bool:
        """Whether a request sent now would be served."""
        ...

"""What the HTTP layer stands on: what runs requests, and the view of the service that operators have."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

from farsight.actors.calls.scheduling import RouterCalls
from farsight.actors.calls.supervisor import SupervisorCalls
from farsight.core.abilities import Abilities
from farsight.core.images import EncodedImage, ImageFile
from farsight.core.messages.live import LiveView
from farsight.core.messages.log import LoggedWindow, RequestTrace
from farsight.core.messages.series import RecentDecisions
from farsight.core.messages.status import StatusReply
from farsight.core.messages.tokens import TokenDelta
from farsight.core.request import Request

if TYPE_CHECKING:
    from farsight.services.api.generation import PromptText

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class ImageInput:
    """How the served model sees.

    Attributes:
        text: What stands for a picture where a chat template takes texts alone.
        placeholder_id: The token that stands for a picture.
        max_per_request: Most pictures of one request.
    """

    text: str
    placeholder_id: int
    max_per_request: int


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
        image_input: How it sees; None if it reads text alone.
        preset: The policies that serve it.
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
    image_input: ImageInput | None = None
    root: str = ""
    preset: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.aliases)


class Generator(Protocol):
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
        """Returns what the model reads of these pictures, in their order.

        Args:
            salt: Only requests of the same salt share what is kept of a picture.

        Raises:
            InvalidValueError: One of them cannot be read.
            CapacityError: Too many wait.
            ApiError: 503: they could not be encoded, or not in time.
        """
        ...


class Operator(Protocol):
    """The components of a service, and what several of them say together.

    A question to one component is put as the message that it answers:
    ``await operator.answer("the Supervisor", operator.supervisor.series(query))``. Orders take long, and are awaited
    without ``answer``.
    """

    @property
    def supervisor(self) -> SupervisorCalls: ...

    @property
    def router(self) -> RouterCalls: ...

    async def answer(self, who: str, asked: Awaitable[R]) -> R:
        """Returns what a component says to a message, if it does so within a second.

        Raises:
            FarsightError: The component cannot be reached now.
        """
        ...

    async def status(self) -> StatusReply:
        """Returns one row for each component that there should be."""
        ...

    async def last_status(self) -> StatusReply:
        """Returns the same, at most some seconds old, for pages that ask again and again."""
        ...

    async def metrics(self, *, open_metrics: bool) -> str:
        """Returns the metrics of every process that answers, merged into one exposition (``metrics_page``)."""
        ...

    async def recent_decisions(self, kind: str) -> tuple[RecentDecisions, ...]:
        """Returns the last decisions of the components of a kind, of those that answer."""
        ...

    async def live(self, max_rows: int) -> LiveView:
        """Returns what is on the replicas now; at most so many requests of each."""
        ...

    async def explain(self, response_id: str) -> tuple[RequestTrace, ...]:
        """Returns the decision traces behind an answer of any tenant; none if it is unknown or too old.

        Raises:
            FarsightError: The decision log cannot be read now.
        """
        ...

    async def logged_around(self, request_id: str) -> LoggedWindow | None:
        """Returns the log around a request that has ended; None if the log does not hold it any more.

        With an empty id the log of the latest requests.

        Raises:
            FarsightError: The log cannot be read now, or steps have not been measured.
        """
        ...

    async def healthy(self) -> bool:
        """Returns whether a request sent now would be served."""
        ...

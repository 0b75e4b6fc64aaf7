"""The seam between HTTP and the rest of the system."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from core.messages.log import RequestTrace
from core.messages.placement import PlacementView
from core.messages.status import ComponentCounts, StatusReply
from core.messages.tokens import TokenDelta
from core.request import Origin, SamplingParams
from services.api.text.prompt_text import PromptText


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a client may know about the served model.

    Attributes:
        name: The one value that ``model`` may have in a request.
        created: Unix seconds.
        max_model_len: Prompt and output together, in tokens, at most.
        pool_limited: Whether that limit comes from the KV pool and not from the model.
        vocab_size: Token ids run from 0 to this minus one.
        benchmark_mode: Whether a request may say where its output is to end.
        emulated: Name of the profile of an emulated device, whose answers are made up; empty if a model computes.
    """

    name: str
    created: int
    max_model_len: int
    pool_limited: bool
    vocab_size: int
    benchmark_mode: bool = False
    emulated: str = ""


class GenerationBackend(Protocol):
    """Runs requests somewhere."""

    @property
    def model(self) -> ModelInfo: ...

    def stream(
        self,
        prompt_ids: tuple[int, ...],
        sampling: SamplingParams,
        text: PromptText | None = None,
        origin: Origin | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[TokenDelta, None]:
        """The deltas of one request; the last has ``finish_reason`` set. ``text`` is for forecasts; a
        lower ``priority`` goes first; cached prefixes are shared with requests of the same ``cache_salt``.

        What becomes of it can be asked for under its ``origin``.

        Closing the generator early, or cancelling the task that iterates over it, aborts the request;
        after the last delta it is closed as well, which aborts nothing.

        Raises:
            CapacityError: Before the first delta: the service is full.
            InvalidValueError: Before the first delta: the request can never run.
        """
        ...

    async def status(self) -> StatusReply:
        """One row for each living component of the system."""
        ...

    async def metrics(self) -> str:
        """The metrics of every process that can be reached, as one exposition (``metrics_page``)."""
        ...

    async def placement(self) -> PlacementView:
        """What the Router says of its placements.

        Raises:
            FarsightError: It cannot be asked now.
        """
        ...

    async def explain(self, response_id: str) -> tuple[RequestTrace, ...]:
        """What is known of the decisions behind an answer; none if the answer is not known, or was too long ago.

        Raises:
            FarsightError: It cannot be said now.
        """
        ...

    async def scale(self, kind: str, count: int) -> ComponentCounts:
        """How many of what there are from now on; answers when they are there, or gone.

        Raises:
            InvalidValueError: The kind or the number is wrong.
            FarsightError: It could not be done, or not all of it.
        """
        ...

    async def healthy(self) -> bool:
        """Whether a request sent now would be served."""
        ...

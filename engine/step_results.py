"""What a step brings: tokens and what more is known of them, vectors, or a fault. Imports no torch, as the worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from farsight.core.messages.tokens import TokenLogprobs
from farsight.core.request import Fault


@dataclass(slots=True)
class ItemLogprobs:
    """Log probabilities that one item of a step brings.

    Attributes:
        output: Log probabilities of its new token, if it samples.
        prompt: Log probabilities of the next tokens of the prompt, after those known before.
    """

    output: TokenLogprobs | None = None
    prompt: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class NoToken:
    """Why an item that samples has no new token: its sequence cannot go on, the others of the step can.

    Attributes:
        reason: Explanation for its client.
        fault: Whether the request or the model is the cause.
    """

    reason: str
    fault: Fault


class LoggedTokens(list[int | None]):
    """The new tokens of a step, with more about some of its items.

    Attributes:
        logprobs: By index of the item in the step's batch.
        failures: Likewise, for items that should have got a token and have None.
        further: Likewise, the tokens after the first of items whose drafts turned out right.
        pooled: Likewise, for items of requests that generate nothing; the token of such an item means nothing.
        states: Likewise, for items that end their prompts: as in ``TokenDelta.state``.
    """

    def __init__(
        self,
        tokens: list[int | None],
        logprobs: dict[int, ItemLogprobs],
        failures: dict[int, NoToken] | None = None,
        further: dict[int, list[int]] | None = None,
        pooled: dict[int, PooledRows] | None = None,
    ) -> None:
        super().__init__(tokens)
        self.logprobs = logprobs
        self.failures = failures or {}
        self.further = further or {}
        self.pooled = pooled or {}
        self.states: dict[int, bytes] = {}

    @property
    def tells_more(self) -> bool:
        """Whether there is more than one token or none for each item."""
        return self.changes_books or bool(self.states)

    @property
    def changes_books(self) -> bool:
        """Whether the next step cannot begin before this one is booked."""
        return bool(self.logprobs or self.failures or self.further or self.pooled)


@dataclass(frozen=True, slots=True)
class PooledRows:
    """What one item of a step adds to the vector of a request that generates nothing.

    Attributes:
        num_rows: Hidden states in it.
        total: Their sum, float32 ``[dim]``.
    """

    num_rows: int
    total: np.ndarray

    def plus(self, other: PooledRows | None) -> PooledRows:
        """Returns this and what earlier steps have brought."""
        if other is None:
            return self
        return PooledRows(self.num_rows + other.num_rows, self.total + other.total)

    def vector(self) -> bytes:
        """Returns their mean, float32 little-endian."""
        return (self.total / np.float32(self.num_rows)).astype("<f4").tobytes()


class IterationCutOff(Exception):
    """A step was cut off at its instant (``StepBatch.cut_off_s``): its work is lost, and nothing else."""


class StepFault(Enum):
    """What a failed step says about the device."""

    REQUESTS = "requests"
    """Nothing about the device: the step does not fit its memory, not even in parts. Smaller steps will."""

    UNKNOWN = "unknown"
    """The device may be the cause; after several such steps in a row it is."""

    LOST = "lost"
    """The device is unusable for this process: no later step can succeed."""

"""Arriving requests with their true output lengths, and the pictures of their prompts.

A picture has its tokens in the prompt, and names by which blocks that hold them are shared.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

from farsight.core.errors import InvalidValueError
from farsight.core.forecast import Forecast
from farsight.core.images import ImageSpan
from farsight.core.request import NO_SLO, Request, SamplingParams, Slo

_KEPT_LEN = 16_384
"""Longest prompt whose tuple of tokens is kept for others of its length: 4,096 of these are 512 MiB at most."""

_NAME_BITS = 61
"""Bits of a block's name: below the names that replicas give to blocks of outputs (``1 << 62``)."""


@dataclass(frozen=True, slots=True)
class SimImage:
    """One picture of a prompt.

    Attributes:
        tokens: Its tokens in the prompt; at least 1.
        name: Its content: pictures of one name are equal. Empty for a picture that no other request has.

    Raises:
        InvalidValueError: It has no tokens.
    """

    tokens: int
    name: str = ""

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise InvalidValueError("image_tokens", self.tokens, "a whole number of at least 1")


def image_spans(
    request_id: str, images: Sequence[SimImage], prompt_len: int, num_prefix_blocks: int, block_size: int
) -> tuple[ImageSpan, ...]:
    """Where the pictures of a prompt lie: one behind the other behind its shared beginning, or as far towards the
    prompt's end as they must be to fit. A client's picture comes before its question.

    Raises:
        InvalidValueError: They have more tokens than the prompt.
    """
    num_tokens = sum(image.tokens for image in images)
    if num_tokens > prompt_len:
        raise InvalidValueError("image_tokens", num_tokens, f"at most the {prompt_len} tokens of the prompt")
    start = min(num_prefix_blocks * block_size, prompt_len - num_tokens)
    spans = []
    for index, image in enumerate(images):
        content = image.name or f"{request_id}/{index}"
        # A picture that was prepared in another size is another one.
        known_by = repr((bool(image.name), content, image.tokens)).encode("utf-8", "backslashreplace")
        digest = blake2b(known_by, digest_size=16).digest()
        spans.append(ImageSpan(start, image.tokens, digest))
        start += image.tokens
    return tuple(spans)


def shared_blocks(
    prefix: tuple[int, ...], images: Sequence[SimImage], spans: Sequence[ImageSpan], block_size: int
) -> tuple[int, ...]:
    """Names of a prompt's blocks that other prompts may have as well: its ``prefix``, then full blocks that hold
    nothing but tokens of named pictures. As on a server a block's name says all that is before it.

    O(blocks of the pictures).
    """
    named = [span for span, image in zip(spans, images, strict=True) if image.name]
    if not named or named[0] != spans[0] or named[0].start > len(prefix) * block_size:
        return prefix  # text that no other prompt has, or a picture of its own, stands before them
    end = next((span.start for span, image in zip(spans, images, strict=True) if not image.name), named[-1].end)
    names = list(prefix)
    for block in range(len(prefix), end // block_size):
        first, behind = block * block_size, (block + 1) * block_size
        held = [(span.digest, first - span.start) for span in named if span.start < behind and span.end > first]
        content = repr((names[-1] if names else None, held)).encode()
        digest = blake2b(content, digest_size=8).digest()
        names.append(int.from_bytes(digest) >> (64 - _NAME_BITS))
    return tuple(names)


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request, with facts that only the simulator knows.

    Attributes:
        arrived_at: Seconds from the start.
        prompt_len: Its prompt in tokens, those of its pictures included.
        output_len: Its true output length in tokens; at most ``max_new_tokens``.
        prefix: Names of the prompt's shareable blocks, from the first token on.
        app: The kind of request, for tables.
        forecast: The predictor's forecast.
        tenant, weight, slo, reading_rate: As in ``Request``.
        images: The pictures of its prompt, in their order.
        generated: Output tokens that it comes with: what it had before the run began.
        session, application: As in ``Request``.
    """

    request_id: str
    arrived_at: float
    prompt_len: int
    output_len: int
    max_new_tokens: int
    prefix: tuple[int, ...] = ()
    app: str = ""
    priority: int = 0
    deadline_s: float | None = None
    forecast: Forecast | None = None
    tenant: str = ""
    weight: float = 1.0
    slo: Slo = NO_SLO
    images: tuple[SimImage, ...] = ()
    generated: int = 0
    reading_rate: float | None = None
    session: str = ""
    application: str = ""

    def spans(self, block_size: int) -> tuple[ImageSpan, ...]:
        """Where its pictures lie, with KV blocks of so many tokens.

        Raises:
            InvalidValueError: They have more tokens than the prompt.
        """
        return image_spans(self.request_id, self.images, self.prompt_len, len(self.prefix), block_size)


Workload = Sequence[SimRequest]
"""In order of arrival."""


def as_request(arrival: SimRequest, prefix_hashes: tuple[int, ...] = (), images: tuple[ImageSpan, ...] = ()) -> Request:
    """The request as the policies see it, without its output length. Token values have no effect.

    Args:
        prefix_hashes: Names of all its full blocks, including unshared ones.
        images: Where its pictures lie, from ``SimRequest.spans``.
    """
    return Request(
        arrival.request_id,
        attempt=0,
        ingress_id="simulator",
        prompt_ids=_tokens(arrival.prompt_len),
        sampling=_sampling(arrival.max_new_tokens),
        priority=arrival.priority,
        deadline_s=arrival.deadline_s,
        forecast=arrival.forecast,
        prefix_hashes=prefix_hashes,
        tenant=arrival.tenant,
        weight=arrival.weight,
        slo=arrival.slo,
        images=images,
        output_ids=_tokens(arrival.generated),
        reading_rate=arrival.reading_rate,
        session=arrival.session,
        application=arrival.application,
    )


def _tokens(num_tokens: int) -> tuple[int, ...]:
    return _kept_tokens(num_tokens) if num_tokens <= _KEPT_LEN else (0,) * num_tokens


@lru_cache(maxsize=4096)
def _kept_tokens(num_tokens: int) -> tuple[int, ...]:
    return (0,) * num_tokens


@lru_cache(maxsize=4096)
def _sampling(max_new_tokens: int) -> SamplingParams:
    return SamplingParams(max_new_tokens)


class Source(Protocol):
    """Requests whose instants depend on the answers to others, as ``conversations.ClosedLoop``."""

    @property
    def next_at(self) -> float:
        """Instant of the next arrival as far as it is known; infinity if there is none."""
        ...

    def take(self, now: float) -> list[SimRequest]:
        """Takes the arrivals that are due."""
        ...

    def ended(self, request_id: str, now: float) -> None:
        """Books that a request has its answer, or has been refused."""
        ...


class Given:
    """Arrivals at known instants, in their order; read lazily."""

    def __init__(self, arrivals: Iterable[SimRequest]) -> None:
        self._arrivals = iter(arrivals)
        self._next = next(self._arrivals, None)

    @property
    def next_at(self) -> float:
        return math.inf if self._next is None else self._next.arrived_at

    def take(self, now: float) -> list[SimRequest]:
        together = []  # requests of one instant arrive together
        while self._next is not None and self._next.arrived_at <= now:
            together.append(self._next)
            self._next = next(self._arrivals, None)
        return together

    def ended(self, request_id: str, now: float) -> None:
        """Changes nothing."""

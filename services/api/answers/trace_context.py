"""The trace that a request belongs to, as W3C Trace Context names it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from services.api.generation import Generation

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1
_TRACE_BITS, _SPAN_BITS = 128, 64


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span of one HTTP request.

    Attributes:
        trace_id: 16 bytes.
        span_id: 8 bytes.
        parent_id: 8 bytes of the client's span; empty where it named none.
    """

    trace_id: bytes
    span_id: bytes
    parent_id: bytes = b""

    @property
    def traceparent(self) -> str:
        """What goes to the servers that this request is passed on to."""
        return f"00-{self.trace_id.hex()}-{self.span_id.hex()}-01"


def new_context(header: str, sample: float, draw: Callable[[int], int] = random.getrandbits) -> TraceContext | None:
    """The context of a request; None if it gets no span. A client's decision to sample or not stands.

    Args:
        header: Its ``traceparent``; one that breaks the rules counts as none, as the standard asks.
        sample: Share of the requests without a parent that get a span.
        draw: So many random bits, as a number.
    """
    found = _TRACEPARENT.fullmatch(header.strip())
    span_id = _id(_SPAN_BITS, draw)
    if found and _is_valid(found):
        sampled = int(found[4], 16) & _SAMPLED
        return TraceContext(bytes.fromhex(found[2]), span_id, bytes.fromhex(found[3])) if sampled else None
    if draw(53) >= sample * 2**53:
        return None
    return TraceContext(_id(_TRACE_BITS, draw), span_id)


def _is_valid(found: re.Match[str]) -> bool:
    """Version 00 has exactly four fields; later versions may add some; ff and ids of zeros do not exist."""
    version, trace_id, parent_id, _, rest = found.groups()
    return version != "ff" and (version != "00" or not rest) and int(trace_id, 16) > 0 and int(parent_id, 16) > 0


def _id(bits: int, draw: Callable[[int], int]) -> bytes:
    """Never all zeros, which mean that there is no id."""
    return max(1, draw(bits)).to_bytes(bits // 8)


@dataclass(slots=True)
class TracedAnswer:
    """A request that gets a span.

    Attributes:
        generation: What it asks for; None until its body has been understood.
    """

    context: TraceContext
    generation: Generation | None = None


TRACED: ContextVar[TracedAnswer | None] = ContextVar("farsight_traced", default=None)
"""Set for the task that serves a request; None for a request that gets no span."""


def traced(generation: Generation) -> Generation:
    """The generation, whose requests name their trace from now on if the client's request has a span."""
    answer = TRACED.get()
    if answer is None:
        return generation
    answer.generation = generation.in_trace(answer.context.traceparent)
    return answer.generation

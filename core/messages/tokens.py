"""Output tokens: worker -> ingress, never through a Scheduler. Consecutive deltas of a stream can be joined to one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from farsight.core.request import Fault

TokenLogprobs = tuple[tuple[int, ...], tuple[float, ...]]
"""Ids and their log probabilities: the token itself, then the likeliest ones, best first."""


@dataclass(frozen=True, slots=True)
class DeltaLogprobs:
    """Log probabilities that a client has asked for.

    Attributes:
        output: One entry for each of the delta's tokens.
        prompt: One entry for each of the prompt's tokens except the first; with the output's first token only.
    """

    output: tuple[TokenLogprobs, ...]
    prompt: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New output of one sequence, for the client. A field with its default takes no room on the wire.

    Attributes:
        start: Index of the first of ``token_ids`` in the output; lets the ingress see gaps and repeats.
        text: Text that the client may see; trails ``token_ids`` while a stop string may still complete.
        finish_reason: Set on the last delta of an attempt only.
        error: Why the sequence failed, when ``finish_reason`` is ``error``.
        cached_len: Tokens of the prompt that came from a cache; on an attempt's first delta, or its last (a server).
        logprobs: None unless the request wants them.
        num_unnamed: Tokens after ``token_ids`` whose ids another server did not tell, only their text.
        fault: Cause of the failure, where there is an ``error``.
        gpu_s: GPU-seconds that the attempt took (``core.costs.row_shares``), on its last delta; 0 from another server.
        vector: Result of a request that generates nothing (``SamplingParams.pooling``), float32 little-endian; on its
            only delta.
        state: Hidden state of the prompt's last token behind half of the layers, float16 little-endian, scaled to a
            mean square of 1; on an attempt's first delta, where forecasts are made of it.
    """

    request_id: str
    attempt: int
    start: int
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    error: str | None = None
    cached_len: int = 0
    logprobs: DeltaLogprobs | None = None
    num_unnamed: int = 0
    fault: Fault = Fault.SERVICE
    gpu_s: float = 0.0
    vector: bytes = b""
    state: bytes = b""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_unnamed


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """Worker -> ingress: consecutive deltas under one sequence number, repeated until acknowledged."""

    worker_incarnation: str
    seq: int
    deltas: tuple[TokenDelta, ...]


@dataclass(frozen=True, slots=True)
class TokenPoll:
    """Ingress -> worker: asks for what is new after ``ack_seq``; it also shows the worker that the ingress lives.

    Attributes:
        slow: Requests whose clients do not read; the worker pauses them until they are no longer named here.
    """

    ingress_id: str
    ack_seq: int
    slow: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TokenBatches:
    worker_incarnation: str
    batches: tuple[TokenBatch, ...]


def joined(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Joins consecutive deltas of one stream to one."""
    first, last = deltas[0], deltas[-1]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return dataclasses.replace(
        last,
        start=first.start,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        cached_len=first.cached_len or last.cached_len,
        num_unnamed=sum(delta.num_unnamed for delta in deltas),
        state=first.state,
        logprobs=_joined_logprobs(logprobs) if logprobs else None,
    )


def _joined_logprobs(parts: Sequence[DeltaLogprobs]) -> DeltaLogprobs:
    return DeltaLogprobs(tuple(entry for part in parts for entry in part.output), parts[0].prompt)

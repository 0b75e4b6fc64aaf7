"""One user call and how it is to be sampled."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from core.errors import InvalidValueError


class SequenceStatus(IntEnum):
    """Life of a sequence, ordered: everything from ``FINISHED_STOPPED`` on is terminal."""

    WAITING = 0
    RUNNING = 1
    PAUSED = 2
    OFFLOADED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH = 5
    FINISHED_ABORTED = 6
    FINISHED_FAILED = 7

    @property
    def is_finished(self) -> bool:
        return self >= SequenceStatus.FINISHED_STOPPED

    @property
    def finish_reason(self) -> str | None:
        """The OpenAI ``finish_reason``; ``None`` while the sequence lives."""
        return _FINISH_REASONS.get(self)


_FINISH_REASONS = {
    SequenceStatus.FINISHED_STOPPED: "stop",
    SequenceStatus.FINISHED_LENGTH: "length",
    SequenceStatus.FINISHED_ABORTED: "abort",
    SequenceStatus.FINISHED_FAILED: "error",
}


class Residency(IntEnum):
    """Where a sequence's KV is to be."""

    DEVICE = 0
    HOST = 1


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen and when a sequence ends.

    Attributes:
        max_new_tokens: Output tokens at most; at least 1.
        temperature: 0 means greedy.
        top_p: Keep the smallest set of tokens whose mass reaches this; in (0, 1].
        top_k: Keep this many tokens; 0 keeps all.
        seed: Sampling is a function of (seed, position) alone, so it survives preemption.
        stop: Strings that end the output; not part of it.
        stop_token_ids: Token ids that end the output, beside the model's own EOS.
        ignore_eos: Go on after the model's own EOS.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _require(self.max_new_tokens >= 1, "max_tokens", self.max_new_tokens, "an integer >= 1")
        ok = math.isfinite(self.temperature) and self.temperature >= 0
        _require(ok, "temperature", self.temperature, "a finite number >= 0")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "a number > 0 and <= 1")
        _require(self.top_k >= 0, "top_k", self.top_k, "an integer >= 0 (0 keeps all tokens)")
        _require(0 <= self.seed < 2**64, "seed", self.seed, "an integer from 0 to 2**64 - 1")
        _require(all(self.stop), "stop", self.stop, "non-empty strings")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True, slots=True)
class Request:
    """One user call as the scheduler and the worker see it.

    Attributes:
        request_id: Unique name given by the ingress.
        attempt: Raised by the ingress on each resubmission; workers fence lower ones.
        ingress_id: Which ingress replica holds the client; tokens go straight there.
        prompt_ids: Token ids; never empty.
        output_ids: What the client has already got from earlier attempts (a resumed request); usually empty.
    """

    request_id: str
    attempt: int
    ingress_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    output_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(len(self.prompt_ids) > 0, "prompt", self.prompt_ids, "at least one token")
        ok = len(self.output_ids) < self.sampling.max_new_tokens
        _require(ok, "output_ids", len(self.output_ids), f"fewer than max_tokens = {self.sampling.max_new_tokens}")

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def known_len(self) -> int:
        """Tokens known when the attempt begins: prompt and resumed output."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def max_total_len(self) -> int:
        """Prompt and output together, in tokens, at most."""
        return len(self.prompt_ids) + self.sampling.max_new_tokens


def _require(ok: bool, field: str, value: object, expected: str) -> None:
    if not ok:
        raise InvalidValueError(field, value, expected)

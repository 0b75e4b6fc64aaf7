"""The result of one streamed request, and the reader of its stream.

**Tokens** of an answer: ``usage.completion_tokens`` if the server sent it; else the length that was asked for, if the
stream says that it ended by length; else the number of chunks with a choice. **Times** are taken per chunk with a
choice, when its bytes are read. A chunk may carry several tokens, and how many is not told, so a gap between two
chunks stands for the mean number of tokens per gap of that answer. An empty last chunk is left out if the others can
account for all tokens:

- TTFT: from sending to the first chunk.
- TPOT: (last chunk - first chunk) / (tokens - 1).
- ITL: each gap divided by the answer's tokens per gap, counted that many times (so the mean over all tokens is kept).
- MTPOT: the longest gap between two chunks of the answer, undivided: what a reader sees as a pause.
- JCT: from sending to the end of the stream.

The same rules hold for every server.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from farsight.core.errors import InvalidValueError

SHOWN_CHARS = 200
_DATA = b"data:"


class CountedBy(StrEnum):
    """The source of an answer's token count."""

    USAGE = "usage"
    LENGTH = "length"
    CHUNKS = "chunks"


@dataclass(frozen=True, slots=True)
class Failure:
    """The reason why an answer does not count.

    Attributes:
        kind: Failures are counted by it: ``HTTP 503``, ``timeout``, ``disconnected`` ...
        detail: The observed error.
    """

    kind: str
    detail: str


@dataclass(slots=True)
class Answer:
    """The result of a request; times in seconds on one monotonic clock.

    Attributes:
        id: Id of the request.
        kind: Kind of the request.
        sent_at: When it was sent.
        late_s: Seconds between its due time and its sending; None in a closed loop.
        chunks_at: When each chunk with a choice arrived.
        num_tokens: Number of output tokens.
        cached_tokens: Prompt tokens that the server says it did not compute.
        finish_reason: Why it ended, as the server says: ``length`` if it was cut.
        failure: The reason why it does not count, or None.
    """

    id: int
    kind: str
    sent_at: float
    late_s: float | None = None
    ended_at: float = 0.0
    chunks_at: list[float] = field(default_factory=list)
    num_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    counted_by: CountedBy = CountedBy.CHUNKS
    finish_reason: str | None = None
    failure: Failure | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunks_at[0] - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """None for a single token."""
        return (self.chunks_at[-1] - self.chunks_at[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks_at)]

    @property
    def tokens_per_gap(self) -> float:
        """0 if there is no gap."""
        return (self.num_tokens - 1) / (len(self.chunks_at) - 1) if len(self.chunks_at) > 1 else 0.0

    @property
    def mtpot_s(self) -> float | None:
        """None for a single chunk."""
        return max(self.gaps_s, default=None)

    @property
    def jct_s(self) -> float:
        return self.ended_at - self.sent_at


class StreamReader:
    """Reads server-sent events into an answer; to save CPU time it parses the JSON of the last few events only."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._rest = b""
        self._usage: dict[str, Any] | None = None
        self._ends_empty = False
        self.done = False

    def feed(self, data: bytes, now: float) -> None:
        """Reads the next bytes of the stream, which may be cut anywhere.

        Raises:
            ValueError: A parsed event does not follow OpenAI's format.
        """
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(_DATA):
                self._event(line, now)

    def _event(self, line: bytes, now: float) -> None:
        if b'"choices"' in line:
            self._choice(line, now)
        elif b"[DONE]" in line:
            self.done = True
        elif b'"error"' in line:
            self._answer.failure = Failure("error in the stream", shown(line))

    def _choice(self, line: bytes, now: float) -> None:
        has_usage = b'"usage":' in line and b'"usage":null' not in line and b'"usage": null' not in line
        has_finish = b'"finish_reason":"' in line or b'"finish_reason": "' in line
        has_role = b'"role"' in line  # The opening of a chat; some servers repeat the role with every token.
        has_choice = b'"choices":[{' in line or b'"choices": [{' in line
        if has_choice and not (has_usage or has_finish or has_role):
            self._answer.chunks_at.append(now)
            return
        event = json.loads(line[len(_DATA) :])
        if not isinstance(event, dict) or not isinstance(event.get("choices"), list):
            raise ValueError(f"no list of choices in {shown(line)}")
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        for choice in event["choices"]:
            self._parsed_choice(choice, now)

    def _parsed_choice(self, choice: dict[str, Any], now: float) -> None:
        reason = choice.get("finish_reason")
        self._answer.finish_reason = reason or self._answer.finish_reason
        delta = choice.get("delta") or {}
        is_empty = not (choice.get("text") or delta.get("content"))
        if is_empty and not reason and "role" in delta:
            return  # A chat stream opens with the role, before any token.
        self._ends_empty = is_empty and bool(reason)
        self._answer.chunks_at.append(now)

    def finish(self, asked_tokens: int) -> None:
        """Counts the tokens at the end of the stream; an incomplete answer becomes a failure."""
        answer = self._answer
        self.feed(
            b"\n", answer.chunks_at[-1] if answer.chunks_at else answer.sent_at
        )  # The last line may lack its newline.
        usage = self._usage or {}
        answer.prompt_tokens = usage.get("prompt_tokens") or 0
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if isinstance(usage.get("completion_tokens"), int):
            answer.num_tokens, answer.counted_by = usage["completion_tokens"], CountedBy.USAGE
        elif answer.finish_reason == "length":
            answer.num_tokens, answer.counted_by = asked_tokens, CountedBy.LENGTH
        else:
            answer.num_tokens, answer.counted_by = len(answer.chunks_at) - self._ends_empty, CountedBy.CHUNKS
        if self._ends_empty and len(answer.chunks_at) > max(1, answer.num_tokens):
            # Each of the other chunks carries a token; the last one only gives the finish reason.
            answer.chunks_at.pop()
        if answer.failure is None:
            answer.failure = self._shortcoming()

    def _shortcoming(self) -> Failure | None:
        if not self.done and self._answer.finish_reason is None:  # `transformers serve` ends without [DONE]
            detail = f"neither finish_reason nor [DONE] after {len(self._answer.chunks_at)} chunks"
            return Failure("stream cut", detail)
        stopped = self._answer.finish_reason == "stop"  # A model may have nothing to say.
        if not self._answer.chunks_at or not (self._answer.num_tokens or stopped):
            return Failure("no token", f"finish_reason {self._answer.finish_reason}")
        return None


def shown(data: bytes) -> str:
    """The beginning of the bytes, as text."""
    return data[:SHOWN_CHARS].decode(errors="replace")


_SECONDS: Mapping[str, Callable[[Answer], float | None]] = {
    "ttft": lambda answer: answer.ttft_s,
    "tpot": lambda answer: answer.tpot_s,
    "mtpot": lambda answer: answer.mtpot_s,
    "jct": lambda answer: answer.jct_s,
}
_EXPECTED = f"bounds in ms as ttft=500,tpot=50 (of {', '.join(_SECONDS)}), or with a unit as ttft=0.5s"

Sla = dict[str, float]
"""Upper bounds in milliseconds by name."""


def parse_sla(text: str) -> Sla:
    """Reads ``ttft=500,tpot=50``: milliseconds, unless ``s`` or ``ms`` follows.

    Raises:
        InvalidValueError: The text has another form.
    """
    sla: Sla = {}
    for item in text.split(","):
        name, _, value = (part.strip() for part in item.partition("="))
        bound_ms = _milliseconds(value)
        if name not in _SECONDS or name in sla or bound_ms is None:
            raise InvalidValueError("--sla", text, _EXPECTED)
        sla[name] = bound_ms
    return sla


def _milliseconds(value: str) -> float | None:
    factor = 1.0 if value.endswith("ms") else 1000.0 if value.endswith("s") else 1.0
    try:
        bound_ms = float(value.removesuffix("s").removesuffix("m")) * factor
    except ValueError:
        return None
    return bound_ms if 0 < bound_ms < float("inf") else None


def meets(answer: Answer, sla: Sla) -> bool:
    """Whether an answer is complete and within every bound. A missing value (TPOT of one token) counts as within."""
    if answer.failure is not None:
        return False
    return all((_SECONDS[name](answer) or 0.0) * 1000 <= bound_ms for name, bound_ms in sla.items())

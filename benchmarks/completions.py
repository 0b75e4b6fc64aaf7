"""One streamed request to an OpenAI-compatible /v1/completions, and what was seen of its answer."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncIterable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from benchmarks.workload import Row

SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Call:
    """A request, ready to be sent.

    Attributes:
        exact: The answer must have ``max_tokens`` tokens.
    """

    body: bytes
    max_tokens: int
    exact: bool


@dataclass(slots=True)
class Answer:
    """What came of a call; times in seconds.

    Attributes:
        chunks_at: When each chunk with a choice arrived, on the same clock as ``sent_at``.
        error: Why it does not count, or None.
    """

    sent_at: float
    ended_at: float = 0.0
    chunks_at: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        return self.chunks_at[0] - self.sent_at

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        return (self.chunks_at[-1] - self.chunks_at[0]) / (self.num_tokens - 1) if self.num_tokens > 1 else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.chunks_at)]

    @property
    def jct_s(self) -> float:
        return self.ended_at - self.sent_at


def make_call(row: Row, max_tokens: int, model: str, vocab_size: int, salt: int, *, plain: bool) -> Call:
    """The call for one row of a workload; ``plain`` leaves out what OpenAI's own service does not know."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": row.prompt_ids(vocab_size, salt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
    }
    if not plain:
        body |= {"ignore_eos": True, "stream_options": {"include_usage": True}}
    return Call(json.dumps(body).encode(), max_tokens, exact=not plain)


async def send(session: aiohttp.ClientSession, url: str, call: Call) -> Answer:
    """Sends one call and reads its answer to the end; whatever goes wrong is in the answer."""
    answer = Answer(time.perf_counter())
    try:
        async with session.post(url, data=call.body, headers={"Content-Type": "application/json"}) as response:
            if response.status == 200:
                await _read(response.content, answer)
            else:
                answer.error = f"HTTP {response.status}: {(await response.text())[:SHOWN_CHARS]}"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"[:SHOWN_CHARS]
    answer.ended_at = time.perf_counter()
    answer.num_tokens = answer.num_tokens or len(answer.chunks_at)
    answer.error = answer.error or _shortcoming(answer, call)
    return answer


async def _read(lines: AsyncIterable[bytes], answer: Answer) -> None:
    """Takes the time of every chunk; parses none but those with usage, so that the client costs little."""
    done = False
    async for line in lines:
        if not line.startswith(b"data:"):
            continue
        now = time.perf_counter()
        compact = line.replace(b": ", b":")
        if compact.startswith(b"data:[DONE]"):
            done = True
        elif b'"choices":[{' in compact:
            answer.chunks_at.append(now)
        elif b'"error":' in compact:
            answer.error = line.decode(errors="replace")[:SHOWN_CHARS]
        if b'"usage":{' in compact:
            answer.num_tokens = json.loads(line[len(b"data:") :])["usage"]["completion_tokens"]
    if not done and answer.error is None:
        answer.error = "the stream ended without [DONE]"


def _shortcoming(answer: Answer, call: Call) -> str | None:
    if not answer.chunks_at:
        return "no token"
    if call.exact and answer.num_tokens != call.max_tokens:
        return f"{answer.num_tokens} tokens instead of {call.max_tokens}"
    return None

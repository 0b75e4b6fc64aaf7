"""One request at an external server: turns its chunks into the deltas of the token path."""

from __future__ import annotations

from actors.external.openai_server import Reading
from actors.external.openai_wire import Chunk, TokenUsage
from core.messages.tokens import TokenDelta
from core.request import Request, SequenceStatus

_STATUSES = {"length": SequenceStatus.FINISHED_LENGTH}


class BackendStream:
    """Counts tokens without ids: one for each chunk with text, corrected at the end by the server's usage.

    Attributes:
        reading: Whether the client reads.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.reading = Reading()
        self._output_len = len(request.output_ids)
        self._finish_reason: str | None = None
        self._usage: TokenUsage | None = None

    def take(self, chunk: Chunk) -> TokenDelta | None:
        """Returns the delta of a chunk; None if it has no text. Keeps finish reason and usage for ``end``."""
        self._finish_reason = chunk.finish_reason or self._finish_reason
        self._usage = chunk.usage or self._usage
        return self._delta(chunk.text, 1) if chunk.text else None

    def end(self) -> TokenDelta:
        """Returns the last delta, which corrects the token count and gives the number of cached prompt tokens."""
        begun_at, missing = len(self.request.output_ids), 0
        if self._usage is not None:
            missing = max(0, begun_at + self._usage.completion_tokens - self._output_len)
        cached_len = 0 if begun_at else self.cached_len or 0
        return self._delta("", missing, self._finish_reason, cached_len)

    @property
    def cached_len(self) -> int | None:
        """Prompt tokens that the server had cached; None if it does not report them."""
        return None if self._usage is None else self._usage.cached_tokens

    @property
    def status(self) -> SequenceStatus:
        """How the sequence ended; every finish reason except the length limit counts as a stop."""
        return _STATUSES.get(self._finish_reason or "", SequenceStatus.FINISHED_STOPPED)

    def _delta(self, text: str, num_tokens: int, finish_reason: str | None = None, cached_len: int = 0) -> TokenDelta:
        start = self._output_len
        self._output_len += num_tokens
        request_id, attempt = self.request.request_id, self.request.attempt
        return TokenDelta(
            request_id, attempt, start, (), text, finish_reason, cached_len=cached_len, num_unnamed=num_tokens
        )

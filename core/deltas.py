"""Several deltas of one stream as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from core.messages.tokens import DeltaLogprobs, TokenDelta


def joined(deltas: Sequence[TokenDelta]) -> TokenDelta:
    """Consecutive deltas of one stream as one."""
    first, last = deltas[0], deltas[-1]
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return dataclasses.replace(
        last,
        start=first.start,
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        cached_len=first.cached_len or last.cached_len,
        num_unnamed=sum(delta.num_unnamed for delta in deltas),
        logprobs=_joined_logprobs(logprobs) if logprobs else None,
    )


def _joined_logprobs(parts: Sequence[DeltaLogprobs]) -> DeltaLogprobs:
    return DeltaLogprobs(tuple(entry for part in parts for entry in part.output), parts[0].prompt)

"""Recompute preemption: the newest give up their KV and later prefill prompt and output again (vLLM's rule)."""

from __future__ import annotations

from collections.abc import Sequence


def choose_victims(admitted: Sequence[tuple[str, int]], short_blocks: int) -> list[str]:
    """Who gives up its KV so that the others can go on.

    Args:
        admitted: (request id, blocks held) in order of admission, oldest first.
        short_blocks: Blocks that the paused sequences lack.

    Returns:
        Ids, newest first, until enough blocks come free. The oldest is never taken: it always fits alone, so
        the system as a whole makes progress.
    """
    victims: list[str] = []
    freed = 0
    for request_id, num_blocks in reversed(admitted[1:]):
        if freed >= short_blocks:
            break
        victims.append(request_id)
        freed += num_blocks
    return victims

"""The names of a prompt's beginning, by which prefixes are compared."""

from __future__ import annotations

from farsight.core.images import identity_ids
from farsight.core.request import Request
from farsight.kvcache.block_manager import hash_blocks, salted_root


def prefix_hashes(request: Request, block_size: int) -> tuple[int, ...]:
    """Hashes the prompt's full blocks; an image counts by its content. Empty where the request can share none.

    Args:
        block_size: 0 where the placement compares no prompts.
    """
    if not block_size or request.sampling.computes_prompt:
        return ()
    named = identity_ids(request.prompt_ids, request.images)
    return tuple(hash_blocks(named, block_size, salted_root(request.cache_salt)))

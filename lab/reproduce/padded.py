"""The setting of papers on static batching: workers that pull padded batches and compute all prompts in one step."""

from __future__ import annotations

from functools import partial

from farsight.estimator.knn import padded_batch_s
from farsight.policies.batching.base import BatchPolicy
from farsight.policies.compose import build_batch_runner
from farsight.policies.fleet.batch_scheduler import BatchScheduler
from farsight.simulator.cluster.fleet import Fleet, FleetShape
from farsight.simulator.cluster.latency import LatencyModel
from farsight.simulator.cluster.replica import ReplicaShape

_MOST_SEQUENCES = 4096
"""Requests of one batch at most; more than any batch of the papers has."""

_ANY_LENGTH = 1 << 40
"""Tokens of a block that holds any request, where memory is not what limits a batch."""


def padded_fleet(
    batcher: BatchPolicy,
    latency: LatencyModel,
    num_workers: int = 1,
    *,
    kv_tokens: int | None = None,
    reload_s: float = 0.0,
) -> Fleet:
    """Workers that run the batches of ``batcher``; what waits for company goes alone once no request will come.

    Args:
        kv_tokens: What a worker holds; a batch that needs more breaks off at the step that does not fit. None for no
            bound.
        reload_s: As in ``BatchScheduler``.
    """
    num_blocks, block_size = (_MOST_SEQUENCES, _ANY_LENGTH) if kv_tokens is None else (kv_tokens, 1)
    replica = ReplicaShape(
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=_MOST_SEQUENCES,
        max_batch_tokens=_ANY_LENGTH,
        execution="static",
    )
    return Fleet(
        FleetShape(replica, latency, num_workers),
        BatchScheduler(batcher, partial(padded_batch_s, latency), reload_s=reload_s),
        lambda _: build_batch_runner(_MOST_SEQUENCES),
        flush=batcher.flush,
    )


def num_computed_tokens(fleet: Fleet) -> int:
    """Output tokens that the workers have computed, invalid ones included."""
    return sum(usage.num_output_tokens for usage in fleet.recorder.usage.values())

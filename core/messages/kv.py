"""Where the KV of one replica is, and what has been done with it (see ``core.messages``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVTraffic:
    """What one life of a worker has done with KV so far; the numbers only rise.

    Attributes:
        offloads: Copies to the host that have arrived; ``uploads`` those to the device.
        offloaded_bytes: What they held together.
        refused_offloads: Orders to the host that found no room there, or nothing to move.
        recomputed_tokens: Tokens computed again after their KV was dropped.
    """

    offloads: int = 0
    uploads: int = 0
    offloaded_bytes: int = 0
    uploaded_bytes: int = 0
    refused_offloads: int = 0
    recomputed_tokens: int = 0


NO_TRAFFIC = KVTraffic()


@dataclass(frozen=True, slots=True)
class KVUsage:
    """KVOffloadManager ->: where the KV of one replica is, as last reported, and what has moved.

    Attributes:
        num_resident: Sequences with blocks on the device.
        short_blocks: Blocks that paused sequences lack.
        num_host_blocks: Blocks of the host pool; 0 if there is none.
        flying_blocks: Blocks that copies in flight are to fill; they hold as many in either pool.
    """

    num_blocks: int = 0
    free_blocks: int = 0
    num_resident: int = 0
    short_blocks: int = 0
    num_host_blocks: int = 0
    free_host_blocks: int = 0
    flying_blocks: int = 0
    traffic: KVTraffic = NO_TRAFFIC

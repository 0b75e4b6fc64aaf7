"""Where the KV of one replica is, and how it has moved (see ``core.messages``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVTraffic:
    """KV that one life of a worker has moved and recomputed so far; the numbers only rise.

    Attributes:
        offloads: Completed copies to the host; ``uploads`` are those to the device.
        offloaded_bytes: Bytes of the offloads together.
        refused_offloads: Offload orders that found no room on the host, or no KV to move.
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
    """From the KVOffloadManager: where the KV of one replica is, as last reported, and how much has moved.

    Attributes:
        num_resident: Sequences with blocks on the device.
        short_blocks: Blocks that paused sequences lack.
        num_host_blocks: Blocks of the host pool; 0 if there is none.
        flying_blocks: Target blocks of copies in flight; each copy holds as many blocks in either pool.
    """

    num_blocks: int = 0
    free_blocks: int = 0
    num_resident: int = 0
    short_blocks: int = 0
    num_host_blocks: int = 0
    free_host_blocks: int = 0
    flying_blocks: int = 0
    traffic: KVTraffic = NO_TRAFFIC

"""Where the KV of one replica is, and how it has moved (see ``core.messages``)."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import NamedTuple

from farsight.core.request import Residency


class BlockName(NamedTuple):
    """Names a full block within one ``KVIdentity``.

    Attributes:
        name: Chained hash of all tokens up to its end, from the root of its salt (``kvcache.block_manager``).
        parent: Name of the block before it; 0 (``NO_PARENT``) if the block begins a sequence.
        owner: Tenant whose request has computed it; empty where no API keys are in use.
    """

    name: int
    parent: int
    owner: str = ""


@dataclass(frozen=True, slots=True)
class KVIdentity:
    """What two blocks of one name must have in common for their bytes to be the same.

    Attributes:
        model: Architecture and shape of the KV.
        weights: Checksum of the weights.
        dtype: Type of the KV in memory.
        rounding: How weights and activations are rounded.
        build: The code that computes: version, backend, compiled library.
        block_size: Tokens of a block.
        block_bytes: Bytes of a block.
        adapter: Version of an adapter of the weights; empty without one.
        state: Form of a recurrent state beside the block; empty where the model has none.
    """

    model: str
    weights: str
    dtype: str
    rounding: str
    build: str
    block_size: int
    block_bytes: int
    adapter: str = ""
    state: str = ""

    def digest(self) -> bytes:
        """Returns 16 bytes that differ where any field does."""
        text = "\0".join(f"{name}={value}" for name, value in asdict(self).items())
        return blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Brought:
    """What a sequence got back from the tiers when it started.

    Attributes:
        num_tokens: Tokens of its prompt that came back.
        tier: The slowest tier that they came from.
        seconds: What that took.
        compute_s: What it would have taken to compute them; 0 where nothing was measured.
    """

    num_tokens: int
    tier: Residency
    seconds: float
    compute_s: float


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


@dataclass(frozen=True, slots=True)
class QueueSize:
    """A queue of the MLFQ that is not empty.

    Attributes:
        urgency: As in ``KVHolder``.
        level: From 1.
        num_jobs: Counted over all requests of the replica, with KV or without.
    """

    urgency: int
    level: int
    num_jobs: int


@dataclass(frozen=True, slots=True)
class KVHolder:
    """A request that executes next or holds KV, as the Scheduler sees it; lengths in tokens.

    Attributes:
        arrived_at: In seconds of the Scheduler's clock: compared with each other, and with nothing else.
        known_len: Tokens of prompt and output so far.
        computed_len, host_len: Known tokens whose KV is on the device, and on the host.
        urgency: Place of its priority and deadline among the requests of the question, 0 for the most urgent.
        level, waited_s: Its queue of the MLFQ, and seconds since it ran, was promoted or came; 0 under another order.
        rank_s: Its rank under an order of the Gittins kind, lower first; 0 under another one.
    """

    request_id: str
    arrived_at: float
    known_len: int
    computed_len: int
    host_len: int
    urgency: int
    level: int = 0
    waited_s: float = 0.0
    rank_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OffloadQuestion:
    """Scheduler -> KVOffloadManager: all that the choice of KV moves depends on at one scheduling point.

    Attributes:
        seq: Rises by one a question in one life of the Scheduler.
        running, idle, offloaded, free, needed, host_free, host_capacity, block_size, short: As in
            ``policies.interfaces.KvView``.
        quantum_s: The first quantum of the MLFQ; 0 under another order.
        queues: The queues of the MLFQ, the highest first.
    """

    seq: int
    running: tuple[KVHolder, ...]
    idle: tuple[KVHolder, ...]
    offloaded: tuple[KVHolder, ...]
    free: int
    needed: int
    host_free: int
    host_capacity: int
    block_size: int
    short: int = 0
    quantum_s: float = 0.0
    queues: tuple[QueueSize, ...] = ()


@dataclass(frozen=True, slots=True)
class OffloadOrders:
    """KVOffloadManager -> Scheduler: requests whose KV goes out and comes back, by id. The Scheduler checks each order
    against later events, and the next plan carries the orders that are still valid.

    Attributes:
        seq: Number of the question.
        drop: Requests whose KV is dropped and computed again.
        break_off: As in ``policies.interfaces.KvMoves``.
        idle_target: Device tokens to keep free for newcomers.
    """

    seq: int
    offload: tuple[str, ...] = ()
    drop: tuple[str, ...] = ()
    upload: tuple[str, ...] = ()
    break_off: bool = False
    idle_target: int = 0

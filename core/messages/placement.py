"""The Router's placements, for people who watch; no component decides by these messages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """A replica as placement sees it.

    Attributes:
        takes_requests: Whether it is neither away nor draining.
        work_tokens: Tokens of prompt and expected output of the requests there.
        prefill_s: Seconds of prefill placed there lately, where placement counts them.
        decode_s: Seconds of decoding placed there lately, where placement counts them.
        cached_tokens: Tokens believed to be cached there, where placement uses prefixes.
        capacity_tokens: Tokens that the KV pool holds; 0 where placement does not ask.
    """

    replica: str
    takes_requests: bool
    num_requests: int
    work_tokens: float
    prefill_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    capacity_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ReplicaLoads:
    """All replicas."""

    replicas: tuple[ReplicaView, ...]


@dataclass(frozen=True, slots=True)
class PrefixView:
    """A node of the prefix tree.

    Attributes:
        depth: Number of nodes above it, the root excluded.
        num_tokens: Tokens of its span.
        end_len: Tokens from the start of the prompt to its end.
        num_recent: Requests that were placed through it lately.
        num_in_flight: Requests through it that have not ended, whenever they were placed.
        replicas: Replicas that are believed to cache it.
        assigned: Further replicas that may serve it.
    """

    depth: int
    num_tokens: int
    end_len: int
    num_recent: int
    num_in_flight: int
    replicas: tuple[str, ...]
    assigned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """How many requests were placed for a reason since the Router started."""

    reason: str
    count: int


@dataclass(frozen=True, slots=True)
class RecentPlacement:
    """One of the last placements.

    Attributes:
        placed_at: Seconds since the epoch.
        hit_len: Tokens of ``known_len`` believed to be cached there.
    """

    placed_at: float
    replica: str
    reason: str
    known_len: int
    hit_len: int


@dataclass(frozen=True, slots=True)
class PlacementView:
    """Placement as a whole.

    Attributes:
        placement: Name of the policy.
        by_prefixes: Whether it uses what replicas cache.
        prefixes: The busiest nodes of the tree, each after the one above it.
        recent: The last placements, newest first.
    """

    placement: str
    by_prefixes: bool = False
    replicas: tuple[ReplicaView, ...] = ()
    prefixes: tuple[PrefixView, ...] = ()
    reasons: tuple[ReasonCount, ...] = ()
    recent: tuple[RecentPlacement, ...] = ()

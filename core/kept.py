"""Objects that clients leave with the service for a while: files, batches, and what batches have brought so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KeptObject:
    """An object that the service keeps for a client.

    Attributes:
        kind: Kind of the object; ids of different kinds are apart.
        object_id: Unique within its kind.
        owner: Tenant; empty where no keys are in use.
        created_at: Unix seconds; lists go by it.
        expires_at: Unix seconds after which it may be dropped; 0 for never.
        revision: Raised by one with each change: a change of another than the last revision is refused.
        num_bytes: Bytes that count against its owner's quota.
        record: Data of the sender, opaque to the store.
    """

    kind: str
    object_id: str
    owner: str
    created_at: float
    expires_at: float
    revision: int
    num_bytes: int
    record: bytes


@dataclass(frozen=True, slots=True)
class PutObject:
    """-> LogStore: a new object (``revision`` 1), or a change of one.

    Attributes:
        max_owner_bytes: Most bytes that the owner may have with it; 0 is no limit.
    """

    kept: KeptObject
    max_owner_bytes: int = 0


@dataclass(frozen=True, slots=True)
class PutVerdict:
    """
    Attributes:
        stored: False if the stored revision is another, or the owner would have too much.
        revision: The stored revision; 0 for nothing.
        owner_bytes: Bytes that the owner has now.
    """

    stored: bool
    revision: int
    owner_bytes: int


@dataclass(frozen=True, slots=True)
class ObjectName:
    kind: str
    object_id: str


@dataclass(frozen=True, slots=True)
class ObjectQuery:
    """-> LogStore: the objects of a kind that one owner has, by time of creation, then id.

    Attributes:
        newest_first: The order.
        after: Begin behind this id; empty: at the beginning.
    """

    kind: str
    owner: str
    limit: int
    newest_first: bool = False
    after: str = ""


@dataclass(frozen=True, slots=True)
class ObjectPage:
    objects: tuple[KeptObject, ...]


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """``index`` tells a part's place; a part that is there is never changed."""

    index: int
    data: bytes


@dataclass(frozen=True, slots=True)
class AddParts:
    """-> LogStore: parts of an object's content. Parts that are there already, or of no object, are dropped."""

    kind: str
    object_id: str
    parts: tuple[ObjectPart, ...]


@dataclass(frozen=True, slots=True)
class PartsQuery:
    """-> LogStore: the parts from ``first`` on, as long as they have no more than ``max_bytes``; at least one.

    Attributes:
        only_indices: Without their data.
    """

    kind: str
    object_id: str
    first: int
    max_bytes: int
    only_indices: bool = False


@dataclass(frozen=True, slots=True)
class PartsPage:
    parts: tuple[ObjectPart, ...]


@dataclass(frozen=True, slots=True)
class DropExpired:
    """-> LogStore: drops every object whose time is over at ``now``, in Unix seconds."""

    now: float

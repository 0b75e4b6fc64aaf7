"""Resumable streams: the log that an ingress replica writes of a stream, so that another replica can go on with it."""

from __future__ import annotations

from dataclasses import dataclass

from farsight.core.messages.tokens import TokenDelta

END = -1
"""``StreamEntry.index`` of the last entry of a stream."""


@dataclass(frozen=True, slots=True)
class StreamEntry:
    """One entry of a stream's log. Its number in the log never changes, nor do the events that clients see of it.

    Attributes:
        index: The choice that the delta belongs to; ``END`` ends the stream.
        delta: None with the last entry.
        error: With the last entry: the JSON object of the error that ended the stream; empty if none did.
    """

    index: int
    delta: TokenDelta | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class StreamState:
    """A whole stream.

    Attributes:
        stream_id: 128 random bits in hexadecimal.
        epoch: Raised with each change of the ingress replica that runs the stream; lower epochs are refused.
        tenant: The tenant whose bound of bytes applies.
        owner: As ``Origin.owner``: only the same key may read the stream.
        record: Data to run the rest of the stream; opaque to the store.
        entries: Encoded ``StreamEntry`` objects, from the first.
        ended: Whether the last entry is there.
    """

    stream_id: str
    epoch: int
    tenant: str
    owner: bytes
    record: bytes
    entries: tuple[bytes, ...] = ()
    ended: bool = False


@dataclass(frozen=True, slots=True)
class StreamEntries:
    """Further entries of a stream; the first has the number ``start``."""

    stream_id: str
    epoch: int
    start: int
    entries: tuple[bytes, ...]
    ended: bool = False


@dataclass(frozen=True, slots=True)
class StreamEpoch:
    """One stream as one ingress replica runs it."""

    stream_id: str
    epoch: int


@dataclass(frozen=True, slots=True)
class StreamChanges:
    """Ingress replica -> StreamStore. A message whose answer was lost may be repeated.

    Attributes:
        opened: New streams, and streams that a new store does not know.
        added: Entries that have come since.
        kept: Streams without news that clients may still ask for.
        dropped: Streams that no client may ask for any more.
    """

    opened: tuple[StreamState, ...] = ()
    added: tuple[StreamEntries, ...] = ()
    kept: tuple[StreamEpoch, ...] = ()
    dropped: tuple[StreamEpoch, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamVerdicts:
    """The answer: streams for which the changes were not taken; all others are stored.

    Attributes:
        unknown: Not known, or with a gap: the store needs the whole stream.
        taken: Another ingress replica runs it now.
        full: The bound of bytes is reached; the store has dropped the stream.
    """

    unknown: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    full: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StreamName:
    stream_id: str


@dataclass(frozen=True, slots=True)
class StreamFound:
    """What the store knows of a stream.

    Attributes:
        epoch: 0 if the stream is not known.
        filling: Whether the store started so recently that ingress replicas may not have told it all their streams.
    """

    epoch: int = 0
    owner: bytes = b""
    filling: bool = False

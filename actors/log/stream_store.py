"""Keeps the logs of resumable streams outside of the ingress, so that they outlive every ingress process."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from prometheus_client import Gauge

from farsight.actors.calls.log_store import StreamStoreCalls
from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.metrics import family
from farsight.core.messages.resumable import (
    StreamChanges,
    StreamEntries,
    StreamEpoch,
    StreamFound,
    StreamName,
    StreamState,
    StreamVerdicts,
)

KEEP_S = 60.0
"""Seconds after which a stream that no ingress replica has mentioned is dropped."""

FILLING_S = 5.0
"""Seconds after its start in which the store may not know every stream: ingress replicas report each second."""

ENTRY_BYTES = 64
"""Bytes that an entry costs beside its own."""


@dataclass(slots=True)
class _Kept:
    state: StreamState
    touched_at: float
    entries: list[bytes]
    ended: bool
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = ENTRY_BYTES + len(self.state.record) + _size(self.entries)


class StoredStreams:
    """Streams by id, within bounds of bytes for each tenant and for all together.

    Args:
        tenant_bytes, total_bytes: The bounds. A tenant's oldest ended streams are dropped for its new entries; if that
            is not enough, the stream that needs more room is dropped.
        now: Seconds on the caller's clock.
    """

    def __init__(self, tenant_bytes: int, total_bytes: int, now: float) -> None:
        self._tenant_bytes = tenant_bytes
        self._total_bytes = total_bytes
        self._began = now
        self._streams: dict[str, _Kept] = {}  # the one that was touched longest ago comes first
        self._used: Counter[str] = Counter()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._streams)

    def change(self, changes: StreamChanges, now: float) -> StreamVerdicts:
        """Stores the changes that an ingress replica reports; returns the streams for which it could not."""
        self._expire(now)
        unknown: list[str] = []
        taken: list[str] = []
        full: list[str] = []
        told = {"unknown": unknown, "taken": taken, "full": full}
        for dropped in changes.dropped:
            if self._verdict(dropped) == "":
                self._drop(dropped.stream_id)
        for state in changes.opened:
            _note(told, self._open(state, now), state.stream_id)
        for added in changes.added:
            _note(told, self._add(added, now), added.stream_id)
        for kept in changes.kept:
            verdict = self._verdict(kept)
            if not verdict:
                self._touch(kept.stream_id, now)
            _note(told, verdict, kept.stream_id)
        return StreamVerdicts(tuple(unknown), tuple(taken), tuple(full))

    def find(self, stream_id: str, now: float) -> StreamFound:
        self._expire(now)
        kept = self._streams.get(stream_id)
        if kept is None:
            return StreamFound(filling=now - self._began < FILLING_S)
        return StreamFound(kept.state.epoch, kept.state.owner)

    def take(self, stream_id: str, now: float) -> StreamState | None:
        """Returns the whole stream under a new epoch, for the ingress replica that continues it; None if unknown."""
        self._expire(now)
        kept = self._streams.get(stream_id)
        if kept is None:
            return None
        old = kept.state
        kept.state = StreamState(stream_id, old.epoch + 1, old.tenant, old.owner, old.record)
        self._touch(stream_id, now)
        return StreamState(stream_id, old.epoch + 1, old.tenant, old.owner, old.record, tuple(kept.entries), kept.ended)

    def _open(self, state: StreamState, now: float) -> str:
        known = self._streams.get(state.stream_id)
        if known is not None and known.state.epoch > state.epoch:
            return "taken"
        if known is not None:
            self._drop(state.stream_id)
        head = StreamState(state.stream_id, state.epoch, state.tenant, state.owner, state.record)
        kept = _Kept(head, now, list(state.entries), state.ended)
        if not self._make_room(state.tenant, kept.num_bytes, state.stream_id):
            return "full"
        self._streams[state.stream_id] = kept
        self._count(state.tenant, kept.num_bytes)
        return ""

    def _add(self, added: StreamEntries, now: float) -> str:
        verdict = self._verdict(StreamEpoch(added.stream_id, added.epoch))
        if verdict:
            return verdict
        kept = self._streams[added.stream_id]
        if added.start > len(kept.entries):
            return "unknown"
        fresh = added.entries[len(kept.entries) - added.start :]  # the rest came with an earlier message
        num_bytes = _size(fresh)
        tenant = kept.state.tenant
        self._touch(added.stream_id, now)
        if not self._make_room(tenant, num_bytes, added.stream_id):
            self._drop(added.stream_id)
            return "full"
        kept.entries += fresh
        kept.ended = kept.ended or added.ended
        kept.num_bytes += num_bytes
        self._count(tenant, num_bytes)
        return ""

    def _verdict(self, told: StreamEpoch) -> str:
        kept = self._streams.get(told.stream_id)
        if kept is None or kept.state.epoch < told.epoch:
            return "unknown"
        return "taken" if kept.state.epoch > told.epoch else ""

    def _make_room(self, tenant: str, num_bytes: int, for_id: str) -> bool:
        """Drops the tenant's oldest ended streams until there is room; returns whether there is room now."""
        if not self._exceeds(tenant, num_bytes):
            return True
        streams = self._streams.items()
        ended = [each for each, kept in streams if kept.ended and kept.state.tenant == tenant and each != for_id]
        for stream_id in ended:
            self._drop(stream_id)
            if not self._exceeds(tenant, num_bytes):
                return True
        return False

    def _exceeds(self, tenant: str, num_bytes: int) -> bool:
        return self._used[tenant] + num_bytes > self._tenant_bytes or self.num_bytes + num_bytes > self._total_bytes

    def _touch(self, stream_id: str, now: float) -> None:
        kept = self._streams.pop(stream_id)
        kept.touched_at = now
        self._streams[stream_id] = kept

    def _expire(self, now: float) -> None:
        while self._streams:
            stream_id, kept = next(iter(self._streams.items()))
            if now - kept.touched_at < KEEP_S:
                return
            self._drop(stream_id)

    def _drop(self, stream_id: str) -> None:
        kept = self._streams.pop(stream_id)
        self._count(kept.state.tenant, -kept.num_bytes)

    def _count(self, tenant: str, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._used[tenant] += num_bytes
        if not self._used[tenant]:
            del self._used[tenant]


def _size(entries: tuple[bytes, ...] | list[bytes]) -> int:
    return sum(ENTRY_BYTES + len(entry) for entry in entries)


def _note(told: dict[str, list[str]], verdict: str, stream_id: str) -> None:
    if verdict:
        told[verdict].append(stream_id)


class StreamStore(Component, StreamStoreCalls):
    """Holds all streams in memory: the ingress replicas that run them report them to a new store."""

    kind = "StreamStore"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        server = context.config.server
        self._streams = StoredStreams(server.max_stream_bytes_per_tenant, server.max_stream_bytes, time.monotonic())
        text = "Resumable streams that the store keeps."
        self._num_streams = family(context.registry, Gauge, "farsight:resumable_streams", text)
        text = "Bytes that their logs take."
        self._num_bytes = family(context.registry, Gauge, "farsight:resumable_stream_bytes", text)

    @property
    def queue(self) -> int:
        """0: kept streams are not work that waits."""
        return 0

    async def change(self, changes: StreamChanges) -> StreamVerdicts:
        verdicts = self._streams.change(changes, time.monotonic())
        self._num_streams.set(len(self._streams))
        self._num_bytes.set(self._streams.num_bytes)
        return verdicts

    async def find(self, name: StreamName) -> StreamFound:
        return self._streams.find(name.stream_id, time.monotonic())

    async def take(self, name: StreamName) -> StreamState | None:
        return self._streams.take(name.stream_id, time.monotonic())

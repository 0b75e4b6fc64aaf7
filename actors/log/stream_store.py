"""Keeps the logs of resumable streams outside of the ingress, so that they outlive every ingress process."""

from __future__ import annotations

import functools
import time

from prometheus_client import CollectorRegistry, Gauge

from actors.calls.log_store import StreamStoreCalls
from actors.log.stored_streams import StoredStreams
from actors.runtime.component import Component, ComponentContext
from core.messages.resumable import StreamChanges, StreamFound, StreamName, StreamState, StreamVerdicts


class StreamStore(Component, StreamStoreCalls):
    """Holds all streams in memory: the ingress replicas that run them report them to a new store."""

    kind = "StreamStore"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        server = context.config.server
        self._streams = StoredStreams(server.max_stream_bytes_per_tenant, server.max_stream_bytes, time.monotonic())
        self._num_streams, self._num_bytes = _gauges(context.registry)

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


@functools.cache
def _gauges(registry: CollectorRegistry) -> tuple[Gauge, Gauge]:
    """Makes one pair of gauges for each registry: a process may stop a store and start another."""
    streams = Gauge("farsight:resumable_streams", "Resumable streams that the store keeps.", registry=registry)
    num_bytes = Gauge("farsight:resumable_stream_bytes", "Bytes that their logs take.", registry=registry)
    return streams, num_bytes

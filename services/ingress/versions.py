"""The open requests of an ingress replica by the version of the weights that they run on."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from actors.calls.scheduling import RouterCalls
from services.api.backend import ModelInfo
from services.ingress.ledger import RequestLedger
from services.ingress.streams import ClientStream, fail_stream

REPLACED = "its weights were replaced, and the time for it to end is over"


class VersionedStreams:
    """What a Supervisor wants to know of open requests, and may have done to them.

    Attributes:
        model: What clients may know about the model.
        model_version: Version of the weights that new requests run on.
    """

    model: ModelInfo
    model_version: int = 0
    _oldest_served: int = 0
    _streams: dict[str, ClientStream]
    _router: RouterCalls
    _ledger: RequestLedger
    _outgoing_due: asyncio.Event

    @property
    def oldest_version(self) -> int:
        """The lowest version of the weights of an open request; that of new ones if none is open."""
        return min((each.request.model_version for each in self._streams.values()), default=self.model_version)

    async def use_weights(self, version: int, oldest: int) -> None:
        """New requests run on this version; those on older weights than the oldest end with an error.

        Raises:
            PeerLost: The Router does not answer; nothing has changed.
        """
        if (version, oldest) == (self.model_version, self._oldest_served):
            return
        served = await self._router.model()
        if served is not None:  # the model may hold longer or shorter sequences
            ready = served.ready
            length, pool_limited = ready.max_model_len, ready.pool_limited
            self.model = dataclasses.replace(self.model, max_model_len=length, pool_limited=pool_limited)
        self.model_version, self._oldest_served = version, oldest
        self.end_streams(REPLACED, oldest)

    def end_streams(self, reason: str, oldest: int | None = None) -> None:
        """Ends every open request with an error, or those on weights older than a version."""
        for stream in list(self._streams.values()):
            request = stream.request
            if oldest is not None and request.model_version >= oldest:
                continue
            if self._ledger.replica_of(request.request_id) is not None:  # else its end is on its way
                self._ledger.close(request.request_id, time.monotonic())
                fail_stream(stream, stream.attempts, reason)
        self._outgoing_due.set()

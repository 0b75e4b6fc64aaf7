"""The open requests of an ingress replica by the version of the weights that they run on."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping

from farsight.actors.calls.scheduling import RouterCalls
from farsight.core.config.load import FarsightConfig
from farsight.core.config.rolling import changed
from farsight.core.request import Request
from farsight.services.api.backend import ModelInfo
from farsight.services.ingress.first_check import FirstCheck
from farsight.services.ingress.ledger import RequestLedger
from farsight.services.ingress.streams import ClientStream, fail_stream

REPLACED = "its weights were replaced, and the time for it to end is over"


class OpenRequests:
    """The open requests of an ingress replica, as the Supervisor asks about them, switches their weights and ends them.

    Args:
        model: What clients may know about the model.
        first_check: The check of new requests, whose limits may change.
        streams: The open requests by id, as their owner opens and closes them.
        ledger: Knows which of them have ended.
        router: Answers which model runs now.
        wake: Called when there is a message for the Router.

    Attributes:
        model_version: Version of the weights that new requests run on.
    """

    def __init__(
        self,
        config: FarsightConfig,
        model: ModelInfo,
        first_check: FirstCheck,
        streams: Mapping[str, ClientStream],
        ledger: RequestLedger,
        router: RouterCalls,
        wake: Callable[[], None],
    ) -> None:
        self.model, self.model_version = model, 0
        self.ingress_id = ledger.ingress_id
        self._config = config
        self._first_check = first_check
        self._streams = streams
        self._ledger = ledger
        self._router = router
        self._wake = wake
        self._limits_changed = "{}"
        self._oldest_served = 0

    def use_limits(self, limits: str) -> None:
        """Checks new requests by these settings instead of the start's; by section, as JSON."""
        if limits != self._limits_changed:
            self._first_check.limits = changed(self._config, json.loads(limits)).server
            self._limits_changed = limits

    @property
    def deadline_s(self) -> float:
        """Seconds within which another server has to send a first token."""
        return self._first_check.limits.first_token_deadline_s if self._config.replica else math.inf

    @property
    def own_deadline_s(self) -> float:
        """Seconds within which any request has to have a first token."""
        limits = self._first_check.limits
        return limits.max_wait_s + limits.first_token_deadline_s if limits.max_wait_s else math.inf

    @property
    def oldest_version(self) -> int:
        """The lowest version of the weights of an open request; the version of new requests if none is open."""
        return min((each.request.model_version for each in self._streams.values()), default=self.model_version)

    async def use_weights(self, version: int, oldest: int) -> None:
        """Runs new requests on this version; ends requests on weights below ``oldest`` with an error.

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
        self.model = dataclasses.replace(self.model, version=version)
        self.model_version, self._oldest_served = version, oldest
        self.end_streams(REPLACED, oldest)

    def is_replaced(self, request: Request) -> bool:
        """Returns whether a request to resume began with weights that no replica runs any more."""
        return bool(request.output_ids) and request.model_version < self._oldest_served

    def end_streams(self, reason: str, oldest: int | None = None) -> None:
        """Ends every open request with an error, or only requests on weights below version ``oldest``."""
        for stream in list(self._streams.values()):
            request = stream.request
            if oldest is not None and request.model_version >= oldest:
                continue
            if self._ledger.replica_of(request.request_id) is not None:  # else its end is on its way
                self._ledger.close(request.request_id, time.monotonic())
                fail_stream(stream, stream.attempts, reason)
        self._wake()

"""Autoscaler: watches queues and predicted delays, and has the Supervisor add or remove components."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from actors.runtime.names import host_of, length_predictor_name
from actors.runtime.peer import PeerBook, PeerLost
from actors.supervision.autoscaling import LOOK_S, QueueScaler, ReplicaScaler
from core.config.load import FarsightConfig
from core.errors import FarsightError
from core.messages.status import ComponentCounts
from policies.fleet.queue_delay import queue_delay_s

logger = logging.getLogger(__name__)

Scaling = Callable[[str, int, int], Coroutine[None, None, None]]
"""(kind, wanted number, number as last seen) -> scales the kind, unless its number has changed meanwhile."""


class Autoscaler:
    """Follows the load within the configured bounds; a kind whose bounds leave no choice is not watched.

    Args:
        counts: Returns the desired numbers now.
        scale: Changes a number; raises FarsightError if that fails, and then nothing has changed.
    """

    def __init__(
        self, config: FarsightConfig, peers: PeerBook, counts: Callable[[], ComponentCounts], scale: Scaling
    ) -> None:
        self._config = config
        self._peers = peers
        self._counts = counts
        self._scale = scale

    def tasks(self) -> list[Coroutine[None, None, None]]:
        """Coroutines that run as long as the Supervisor."""
        actors, model = self._config.actors, self._config.model
        found = []
        if actors.max_length_predictors > actors.length_predictors:
            found.append(self._follow_questions(QueueScaler(actors.length_predictors, actors.max_length_predictors)))
        if model.max_replicas > model.min_replicas:
            found.append(self._follow_delay(ReplicaScaler(model)))
        return found

    async def _follow_delay(self, scaler: ReplicaScaler) -> None:
        """Scales replicas by the queue delay that the Router predicts."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                outlook = await self._peers.router().outlook()
            except PeerLost:
                continue  # the Router is down and is restarted first
            count = self._counts().replicas
            wanted = scaler.wanted(outlook, count, time.monotonic())
            if wanted != count:
                num, target_s = outlook.demand.num_requests, self._config.model.target_queue_delay_s
                before_s, after_s = (queue_delay_s(outlook, each) or 0.0 for each in (count, wanted))
                reason = f"with {num} in flight a request would wait {before_s:.2f} s, with {wanted} {after_s:.2f} s"
                await self._carry_out("replica", wanted, count, f"{reason} (target {target_s:g} s)")

    async def _follow_questions(self, scaler: QueueScaler) -> None:
        """Scales length predictors by their open questions."""
        while True:
            await asyncio.sleep(LOOK_S)
            queues = await self._predictor_queues()
            if queues is None:
                continue  # a predictor has died and is restarted first
            wanted = scaler.wanted(queues, time.monotonic())
            if wanted != len(queues):
                await self._carry_out("length-predictor", wanted, len(queues), f"their queues are {queues}")

    async def _carry_out(self, kind: str, wanted: int, count: int, reason: str) -> None:
        logger.warning("%s: %d -> %d; %s", kind, count, wanted, reason)
        try:
            await self._scale(kind, wanted, count)
        except FarsightError:
            logger.exception("%s: not scaled", kind)

    async def _predictor_queues(self) -> list[int] | None:
        """Open questions of each predictor; None if one does not answer."""
        num = self._counts().length_predictors
        queues = []
        for index in range(num):
            name = length_predictor_name(index)
            host = self._peers.actor(host_of(name, self._peers.placement))
            try:
                rows = await host.rows()
            except PeerLost:
                return None
            queues += [row.queue for row in rows if row.name == name]
        return queues if len(queues) == num else None

"""Decides the number of length predictors from their queues, and of replicas from the predicted queue delay."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

from farsight.actors.runtime.names import SCALABLE, host_of, length_predictor_name, own_replicas
from farsight.actors.runtime.peer import PeerBook, answer_of
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError, MessageError
from farsight.core.messages.status import ComponentCounts
from farsight.policies.fleet.queue_delay import queue_delay_s
from farsight.policies.fleet.scaling import LOOK_S, QueueScaler, ReplicaScaler

logger = logging.getLogger(__name__)


def scaled(before: ComponentCounts, kind: str, count: int) -> ComponentCounts:
    """Returns the counts with another number of one kind; a removed replica is not drained any more either.

    Raises:
        MessageError: Only drained replicas would be left.
    """
    change: dict[str, Any] = {SCALABLE[kind]: count}
    counts = dataclasses.replace(before, **change)
    known = set(map(str, range(counts.replicas)))
    drains = (tuple(each for each in names if each in known) for names in (before.draining, before.drained))
    draining, drained = drains
    counts = dataclasses.replace(counts, draining=draining, drained=drained)
    if takes_requests(before) and not takes_requests(counts):
        raise MessageError("count", count, "more: only drained replicas would be left; `farsight drain --cancel`")
    return counts


def without_drains(before: ComponentCounts, replica: str) -> ComponentCounts:
    """Returns the counts with a replica that is neither drained nor draining."""
    draining = tuple(each for each in before.draining if each != replica)
    return dataclasses.replace(
        before, draining=draining, drained=tuple(each for each in before.drained if each != replica)
    )


def takes_requests(counts: ComponentCounts) -> bool:
    """Returns whether a replica is left that takes requests: one of our own engine or an external server."""
    return counts.backends > 0 or any(replica not in counts.draining for replica in own_replicas(counts))


Scaling = Callable[[str, int, int], Coroutine[None, None, None]]
"""Scales a kind: (kind, wanted number, number as last seen); does nothing if the number has changed meanwhile."""


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
        """Returns the coroutines that must run as long as the Supervisor does."""
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
            outlook = await answer_of(self._peers.router().outlook())
            if outlook is None:
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
        """Returns the number of open questions of each predictor; None if a predictor does not answer."""
        num = self._counts().length_predictors
        queues = []
        for index in range(num):
            name = length_predictor_name(index)
            host = self._peers.host(host_of(name, self._peers.placement))
            rows = await answer_of(host.rows())
            if rows is None:
                return None
            queues += [row.queue for row in rows.components if row.name == name]
        return queues if len(queues) == num else None

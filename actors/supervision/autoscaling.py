"""Decides the number of length predictors from their queues, and of replicas from the predicted queue delay."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from farsight.actors.runtime.names import SCALABLE, host_of, length_predictor_name, own_replicas
from farsight.actors.runtime.peer import PeerBook, answer_of
from farsight.core.config.engine import ModelConfig
from farsight.core.config.load import FarsightConfig
from farsight.core.errors import FarsightError, MessageError
from farsight.core.messages.requests import LoadSnapshot
from farsight.core.messages.status import ComponentCounts
from farsight.policies.fleet.queue_delay import queue_delay_s

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


LOOK_S = 1.0
"""Seconds between two looks at the queues."""

FULL_QUEUE = 32
"""One more component is wanted if each has at least so many open questions on average ..."""

FULL_FOR_S = 3.0
"""... at every look for so many seconds."""

IDLE_FOR_S = 60.0
"""One fewer is wanted after so many seconds without any open question."""

LATE_FOR_S = 3.0
"""More replicas are wanted if, at every look for so many seconds, the predicted delay was above the target."""


Scaling = Callable[[str, int, int], Coroutine[None, None, None]]
"""Scales a kind: (kind, wanted number, number as last seen); does nothing if the number has changed meanwhile."""


class QueueScaler:
    """Adds one component at a time while all are busy, and removes one after a long idle time.

    Args:
        least: Fewest components.
        most: Most components.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._full_since: float | None = None
        self._idle_since: float | None = None

    def wanted(self, queues: Sequence[int], now: float) -> int:
        """Returns the wanted number of components.

        Args:
            queues: Open questions of each present component; not empty.
            now: Seconds, never less than in the previous call.
        """
        count = len(queues)
        self._full_since = _since(self._full_since, sum(queues) >= FULL_QUEUE * count, now)
        self._idle_since = _since(self._idle_since, not any(queues), now)
        change = _lasted(self._full_since, FULL_FOR_S, now) - _lasted(self._idle_since, IDLE_FOR_S, now)
        if change:
            self._full_since = self._idle_since = None
        return min(max(count + change, self._least), self._most)


class ReplicaScaler:
    """Adds as many replicas as bring the predicted delay to its target, and removes one after a calm time.

    A replica takes seconds to minutes to load its model, so all missing replicas are wanted at once. One replica is
    removed only if, at every look of the calm time, the others alone would have kept the predicted delay below half of
    the target. Between half the target and the target nothing changes.

    Args:
        bounds: Fewest and most replicas, the target and the calm time.
    """

    def __init__(self, bounds: ModelConfig) -> None:
        self._bounds = bounds
        self._count = 0
        self._late_since: float | None = None
        self._calm_since: float | None = None

    def wanted(self, outlook: LoadSnapshot, count: int, now: float) -> int:
        """Returns the wanted number of replicas.

        Args:
            count: The wanted number so far. While another number takes requests, replicas are starting or leaving, and
                nothing changes.
            now: Seconds, never less than in the previous call.
        """
        if count != self._count or outlook.num_replicas != count:
            self._count, self._late_since, self._calm_since = count, None, None
        if outlook.num_replicas != count:
            return count
        target_s = self._bounds.target_queue_delay_s
        delay_s = queue_delay_s(outlook, count)
        if delay_s is None:
            return count
        self._late_since = _since(self._late_since, delay_s > target_s, now)
        calm = count > self._bounds.min_replicas and not _exceeds(outlook, count - 1, target_s / 2)
        self._calm_since = _since(self._calm_since, calm, now)
        if _lasted(self._late_since, LATE_FOR_S, now):
            enough = (more for more in range(count, self._bounds.max_replicas) if not _exceeds(outlook, more, target_s))
            return next(enough, self._bounds.max_replicas)
        return count - _lasted(self._calm_since, self._bounds.scale_down_after_s, now)


def _exceeds(outlook: LoadSnapshot, count: int, seconds: float) -> bool:
    delay_s = queue_delay_s(outlook, count)
    assert delay_s is not None, "a delay that is predicted for one number of replicas is predicted for every number"
    return delay_s > seconds


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds


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

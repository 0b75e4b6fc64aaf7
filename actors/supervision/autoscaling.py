"""How many there should be: of a stateless component by what queues before it, of replicas by the predicted queue
delay."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence

from actors.runtime.names import host_of, length_predictor_name
from actors.runtime.peer import PeerBook, PeerLost
from core.config.load import FarsightConfig
from core.config.model import ModelConfig
from core.errors import FarsightError
from core.load_snapshot import LoadSnapshot
from core.messages.status import ComponentCounts
from policies.fleet.queue_delay import queue_delay_s

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""How often the queues are looked at."""

FULL_QUEUE = 32
"""Questions in the hands of each on average, from which on one more is wanted ..."""

FULL_FOR_S = 3.0
"""... if it is so each time for this long."""

IDLE_FOR_S = 60.0
"""After so long without any question, one fewer is wanted."""

LATE_FOR_S = 3.0
"""More replicas are wanted if at each look for this long a new request would have waited too long."""


Scaling = Callable[[str, int, int], Coroutine[None, None, None]]
"""(kind, how many there are to be, how many there were): carried out unless the number has changed meanwhile."""


class QueueScaler:
    """Adds one at a time while all have their hands full, and takes one away after a long idle time.

    Args:
        least: Never fewer.
        most: Never more.
    """

    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most
        self._full_since: float | None = None
        self._idle_since: float | None = None

    def wanted(self, queues: Sequence[int], now: float) -> int:
        """How many there should be.

        Args:
            queues: Questions in the hands of each of those there are now; not empty.
            now: Seconds, not before that of the call before.
        """
        count = len(queues)
        self._full_since = _since(self._full_since, sum(queues) >= FULL_QUEUE * count, now)
        self._idle_since = _since(self._idle_since, not any(queues), now)
        change = _lasted(self._full_since, FULL_FOR_S, now) - _lasted(self._idle_since, IDLE_FOR_S, now)
        if change:
            self._full_since = self._idle_since = None
        return min(max(count + change, self._least), self._most)


class ReplicaScaler:
    """Adds as many replicas as bring the predicted delay to its target, and takes one away after a calm time.

    A replica takes seconds to minutes to load its model, so those that are missing are wanted at once, but one that is
    idle is given up only where the rest would have kept to half of the target all the while, at the highest load
    that there was. Between the two nothing changes.

    Args:
        bounds: How many at least and at most, the target and the calm time.
    """

    def __init__(self, bounds: ModelConfig) -> None:
        self._bounds = bounds
        self._count = 0
        self._late_since: float | None = None
        self._calm_since: float | None = None

    def wanted(self, outlook: LoadSnapshot, count: int, now: float) -> int:
        """How many there should be.

        Args:
            count: How many there should be so far. As long as others take requests, some are starting or leaving: that
                is waited for.
            now: Seconds, not before that of the call before.
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
    assert delay_s is not None, "what is predicted for one number of replicas is for another one"
    return delay_s > seconds


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before


def _lasted(since: float | None, seconds: float, now: float) -> bool:
    return since is not None and now - since >= seconds


class Autoscaler:
    """Follows the load within the bounds of the configuration; where these leave no choice, it looks at nothing.

    Args:
        counts: How many there should be now.
        scale: Raises FarsightError if it cannot be done; then all is as before.
    """

    def __init__(
        self, config: FarsightConfig, peers: PeerBook, counts: Callable[[], ComponentCounts], scale: Scaling
    ) -> None:
        self._config = config
        self._peers = peers
        self._counts = counts
        self._scale = scale

    def tasks(self) -> list[Coroutine[None, None, None]]:
        """What is to run for as long as there is a Supervisor."""
        actors, model = self._config.actors, self._config.model
        found = []
        if actors.max_length_predictors > actors.length_predictors:
            found.append(self._follow_questions(QueueScaler(actors.length_predictors, actors.max_length_predictors)))
        if model.max_replicas > model.min_replicas:
            found.append(self._follow_delay(ReplicaScaler(model)))
        return found

    async def _follow_delay(self, scaler: ReplicaScaler) -> None:
        """Replicas, by the delay that the Router predicts."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                outlook = await self._peers.router().outlook()
            except PeerLost:
                continue  # it is started again first
            count = self._counts().replicas
            wanted = scaler.wanted(outlook, count, time.monotonic())
            if wanted != count:
                num, target_s = outlook.demand.num_requests, self._config.model.target_queue_delay_s
                before_s, after_s = (queue_delay_s(outlook, each) or 0.0 for each in (count, wanted))
                reason = f"with {num} in flight a request would wait {before_s:.2f} s, with {wanted} {after_s:.2f} s"
                await self._carry_out("replica", wanted, count, f"{reason} (target {target_s:g} s)")

    async def _follow_questions(self, scaler: QueueScaler) -> None:
        """Length predictors, by the questions in their hands."""
        while True:
            await asyncio.sleep(LOOK_S)
            queues = await self._predictor_queues()
            if queues is None:
                continue  # one has died: it is started again first
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
        """Questions in the hands of each; None if one does not answer."""
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

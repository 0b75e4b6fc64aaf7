"""The durations of batches that the ServingTimeEstimators predict."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

from actors.runtime.component import ComponentContext
from actors.runtime.names import initial_counts
from actors.runtime.peer import PeerLost, current_counts, wait_for
from core.costs import profile_cost
from core.messages.step_times import BatchShape, BatchShapes, ServedBatchTime, ServedBatchTimes
from estimator.knn import padded_batch_s
from estimator.profile_file import known_cost
from estimator.step_profile import MIN_SAMPLES
from policies.batching.base import FormedBatch
from policies.fleet.events import BatchEnded
from policies.settings import PRIOR_COST

LOOK_S = 2.0
"""Seconds after which the estimators are asked again about the same batches."""

PAUSE_S = 0.1
"""Seconds of pause after a question that no estimator has answered."""

MAX_SHAPES = 4096
"""Most batches of one question, and most answers that are kept for longer than ``LOOK_S``."""

Shape = tuple[int, int, int]
"""Number of requests, longest prompt and longest output, in tokens."""


class EstimatedTimes:
    """A ``ServingTime`` that never waits: the last estimate of a batch, or the sum of its steps until there is one.

    Estimates are requested when batches are formed or change, so that they are there when a worker pulls.

    Args:
        timed: The batches whose times the next choice may ask for.
    """

    def __init__(self, context: ComponentContext, timed: Callable[[], Iterable[FormedBatch]]) -> None:
        self._timed = timed
        self._peers = context.peers
        self._counts = initial_counts(context.config)
        self._cost = known_cost(context.config.engine.profile, PRIOR_COST)
        self._known_s: dict[Shape, float] = {}
        self._current: set[Shape] = set()  # answered since the last look
        self._served: list[ServedBatchTime] = []
        self._news = asyncio.Event()
        self._turns = itertools.count()

    def __call__(self, batch_size: int, prompt_len: int, output_len: int) -> float:
        """Returns the estimated seconds of a batch. O(1)."""
        shape = batch_size, prompt_len, output_len
        estimate_s = self._known_s.get(shape)
        return padded_batch_s(self._cost, *shape) if estimate_s is None else estimate_s

    def look(self) -> None:
        """Wakes ``run`` after an event that may have formed or changed batches."""
        self._news.set()

    def ended(self, batch: BatchEnded) -> None:
        """Queues a batch that has run to its end for the estimators."""
        shape = BatchShape(batch.num_requests, batch.prompt_len, batch.output_len)
        self._served.append(ServedBatchTime(shape, batch.estimated_s, batch.duration_s))
        self._news.set()

    async def run(self) -> None:
        """Asks for estimates and reports ended batches, until cancelled."""
        loop = asyncio.get_running_loop()
        due_at = loop.time()
        while True:
            if loop.time() >= due_at:
                await self._look_again()
                due_at = loop.time() + LOOK_S
            self._news.clear()
            await self._tell()
            await self._ask()
            if not self._news.is_set():
                await wait_for(self._news, due_at - loop.time())

    async def _look_again(self) -> None:
        """Makes all estimates due again, since the estimators learn; until the answers come the old estimates hold."""
        self._counts = await current_counts(self._peers, self._counts)
        if len(self._known_s) > MAX_SHAPES:
            self._known_s.clear()
        self._current.clear()
        try:
            reply = await self._peers.serving_time_estimator(0).profile()
        except PeerLost:
            return  # the last profile still holds
        measured = [row for row in reply.profiles if row.num_samples >= MIN_SAMPLES]
        if measured:
            self._cost = profile_cost(max(measured, key=lambda row: row.num_samples))

    async def _tell(self) -> None:
        """Reports every ended batch to every estimator; an estimator that is away misses it."""
        served, self._served = tuple(self._served), []
        if not served:
            return
        for index in range(self._counts.serving_time_estimators):
            try:
                await self._peers.serving_time_estimator(index).observe_batches(ServedBatchTimes(served))
            except PeerLost:
                continue

    async def _ask(self) -> None:
        """Asks the estimators in turn; if one is away, the next one is asked about the same batches."""
        wanted = {(len(batch), batch.prompt_len, batch.predicted_len): None for batch in self._timed()}
        shapes = [shape for shape in wanted if shape not in self._current][:MAX_SHAPES]
        if not shapes:
            return
        question = BatchShapes(tuple(BatchShape(*shape) for shape in shapes))
        for _ in range(self._counts.serving_time_estimators):
            index = next(self._turns) % self._counts.serving_time_estimators
            try:
                answer = await self._peers.serving_time_estimator(index).estimate_batches(question)
            except PeerLost:
                continue
            self._known_s.update(zip(shapes, answer.seconds, strict=True))
            self._current.update(shapes)
            return
        await asyncio.sleep(PAUSE_S)  # otherwise each event would ask again

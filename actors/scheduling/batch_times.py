"""How long batches take: asked at every choice, learned from what ran, kept in the log."""

from __future__ import annotations

import asyncio
import importlib
import logging
import time
from collections import deque

from actors.runtime.peer import PeerBook, PeerLost
from core.costs import profile_cost
from core.errors import FarsightError, InvalidValueError
from core.messages.log import Artefact, ArtefactName
from estimator.knn import MIN_BATCHES, BatchTimes, ServedBatch
from estimator.step_profile import MIN_SAMPLES
from policies.fleet.events import BatchEnded
from policies.settings import PRIOR_COST

KIND = "batch-times"
"""Kind of the artefact."""

LOOK_S = 2.0
"""How often step costs are asked for and it is seen whether learning is due."""

NUM_SCORED = 200
"""Estimates that a version's score is the mean error of."""

logger = logging.getLogger(__name__)


class LiveBatchTimes:
    """A ``BatchTimes`` with what it needs around it: step costs from the estimator, versions in the log store.

    Every version that has learned something is stored, so that the next process goes on from there.

    Args:
        num_neighbours: As in ``BatchTimes``.
    """

    def __init__(self, peers: PeerBook, num_neighbours: int) -> None:
        self._peers = peers
        self._num_neighbours = num_neighbours
        self._times = BatchTimes(PRIOR_COST, num_neighbours=num_neighbours)
        self._estimates_s: dict[tuple[int, int, int], float] = {}
        self._errors_s: deque[float] = deque(maxlen=NUM_SCORED)
        self._num_observed = 0
        self._unsaved = False

    def __call__(self, batch_size: int, prompt_len: int, output_len: int) -> float:
        """Estimated seconds of a batch. O(1) for one that was asked about since anything was learned."""
        shape = batch_size, prompt_len, output_len
        estimate_s = self._estimates_s.get(shape)
        if estimate_s is None:
            estimate_s = self._estimates_s[shape] = self._times(*shape)
        return estimate_s

    def ended(self, batch: BatchEnded) -> None:
        """A batch has run to its end."""
        try:
            served = ServedBatch(batch.num_requests, batch.prompt_len, batch.output_len, batch.duration_s)
        except InvalidValueError:
            return  # it generated nothing
        self._times.observe(served)
        self._num_observed += 1
        self._errors_s.append(abs(batch.estimated_s - batch.duration_s))

    async def run(self) -> None:
        """Until cancelled. While the log store is away nothing is lost: the next version holds what this one would."""
        is_loaded = await self._load()
        while True:
            await asyncio.sleep(LOOK_S)
            await self._price()
            is_loaded = is_loaded or await self._load()
            if is_loaded:
                await self._learn()
            self._estimates_s.clear()

    async def _load(self) -> bool:
        """Goes on from what an earlier life has learned; False if that cannot be known yet."""
        try:
            artefact = (await self._peers.log_store().read_artefact(ArtefactName(KIND))).artefact
        except FarsightError:
            return False  # it is not there, or has not opened its file yet
        if artefact is not None:
            try:
                self._times = await asyncio.to_thread(
                    BatchTimes.from_bytes, artefact.data, PRIOR_COST, self._num_neighbours
                )
            except InvalidValueError as error:
                logger.error("version %d of %s cannot be read, learning starts over: %s", artefact.version, KIND, error)
        return True

    async def _learn(self) -> None:
        if self._num_observed + self._times.num_batches >= MIN_BATCHES:
            await asyncio.to_thread(importlib.import_module, "sklearn.neighbors")  # half a second, once
        self._unsaved |= self._times.learn(time.monotonic()) > 0
        if self._unsaved:
            await self._save()

    async def _price(self) -> None:
        """Takes the step costs of the replica that has been measured best."""
        try:
            reply = await self._peers.serving_time_estimator(0).profile()
        except PeerLost:
            return  # what it said last still holds
        measured = [row for row in reply.profiles if row.num_samples >= MIN_SAMPLES]
        if measured:
            self._times.price(profile_cost(max(measured, key=lambda row: row.num_samples)))

    async def _save(self) -> None:
        """Stores what is known as the next version, and makes it the current one."""
        log_store = self._peers.log_store()
        score = sum(self._errors_s) / len(self._errors_s) if self._errors_s else None
        note = "learned while serving; the score is the mean error of the estimates before, in seconds"
        try:
            kept = (await log_store.artefacts()).artefacts
            version = max((info.version for info in kept if info.kind == KIND), default=0) + 1
            data = self._times.to_bytes()
            artefact = Artefact(KIND, version, time.time(), score, self._times.num_batches, note, data)
            await log_store.put_artefact(artefact)
            await log_store.set_current(ArtefactName(KIND, version))
        except PeerLost:
            return  # it comes back
        except FarsightError:
            logger.exception("%s could not be stored", KIND)
            return
        self._unsaved = False

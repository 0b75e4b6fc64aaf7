"""Versions of what predicts output lengths, as the log store keeps them."""

from __future__ import annotations

import functools
import logging
import time

from prometheus_client import CollectorRegistry, Counter

from actors.calls.log_store import LogStoreCalls
from core.messages import log as log_messages
from predictor.artefact import Artefact, ArtefactError, from_bytes
from predictor.retraining import feature_set

logger = logging.getLogger(__name__)


class ModelRegistry:
    """The versions that read requests as the first one does; others would not understand their features.

    Args:
        first: What ``farsight train`` made.
    """

    def __init__(self, log_store: LogStoreCalls, first: Artefact, registry: CollectorRegistry) -> None:
        self._log_store = log_store
        self._kind = f"length-predictor {feature_set(first)}"
        self._errors = _errors(registry)
        self._broken: set[int] = set()

    async def newest(self, above: int) -> Artefact | None:
        """The current version, if it is above this one; in its place, should it be damaged, the one before it.

        Raises:
            PeerLost: the log store is not there.
        """
        infos = (await self._log_store.artefacts()).artefacts
        mine = {info.version: info.current for info in infos if info.kind == self._kind}
        current = max((version for version, is_current in mine.items() if is_current), default=0)
        for version in sorted(mine, reverse=True):
            if above < version <= current and version not in self._broken:
                artefact = await self._read(version)
                if artefact is not None:
                    return artefact
        return None

    async def _read(self, version: int) -> Artefact | None:
        found = (await self._log_store.read_artefact(log_messages.ArtefactName(self._kind, version))).artefact
        if found is None:
            return None  # retention was quicker
        try:
            return from_bytes(found.data, f"version {version} of {self._kind}")
        except ArtefactError as error:
            self._broken.add(version)
            self._errors.inc()
            logger.error("%s; an earlier version serves", error)
            return None

    async def put(self, artefact: Artefact, score: float) -> None:
        """Keeps a version and makes it the current one; doing so twice is once.

        Raises:
            PeerLost: the log store is not there.
        """
        version = int(artefact.metadata["version"])
        num_examples = int(artefact.metadata["num_examples"])
        note = "learned while serving; the score is the mean pinball loss in tokens"
        entry = log_messages.Artefact(self._kind, version, time.time(), score, num_examples, note, artefact.to_bytes())
        await self._log_store.put_artefact(entry)
        await self._log_store.set_current(log_messages.ArtefactName(self._kind, version))


@functools.cache
def _errors(registry: CollectorRegistry) -> Counter:
    """One a registry: a predictor may be stopped and another one started in the same process."""
    return Counter("farsight:forecast_artefact_errors", "Versions of a predictor that were damaged.", registry=registry)

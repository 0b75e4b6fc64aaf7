"""Versions of the predictor of output lengths, as the log store keeps them."""

from __future__ import annotations

import functools
import logging
import time

from prometheus_client import CollectorRegistry, Counter

from actors.calls.log_store import LogStoreCalls
from core.messages import log as log_messages
from predictor.artefact import ArtefactError, TrainedModel, from_bytes
from predictor.retraining import feature_set

logger = logging.getLogger(__name__)


class ModelRegistry:
    """The versions that use the same features as ``first``; other versions cannot read the logged features.

    Args:
        first: The artefact of ``farsight train``.
    """

    def __init__(self, log_store: LogStoreCalls, first: TrainedModel, registry: CollectorRegistry) -> None:
        self._log_store = log_store
        self._kind = f"length-predictor {feature_set(first)}"
        self._errors = _errors(registry)
        self._broken: set[int] = set()

    async def newest(self, above: int) -> TrainedModel | None:
        """Returns the newest intact version above ``above`` and not above the current version; None if there is none.

        Raises:
            PeerLost: The log store does not answer.
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

    async def _read(self, version: int) -> TrainedModel | None:
        found = (await self._log_store.read_artefact(log_messages.ArtefactName(self._kind, version))).artefact
        if found is None:
            return None  # retention has dropped it meanwhile
        try:
            return from_bytes(found.data, f"version {version} of {self._kind}")
        except ArtefactError as error:
            self._broken.add(version)
            self._errors.inc()
            logger.error("%s; an earlier version serves", error)
            return None

    async def put(self, artefact: TrainedModel, score: float) -> None:
        """Stores a version and makes it the current one; repeating the call changes nothing.

        Raises:
            PeerLost: The log store does not answer.
        """
        version = int(artefact.metadata["version"])
        num_examples = int(artefact.metadata["num_examples"])
        note = "learned while serving; the score is the mean pinball loss in tokens"
        entry = log_messages.Artefact(self._kind, version, time.time(), score, num_examples, note, artefact.to_bytes())
        await self._log_store.put_artefact(entry)
        await self._log_store.set_current(log_messages.ArtefactName(self._kind, version))


@functools.cache
def _errors(registry: CollectorRegistry) -> Counter:
    """Makes one counter for each registry: a process may stop a predictor and start another."""
    return Counter("farsight:forecast_artefact_errors", "Versions of a predictor that were damaged.", registry=registry)

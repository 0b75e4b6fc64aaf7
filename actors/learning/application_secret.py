"""The secret in the keys of applications: random, and the same for every predictor of a log."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from contextlib import suppress

from actors.calls.log_store import LogStoreCalls
from core.errors import FarsightError
from core.messages.log import Artefact, ArtefactName
from predictor.applications.reading import SECRET_BYTES

KIND = "application-keys"
"""Kind of the artefact whose only version holds the secret."""

_NAME = ArtefactName(KIND, 1)

NUM_TRIES, PAUSE_S = 10, 0.5

logger = logging.getLogger(__name__)


async def application_secret(log_store: LogStoreCalls) -> bytes:
    """Returns the secret that the log holds; the first predictor that asks writes the secret.

    While the log is unavailable, a predictor waits for some seconds and then takes a secret of its own. What this
    predictor learns is lost when it ends: the name of its features contains the name of the secret, so that these
    features are not mixed with others.
    """
    own = secrets.token_bytes(SECRET_BYTES)
    for _ in range(NUM_TRIES):
        try:
            return await _kept(log_store, own)
        except FarsightError:
            await asyncio.sleep(PAUSE_S)
    logger.warning("the log does not answer; forecasts by application begin with keys of their own")
    return own


async def _kept(log_store: LogStoreCalls, own: bytes) -> bytes:
    found = (await log_store.read_artefact(_NAME)).artefact
    if found is None:
        note = "keys the hashes of instructions in the log"
        with suppress(FarsightError):  # another predictor was first: its secret is read below
            await log_store.put_artefact(Artefact(KIND, 1, time.time(), None, 0, note, own))
        found = (await log_store.read_artefact(_NAME)).artefact
    if found is None:
        raise FarsightError("the log kept no secret of application keys")
    return found.data

"""Watches that a host goes on, and ends it when it does not; the task that watches it then starts it again."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from actors.pulse.liveness import HostJudge
from actors.pulse.process_clock import clock_of, kill, own_life
from actors.runtime.cluster_store import ClusterStore
from actors.runtime.peer import Site
from core.codec import decode, encode
from core.messages.pulse import ProcessLife, Pulse, ThreadClock

LOOKS = 10
"""In the time after which a stopped process is replaced: one late answer is no sign, several in a row are."""

MAX_PERIOD_S = 1.0

logger = logging.getLogger(__name__)


def period_s(silence_s: float) -> float:
    """Between two looks."""
    return min(MAX_PERIOD_S, silence_s / LOOKS)


class Lives:
    """Which process each host is, for watchers that come when it answers no more.

    Args:
        namespace: Of Ray.
    """

    def __init__(self, namespace: str) -> None:
        self._store = ClusterStore(f"{namespace}-lives")

    async def put(self, host: str) -> None:
        """It is this process; called on the event loop that answers."""
        await self._store.put(host, encode(own_life(own_node())))

    async def get(self, host: str) -> ProcessLife | None:
        """None if it has never come up; perhaps a life that is over."""
        data = await self._store.get(host)
        return None if data is None else decode(data, ProcessLife)


def own_node() -> str:
    """The id of Ray's node that this process is on."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


class Watch:
    """Watches one life of a host.

    Args:
        handle: Of its actor.

    Attributes:
        verdict: Why it was ended; empty as long as it was not.
    """

    def __init__(self, host: str, handle: Any, site: Site) -> None:
        self.verdict = ""
        self._host = host
        self._handle = handle
        self._lives = Lives(site.namespace)
        self._period_s = period_s(site.config.actors.silence_s)
        self._judge = HostJudge(site.config.actors.silence_s, self._period_s)
        self._node_id = own_node()
        self._life: ProcessLife | None = None
        self._asked: asyncio.Task[Pulse | None] | None = None

    async def run(self) -> None:
        """Returns once it has ended the host. Whatever goes wrong here must not leave the host unwatched."""
        while True:
            try:
                return await self._watch()
            except Exception:
                logger.exception("the watch over %s broke and begins again", self._host)
                await asyncio.sleep(MAX_PERIOD_S)

    async def _watch(self) -> None:
        heard = False
        while not self.verdict:
            pulse = self._answer()
            heard = heard or pulse is not None
            if not heard:  # it may be stopped, and have said before which process it is
                self._life = await self._lives.get(self._host)
            self.verdict = self._judge.look(time.monotonic(), pulse, self._clock())
            if not self.verdict:
                await asyncio.sleep(self._period_s)
        logger.error("%s hangs and is replaced: %s", self._host, self.verdict)
        self._end()

    def close(self) -> None:
        """Asks nothing any more."""
        if self._asked is not None:
            self._asked.cancel()

    def _answer(self) -> Pulse | None:
        """What has come since the last look; asks again once it has come."""
        pulse = None
        if self._asked is not None and self._asked.done():
            pulse, self._asked = self._asked.result(), None
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask())
        if pulse is not None:
            self._life = pulse.life
        return pulse

    async def _ask(self) -> Pulse | None:
        """None if it cannot be asked: it has ended, which others see, or its node may be lost."""
        try:
            return decode(await self._handle.pulse.remote(), Pulse)
        except RayError:
            return None

    def _clock(self) -> ThreadClock | None:
        return clock_of(self._life) if self._life is not None and self._is_here(self._life) else None

    def _is_here(self, life: ProcessLife) -> bool:
        return life.node_id == self._node_id

    def _end(self) -> None:
        if self._life is not None and self._is_here(self._life):
            kill(self._life)  # Ray first waits 5 s for it to end by itself, which one that is stopped cannot
        ray.kill(self._handle)


@asynccontextmanager
async def watched(host: str, handle: Any, site: Site) -> AsyncIterator[Watch]:
    """Watches it meanwhile. The caller sees it die by the answers that it awaits."""
    watch = Watch(host, handle, site)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        watch.close()
        await asyncio.gather(task, return_exceptions=True)

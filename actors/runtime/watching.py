"""Watches a host and ends it when it hangs; the small values that outlive every process, in Ray's key-value store."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import ray
from ray.exceptions import RayError

from farsight.actors.pulse import HostJudge, clock_of, kill, own_life
from farsight.actors.runtime.peer import Site
from farsight.core.codec import decode, encode
from farsight.core.messages.status import ProcessLife, Pulse, ThreadClock

logger = logging.getLogger(__name__)


class ClusterStore:
    """Values by key.

    Args:
        namespace: Ray namespace; each namespace has values of its own.
    """

    def __init__(self, namespace: str) -> None:
        self._prefix = f"farsight/{namespace}/"

    async def get(self, key: str) -> bytes | None:
        """Returns a value; None if there is none under the key."""
        value: bytes | None = await asyncio.to_thread(_kv()._internal_kv_get, self._prefix + key)
        return value

    async def put(self, key: str, value: bytes) -> None:
        """Stores a value in place of an earlier one."""
        await asyncio.to_thread(_kv()._internal_kv_put, self._prefix + key, value)

    async def remove(self, key: str) -> None:
        """Removes a value; does nothing if there is none under the key."""
        await asyncio.to_thread(_kv()._internal_kv_del, self._prefix + key)

    async def clear(self) -> None:
        """Removes all values of the namespace."""
        await asyncio.to_thread(_kv()._internal_kv_del, self._prefix, del_by_prefix=True)


def _kv() -> Any:
    """Imports Ray only on first use: Ray reads its settings at import, and they must have been made before."""
    from ray.experimental import internal_kv

    return internal_kv


LOOKS = 10
"""Looks within the time after which a stopped process is replaced: one late answer proves nothing, several do."""

MAX_PERIOD_S = 1.0


def period_s(silence_s: float) -> float:
    """Returns the seconds between two looks."""
    return min(MAX_PERIOD_S, silence_s / LOOKS)


class Lives:
    """Which process each host is, for watchers that begin when the host does not answer any more.

    Args:
        namespace: Ray namespace of the hosts.
    """

    def __init__(self, namespace: str) -> None:
        self._store = ClusterStore(f"{namespace}-lives")

    async def put(self, host: str) -> None:
        """Stores that the host is this process; called on the event loop that answers."""
        await self._store.put(host, encode(own_life(own_node())))

    async def get(self, host: str) -> ProcessLife | None:
        """Returns the process of a host, which may have ended; None if the host has never come up."""
        data = await self._store.get(host)
        return None if data is None else decode(data, ProcessLife)


def own_node() -> str:
    """Returns the id of Ray's node that this process is on."""
    node_id: str = ray.get_runtime_context().get_node_id()
    return node_id


class Watch:
    """Watches one life of a host.

    Args:
        handle: Handle of the host's actor.

    Attributes:
        verdict: Why the host was ended; empty until then.
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
        """Watches until it has ended the host. A fault in the watch must not leave the host unwatched."""
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
            if not heard:  # the process may be stopped, and have stored its identity before
                self._life = await self._lives.get(self._host)
            self.verdict = self._judge.look(time.monotonic(), pulse, self._clock())
            if not self.verdict:
                await asyncio.sleep(self._period_s)
        logger.error("%s hangs and is replaced: %s", self._host, self.verdict)
        self._end()

    def close(self) -> None:
        """Cancels an open question to the host."""
        if self._asked is not None:
            self._asked.cancel()

    def _answer(self) -> Pulse | None:
        """Returns the answer since the last look, None without one; asks again once the answer has come."""
        pulse = None
        if self._asked is not None and self._asked.done():
            pulse, self._asked = self._asked.result(), None
        if self._asked is None:
            self._asked = asyncio.create_task(self._ask())
        if pulse is not None:
            self._life = pulse.life
        return pulse

    async def _ask(self) -> Pulse | None:
        """Asks the host; None if that fails: the host has ended, which others see, or its node may be lost."""
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
            kill(self._life)  # Ray first waits 5 s for it to end by itself, which a stopped process cannot
        ray.kill(self._handle)


@asynccontextmanager
async def watched(host: str, handle: Any, site: Site) -> AsyncIterator[Watch]:
    """Watches a host while the context is open. The caller learns of its death from the answers that it awaits."""
    watch = Watch(host, handle, site)
    task = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        task.cancel()
        watch.close()
        await asyncio.gather(task, return_exceptions=True)

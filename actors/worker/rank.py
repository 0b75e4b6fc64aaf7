"""Rank: one process of a replica whose model is spread over several; not the first, which is the ModelWorker.

A Rank keeps nothing that outlives its connection to rank 0. When any rank dies, all ranks end and are started again;
the new ranks ask the new rank 0 for its address.
"""

from __future__ import annotations

import asyncio
import importlib
import threading
from typing import TYPE_CHECKING

from farsight.actors.runtime.component import Component, ComponentContext
from farsight.actors.runtime.names import rank_of
from farsight.actors.runtime.peer import LOOK_AGAIN_S, PeerLost
from farsight.core.errors import RankLost

if TYPE_CHECKING:
    from farsight.engine.parallel.links import Link, Ticket


class Rank(Component):
    """Follows the ModelWorker of its replica."""

    kind = "Rank"

    def __init__(self, context: ComponentContext) -> None:
        super().__init__(context)
        place = rank_of(context.name)
        assert place is not None, context.name
        self._replica, self._rank = place
        self._follows = threading.Event()

    async def start(self) -> None:
        self.spawn(self._run())

    @property
    def state(self) -> str:
        return "ready" if self._follows.is_set() else "starting"

    async def _run(self) -> None:
        """Follows rank 0; raises FarsightError when rank 0 is gone or cannot use this rank."""
        # Imports torch, which takes seconds, and need not wait for rank 0.
        follower = await asyncio.to_thread(importlib.import_module, "farsight.engine.parallel.follower")
        loop = asyncio.get_running_loop()
        ticket, link = await self._join()
        lost = RankLost(f"{self.name}: rank 0 is gone")
        await asyncio.to_thread(
            follower.follow,
            link,
            ticket,
            self._rank,
            on_ready=self._follows.set,
            on_lost=lambda: loop.call_soon_threadsafe(self.fail, lost),
        )

    async def _join(self) -> tuple[Ticket, Link]:
        """Asks until rank 0 accepts this rank; an earlier life of rank 0 may answer, but accepts no ranks any more."""
        from farsight.engine.parallel.links import Ticket, join

        worker = self.context.peers.worker(self._replica)
        while True:
            try:
                found = await worker.gather()
                ticket = Ticket(found.host, found.port, found.key)
                return ticket, await asyncio.to_thread(join, ticket, self._rank)
            except (PeerLost, RankLost):
                await asyncio.sleep(LOOK_AGAIN_S)

"""KVOffloadManagers: the real policy in a shell of virtual time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from core.messages.kv import OffloadOrders, OffloadQuestion
from policies.order.offload_orders import OffloadDecider
from tests.protocol.network import Life

if TYPE_CHECKING:
    from tests.protocol.world import World


class ManagerComponent:
    """One life of a KVOffloadManager."""

    def __init__(self, world: World, replica: str, decider: OffloadDecider) -> None:
        self.life = Life(f"manager-{replica}", world.clock)
        self._decider = decider

    def decide(self, question: OffloadQuestion, reply: Callable[[OffloadOrders], None]) -> None:
        reply(self._decider.decide(question))

"""Speaking to an actor by its name."""

from __future__ import annotations

from typing import Any

import ray
from ray.exceptions import RayActorError

from actors.names import NAMESPACE, actor_name
from actors.peer import PeerLost


class RemoteActor:
    """An actor by name; its handle is looked up when needed, and again after a loss."""

    def __init__(self, host: str, namespace: str = NAMESPACE) -> None:
        self._host = host
        self._namespace = namespace
        self._handle: Any = None

    async def call(self, method: str, *args: Any) -> Any:
        """What its method returns.

        Raises:
            PeerLost: it is gone or not there yet.
        """
        handle = self._handle = self._handle or self._find()
        try:
            return await getattr(handle, method).remote(*args)
        except RayActorError as error:
            if self._handle is handle:
                self._handle = None
            raise PeerLost(self._host) from error

    def _find(self) -> Any:
        try:
            return ray.get_actor(actor_name(self._host), namespace=self._namespace)
        except ValueError as error:
            raise PeerLost(self._host) from error

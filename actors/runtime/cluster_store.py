"""Small values that outlive every process of Farsight: in the key-value store of the Ray head."""

from __future__ import annotations

import asyncio
from typing import Any


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

"""A few small values that outlive every process of ours: in the key-value store of the Ray head."""

from __future__ import annotations

import asyncio
from typing import Any


class ClusterStore:
    """Values by key.

    Args:
        namespace: Of Ray; each has values of its own.
    """

    def __init__(self, namespace: str) -> None:
        self._prefix = f"farsight/{namespace}/"

    async def get(self, key: str) -> bytes | None:
        """None if there is no such value."""
        value: bytes | None = await asyncio.to_thread(_kv()._internal_kv_get, self._prefix + key)
        return value

    async def put(self, key: str, value: bytes) -> None:
        """In the place of an earlier value."""
        await asyncio.to_thread(_kv()._internal_kv_put, self._prefix + key, value)

    async def remove(self, key: str) -> None:
        """Harmless where there is no such value."""
        await asyncio.to_thread(_kv()._internal_kv_del, self._prefix + key)

    async def clear(self) -> None:
        """Removes all values of the namespace."""
        await asyncio.to_thread(_kv()._internal_kv_del, self._prefix, del_by_prefix=True)


def _kv() -> Any:
    """Ray reads its settings when it is imported: not before they are made."""
    from ray.experimental import internal_kv

    return internal_kv

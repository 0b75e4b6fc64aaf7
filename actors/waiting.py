"""Waiting with an end."""

from __future__ import annotations

import asyncio


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set, but no longer than ``timeout_s``."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return

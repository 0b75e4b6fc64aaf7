"""Waiting with an end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Until the event is set, but no longer than ``timeout_s``.

    Not by ``asyncio.wait_for``: in Python 3.11 that swallows a cancellation that comes just as the event is set.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await event.wait()


async def again_and_again(work: Callable[[], Coroutine[Any, Any, None]], pause_s: float) -> None:
    """Runs work that never ends by itself. What breaks it is written down and it begins anew: it keeps no state."""
    while True:
        try:
            await work()
        except Exception:
            logger.exception("%s broke and begins anew", getattr(work, "__qualname__", work))
            await asyncio.sleep(pause_s)

"""Whose fault it is that a step has failed. Free of torch: emulated devices have it as well."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class StepFault(Enum):
    """What a failed step says about the device."""

    REQUESTS = "requests"
    """Nothing: what was asked for does not fit the device, not even cut into parts. Smaller steps will do."""

    UNKNOWN = "unknown"
    """It may be the device; several such steps in a row are its fault."""

    LOST = "lost"
    """It is unusable for this process: no later step can succeed."""


def lost_on(device: str) -> Callable[[], bool]:
    """What tells whether that device has become unusable for this process; a processor never does.

    It waits for what the device still has to do.
    """
    if device != "cuda":
        return lambda: False
    from engine import cuda

    return cuda.is_lost

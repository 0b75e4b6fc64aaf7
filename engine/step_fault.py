"""Causes of a failed step. Free of torch: emulated devices use it as well."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class IterationCutOff(Exception):
    """A step was cut off at its instant (``StepBatch.cut_off_s``): its work is lost, and nothing else."""


class StepFault(Enum):
    """What a failed step says about the device."""

    REQUESTS = "requests"
    """Nothing about the device: the step does not fit its memory, not even in parts. Smaller steps will."""

    UNKNOWN = "unknown"
    """The device may be the cause; after several such steps in a row it is."""

    LOST = "lost"
    """The device is unusable for this process: no later step can succeed."""


def lost_on(device: str) -> Callable[[], bool]:
    """A function that tells whether the device has become unusable for this process; a CPU never does.

    It waits for the device's outstanding work.
    """
    if device != "cuda":
        return lambda: False
    from engine import cuda

    return cuda.is_lost

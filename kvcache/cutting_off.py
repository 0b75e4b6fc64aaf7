"""For how long sequences may run before a step is cut off (``Slot.cut_off_at_s``)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from farsight.kvcache.executor import SequenceState


def is_cut_off(held: SequenceState, within_grants: bool) -> bool:
    """Returns whether a sequence has used up its seconds; beyond its grants, whether its last step was cut off so."""
    slot_s = held.slot.cut_off_at_s
    if not slot_s:
        return False
    return held.ran_s >= slot_s if within_grants else held.cut_off_at_s == slot_s


def seconds_until_cut_off(chosen: Iterable[SequenceState]) -> float:
    """Returns the seconds until the first of these sequences reaches its slot's limit; infinity without a limit."""
    return min((held.slot.cut_off_at_s - held.ran_s for held in chosen if held.slot.cut_off_at_s), default=math.inf)

"""A step in the making, and for how long its sequences may run before it is cut off (``Slot.cut_off_at_s``)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from farsight.kvcache.executor import SequenceState
from farsight.kvcache.step_batch import StepItem


@dataclass(slots=True)
class BatchDraft:
    """A batch in the making.

    Attributes:
        prompts_left: Prompt tokens that it may still take.
        within_grants: Whether sequences go no further than their slots say.
        arising: Hashes of the full blocks that the first ``num_seen`` items compute.
        refused: Whether a sequence was left out that the next step may take, even if no event comes before it.
        rests: Whether a sequence was left out because its slot lets others go first.
    """

    tokens_left: int
    prompts_left: int
    within_grants: bool = True
    items: list[StepItem] = field(default_factory=list)
    chosen: list[SequenceState] = field(default_factory=list)
    may_start: bool = True
    arising: set[int] = field(default_factory=set)
    num_seen: int = 0
    short_blocks: int = 0
    out_of_grants: bool = False
    refused: bool = False
    rests: bool = False

    def share(self, wanted: int) -> int:
        """Returns how many of ``wanted`` tokens it can take; one token is a decode, free of the limit on prompts."""
        return min(wanted, self.tokens_left, self.prompts_left if wanted > 1 else 1)


def is_cut_off(held: SequenceState, within_grants: bool) -> bool:
    """Returns whether a sequence has used up its seconds; beyond its grants, whether its last step was cut off so."""
    slot_s = held.slot.cut_off_at_s
    if not slot_s:
        return False
    return held.ran_s >= slot_s if within_grants else held.cut_off_at_s == slot_s


def seconds_until_cut_off(chosen: Iterable[SequenceState]) -> float:
    """Returns the seconds until the first of these sequences reaches its slot's limit; infinity without a limit."""
    return min((held.slot.cut_off_at_s - held.ran_s for held in chosen if held.slot.cut_off_at_s), default=math.inf)

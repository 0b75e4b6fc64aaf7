"""A step in the making, and for how long its sequences may run before it is cut off (``Slot.cut_off_at_s``)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from farsight.kvcache.executor import SequenceState
from farsight.kvcache.step_batch import StepBatch, StepItem


@dataclass(frozen=True, slots=True)
class StepAhead:
    """The step that follows another if no event comes before it.

    Attributes:
        after: The step before it.
        revision: ``PlanExecutor.revision`` when it was chosen.
        turning: Ids of its sequences that begin a block, and their length with the token that it computes.
    """

    after: StepBatch
    batch: StepBatch
    revision: int
    turning: list[tuple[str, int]]


@dataclass(slots=True)
class BatchDraft:
    """A batch in the making.

    Attributes:
        prompts_left: Prompt tokens that it may still take.
        within_grants: Whether sequences go no further than their slots say.
        arising: Hashes of the full blocks that the first ``num_seen`` items compute.
        states_arising: Hashes of the blocks behind which the next states of these sequences are kept.
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
    states_arising: set[int] = field(default_factory=set)
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


def runnable_tokens(held: SequenceState, *, within_grants: bool) -> int:
    """Counts the known tokens that may be computed now; computing the last known one also yields a new token."""
    slot, known, computed = held.slot, held.num_tokens, held.computed_len
    if slot.cut_off_at_s and is_cut_off(held, within_grants):
        return 0
    if not within_grants:
        return known - computed
    reach = known if known < slot.prefill_to else slot.prefill_to
    if reach == known >= slot.length_to:
        reach -= 1
    return reach - computed if reach > computed else 0


def decodes(held: SequenceState) -> bool:
    """Returns whether the sequence's next step computes the one token that the last step yielded."""
    return held.num_tokens > held.prompt_len and held.num_tokens - held.computed_len == 1


def steps_granted(held: SequenceState) -> int:
    """Counts the decoding steps until the sequence reaches its limit of length or the end of its grant."""
    reach = min(held.max_total_len, held.slot.length_to, held.slot.prefill_to + 1)
    return reach - held.num_tokens

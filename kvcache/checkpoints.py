"""Which states of cached prefixes are kept. Where a model has states, keys and values alone let no sequence begin."""

from __future__ import annotations

from collections.abc import Sequence

from farsight.core.errors import IntegrityError
from farsight.kvcache.batch_draft import BatchDraft
from farsight.kvcache.block_manager import BlockHashes
from farsight.kvcache.executor import SequenceState
from farsight.kvcache.step_batch import StepItem

SHORTEST_SPACING = 512
"""Tokens between two states of a prompt, where a state takes fewer bytes than so many tokens' keys and values."""

OUTPUT_SPACING = 64
"""Tokens between two states of an output, of which the latest alone is kept."""


def state_spacing(state_bytes: int, token_bytes: int, block_size: int) -> int:
    """Returns the tokens between two states of a prompt, whole blocks: states take no more than the KV between them."""
    tokens = max(SHORTEST_SPACING, -(-state_bytes // max(1, token_bytes)))
    return -(-tokens // block_size) * block_size


class StateCheckpoints:
    """States behind full blocks, by the name of the block, in as many places as their budget has.

    The name stands for all tokens up to the block's end, so a state is right whatever becomes of the block; a prefix is
    found as far as both go. A state is written by a step and found once the step is booked. The least recently used
    leaves first. States are kept behind the last full block of a prompt, where a prompt leaves another one whose keys
    and values are cached (the branching point of arXiv:2411.19379), every ``spacing`` tokens of a prompt, and behind
    the latest ``OUTPUT_SPACING`` tokens of an output.

    Args:
        num_places: States that are kept at once.
        block_size: Tokens of a block.
        spacing: As ``state_spacing`` returns it.
        block_hashes: As ``PlanExecutor.share_prefixes`` gets it.
    """

    def __init__(self, num_places: int, block_size: int, spacing: int, block_hashes: BlockHashes) -> None:
        self.num_places = num_places
        self._block_size = block_size
        self._spacing = spacing
        self._output_spacing = -(-OUTPUT_SPACING // block_size) * block_size
        self._block_hashes = block_hashes
        self._free = list(range(num_places - 1, -1, -1))
        self._kept: dict[int, int] = {}  # name -> place, least recently used first
        self._written: dict[str, list[int]] = {}  # by request: places that a step under way writes
        self._latest: dict[str, int] = {}  # by request: the name of the latest state of its output

    def _name(self, held: SequenceState, position: int) -> int:
        block = position // self._block_size
        return self._block_hashes(held.request_id, block)[block - 1]

    def due(self, held: SequenceState, start: int, end: int) -> list[int]:
        """Returns the positions in ``start + 1 .. end`` behind which a sequence's state is to be kept, ascending."""
        if not held.shares:
            return []
        last = held.keep_at[-1] if held.keep_at else 0
        found = {each for each in held.keep_at if start < each <= end}
        for step, low, high in ((self._spacing, start, min(end, last)), (self._output_spacing, max(start, last), end)):
            found.update(range((low // step + 1) * step, high + 1, step))
        return sorted(found)

    def _next_due(self, held: SequenceState, start: int) -> int | None:
        return next(iter(self.due(held, start, start + max(self._spacing, self._output_spacing))), None)

    def steps_until_due(self, held: SequenceState) -> int:
        """Returns how often a decoding sequence may take the same step as now until a state of it is due."""
        due = self._next_due(held, held.computed_len + 1)
        return held.tokens_left if due is None else due - 1 - held.computed_len

    def note_arising(self, item: StepItem, held: SequenceState, draft: BatchDraft) -> None:
        """Adds to ``draft.states_arising`` the next state that a sequence of a step keeps, if its tokens are known."""
        due = self._next_due(held, item.start)
        if due is not None and due <= held.num_tokens:
            draft.states_arising.add(self._name(held, due))

    def usable(
        self, held: SequenceState, names: Sequence[int], cached: list[int], limit: int, draft: BatchDraft
    ) -> list[int] | None:
        """Returns the first of ``cached`` up to the last one behind which a state is kept; None if one is on its way.

        The others are computed again. Where they end, prompts part: the state there is kept for the next one.

        Args:
            names: Names of the ``limit`` blocks that a start may take over.
            cached: The blocks that are cached of the first of these.
        """
        found = next((i for i in range(len(cached), 0, -1) if names[i - 1] in self._kept), 0)
        if found < limit and not draft.states_arising.isdisjoint(names[found:limit]):
            return None
        size = self._block_size
        held.keep_at = ((held.num_tokens - 1) // size * size,)
        if found < len(cached) < limit:
            held.keep_at = (len(cached) * size, *held.keep_at)
        return cached[:found]

    def use(self, held: SequenceState, num_blocks: int) -> int:
        """Returns the place of the state that a sequence begins with behind so many blocks; -1 for none."""
        if not num_blocks:
            return -1
        name = self._name(held, num_blocks * self._block_size)
        place = self._kept[name] = self._kept.pop(name)
        for request_id in [each for each, latest in self._latest.items() if latest == name]:
            del self._latest[request_id]  # it has a use beside that sequence
        return place

    def begin(self, held: SequenceState, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Takes places for the states that the step of the next tokens of a sequence keeps: ``StepItem.keeps``."""
        keeps = []
        for position in self.due(held, held.computed_len, held.computed_len + num_tokens):
            if self._name(held, position) not in self._kept and (place := self._take()) is not None:
                self._written.setdefault(held.request_id, []).append(place)
                keeps.append((position - held.computed_len, place))
        return tuple(keeps)

    def _take(self) -> int | None:
        """Takes a place; None if steps under way write all of them."""
        if not self._free and self._kept:
            self._forget(next(iter(self._kept)))
        return self._free.pop() if self._free else None

    def _forget(self, name: int) -> None:
        self._free.append(self._kept.pop(name))

    def keep(self, item: StepItem, held: SequenceState) -> None:
        """Makes the states findable that a booked step has written."""
        for count, place in item.keeps:
            position = item.start + count
            name = self._name(held, position)
            self._written[item.request_id].remove(place)
            if name in self._kept:
                self._free.append(place)
                continue
            self._kept[name] = place
            if not held.keep_at or position > held.keep_at[-1]:
                before = self._latest.get(item.request_id)
                if before is not None and before in self._kept:
                    self._forget(before)
                self._latest[item.request_id] = name

    def give_back(self, request_id: str) -> None:
        """Frees the places of a step whose work is lost."""
        self._free += self._written.pop(request_id, ())

    def leave(self, request_id: str) -> None:
        """Forgets a sequence that has ended or lost its KV; what is kept of it stays."""
        self.give_back(request_id)
        self._latest.pop(request_id, None)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless each place is free, kept or being written."""
        written = [place for places in self._written.values() for place in places]
        if sorted([*self._free, *self._kept.values(), *written]) != list(range(self.num_places)):
            raise IntegrityError(
                f"{len(self._free)} free + {len(self._kept)} kept + {len(written)} written states are not the "
                f"{self.num_places} places"
            )

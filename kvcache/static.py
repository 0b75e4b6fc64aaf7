"""Static execution: a batch is padded, runs in lockstep and is returned together, as Magnus and Multi-Bin measured.

Every prompt is padded to the longest, L(B). All prompts are computed before any sequence decodes; then each step
computes one token of every sequence until the last one is done. A sequence that has ended goes on computing invalid
tokens. After the G-th output token the batch holds size * (L + G) tokens of KV (Magnus, eq. (5)), padding included.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from farsight.core.errors import IntegrityError
from farsight.core.messages.plans import FinishedSequence
from farsight.core.request import SequenceStatus
from farsight.kvcache.block_manager import BlockHashes, BlockManager
from farsight.kvcache.executor import NO_FURTHER, PlanExecutor, SequenceState
from farsight.kvcache.step_batch import BatchLimits, KVCopy, Padding, StepBatch, StepItem


@dataclass(slots=True)
class _Member:
    """A sequence of the running batch.

    Attributes:
        known_len: Its tokens when the batch began: its prompt as the batch sees it.
        prefilled: Positions of the padded prompt that are computed.
        ended_as: State in which its own output has ended; None while it goes on.
    """

    held: SequenceState
    known_len: int
    prefilled: int = 0
    ended_as: SequenceStatus | None = None


class StaticExecutor(PlanExecutor):
    """Runs the slots of a plan as one batch; requests that come meanwhile wait for the next one.

    Grants do not bound a batch and standbys do not join one.

    Args:
        max_model_len: Tokens a sequence may reach. A sequence that has ended there computes its last position again.
    """

    returns_together = True

    def __init__(self, blocks: BlockManager, limits: BatchLimits, incarnation: str, max_model_len: int) -> None:
        super().__init__(blocks, limits, incarnation)
        self._max_model_len = max_model_len
        self._members: dict[str, _Member] = {}
        self._prompt_len = 0  # L(B)
        self._num_decoded = 0  # decoding steps that the batch has run

    def share_prefixes(self, block_hashes: BlockHashes) -> None:
        """Does nothing: a padded prompt is computed whole."""

    def stall(self, request_ids: frozenset[str]) -> None:
        """Pauses no sequence: a batch does not stop for a client, and its output is held back to its end anyway."""

    def take_copies(self) -> list[KVCopy]:
        """Returns none: a batch stays on the device until it ends."""
        return []

    def complete_copy(self, copy_id: int, *, failed: bool = False) -> None:
        """Raises IntegrityError, always: no copy is ever ordered."""
        raise IntegrityError(f"copy {copy_id} was not ordered")

    def next_batch(self) -> StepBatch | None:
        """Returns the next step of the batch; None if blocks are short, as ``short_blocks`` says."""
        if not self._members:
            self._begin()
        runs = self._take_blocks()
        for member in self._members.values():
            member.held.status = SequenceStatus.RUNNING if runs else SequenceStatus.PAUSED
        if not runs:
            return None
        return self._prefill_step() if self._prefills else self._decode_step()

    def _begin(self) -> None:
        """Starts a batch once all slots of the plan are here."""
        if self._num_absent:
            return
        size = min(self.limits.max_num_seqs, self.limits.max_batch_tokens)
        slots = [held for held in self._held.values() if not held.slot.standby][:size]
        self._members = {held.request_id: _Member(held, held.num_tokens) for held in slots}
        self._prompt_len = max((held.num_tokens for held in slots), default=0)
        self._num_decoded = 0

    @property
    def _prefills(self) -> bool:
        return any(member.prefilled < self._prompt_len for member in self._members.values())

    @property
    def _has_ended(self) -> bool:
        """Whether the outputs of all its sequences have ended."""
        return all(member.ended_as is not None for member in self._members.values())

    def _take_blocks(self) -> bool:
        """Allocates blocks for the next step's tokens: for all sequences or, if too few are free, for none."""
        self.short_blocks = 0
        if self._has_ended:
            return bool(self._members)  # the remaining steps yield no token
        if self._shortage() > 0:  # the longest sequence may have left: pad only as far as the others need
            self._prompt_len = max(member.known_len for member in self._members.values())
        self.short_blocks = self._shortage()
        if self.short_blocks == 0:
            self._grow(self._reach)
        return self.short_blocks == 0

    @property
    def _reach(self) -> int:
        """Padded length of each sequence with the token that the next step yields. O(batch)."""
        return self._prompt_len + (1 if self._prefills else self._num_decoded + 2)

    @property
    def _table_len(self) -> int:
        """Blocks that each sequence of the batch holds: all the same number."""
        return len(self.blocks.table(next(iter(self._members))))

    def _shortage(self) -> int:
        """Returns the number of blocks missing for the next step. O(batch)."""
        lacking = max(0, self.blocks.blocks_for(self._reach) - self._table_len)
        return max(0, len(self._members) * lacking - self.blocks.num_free)

    def _grow(self, num_tokens: int) -> None:
        """Gives each sequence blocks for ``num_tokens`` tokens; enough blocks are free."""
        if self.blocks.blocks_for(num_tokens) > self._table_len:
            for request_id in self._members:
                self.blocks.grow(request_id, num_tokens)

    def _prefill_step(self) -> StepBatch:
        items, pads = [], []
        tokens_left = self.limits.max_batch_tokens
        for request_id, member in self._members.items():
            start = member.prefilled
            num_tokens = max(0, min(self._prompt_len - start, tokens_left))
            tokens_left -= num_tokens
            table = self.blocks.table(request_id)
            known = max(0, min(num_tokens, member.known_len - start))
            if known:
                samples = start + known == member.known_len
                items.append(StepItem(request_id, start, known, samples, table))
            if num_tokens > known:
                pads.append(StepItem(request_id, start + known, num_tokens - known, False, table))
        return StepBatch(tuple(items), Padding(tuple(pads)))

    def _decode_step(self) -> StepBatch:
        items, invalid = [], []
        for request_id, member in self._members.items():
            table = self.blocks.table(request_id)
            position = member.known_len + self._num_decoded
            if member.ended_as is None:
                items.append(StepItem(request_id, position, 1, True, table))
            else:
                last = min(self._max_model_len, len(table) * self.blocks.block_size) - 1
                invalid.append(StepItem(request_id, min(position, last), 1, True, table))
        padded_len = self._prompt_len + self._num_decoded + 1
        attended = sum(item.start + 1 for item in items + invalid)
        context_tokens = len(self._members) * padded_len - attended
        return StepBatch(tuple(items), Padding(tuple(invalid), context_tokens))

    def horizon(self, batch: StepBatch, most: int) -> int:
        """Returns how many decoding steps may be committed at once from this one on, all of the same size and price.

        The number is at least 1. The longest output that goes on and the free blocks bound it. With it the simulator
        need not walk through a batch step by step. A batch that computes prompts is not repeated.

        Args:
            most: As in ``LeaseExecutor``.
        """
        if self._prefills:
            return 1
        longest = max((self._members[item.request_id].held.tokens_left for item in batch.items), default=1)
        most_blocks = self._table_len + self.blocks.num_free // len(self._members)
        reach = most_blocks * self.blocks.block_size
        return max(1, min(longest, 1 + reach - self._reach))

    def commit(
        self,
        batch: StepBatch,
        stopped: Iterable[str] = (),
        failed: Collection[str] = (),
        *,
        further: Mapping[str, int] = NO_FURTHER,
        duration_s: float = 0.0,
        num_steps: int = 1,
        stopped_after: Mapping[str, int] | None = None,
    ) -> list[FinishedSequence]:
        """Books as ``PlanExecutor.commit``; returns all sequences with the last one, but a failed one at once.

        Nothing is guessed in lockstep, so there are no ``further`` tokens.

        Args:
            num_steps: Number of steps, at most ``horizon`` and no more than until the last output stopped;
                ``stopped`` and ``duration_s`` cover all of them.
            stopped_after: After how many of the steps an output stopped, for outputs that stopped before the last step.
        """
        self._count(batch, duration_s, num_steps)
        ended, after = set(stopped), stopped_after or {}
        finished = []
        for item in batch.items:
            request_id = item.request_id
            member = self._members[request_id]
            held = member.held
            own_steps = min(after.get(request_id, num_steps), held.tokens_left)
            self._advance(held, item.num_tokens * own_steps)
            if request_id in failed:
                finished.append(self._finish(held, SequenceStatus.FINISHED_FAILED))
                continue
            held.num_tokens += item.samples * own_steps
            if request_id in ended or request_id in after:
                member.ended_as = SequenceStatus.FINISHED_STOPPED
            elif held.num_tokens >= held.max_total_len:
                member.ended_as = SequenceStatus.FINISHED_LENGTH
        if self._has_ended and not self._prefills:
            return finished + self.flush()
        if num_steps > 1:
            self._grow(self._reach - 1)
        return finished

    def _count(self, batch: StepBatch, duration_s: float, num_steps: int) -> None:
        """Books the padded positions and the time, which are the same for all members."""
        if self._prefills:
            for item in batch.items + batch.padding.items:
                self._members[item.request_id].prefilled += item.num_tokens
        else:
            self._num_decoded += num_steps
        # Padded to one length, the members hold equal memory and compute as much.
        members = {item.request_id for item in batch.items + batch.padding.items}
        for request_id in members:
            held = self._members[request_id].held
            held.ran_s += duration_s
            self.meter.charge(held, duration_s / len(members))

    def flush(self) -> list[FinishedSequence]:
        """Ends the sequences whose output is complete, as ``PlanExecutor.flush``; the other sequences run on."""
        members = list(self._members.values())
        return [self._finish(member.held, member.ended_as) for member in members if member.ended_as is not None]

    def _free(self, held: SequenceState) -> None:
        """Frees its place in the batch as well. The others run on, padded as before while memory lasts."""
        super()._free(held)
        member = self._members.get(held.request_id)
        if member is not None and member.held is held:
            del self._members[held.request_id]

    def _drop_kv(self, held: SequenceState) -> None:
        """Drops the sequence's KV, which the next batch computes again; does nothing if its output is complete."""
        member = self._members.get(held.request_id)
        if member is None or member.ended_as is None:
            super()._drop_kv(held)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless lengths, blocks and book-keeping agree."""
        super().check_integrity()
        for request_id, member in self._members.items():
            if self._held.get(request_id) is not member.held:
                raise IntegrityError(f"{request_id}: in the batch, and not held")
            if member.ended_as is not None:
                continue
            position = min(member.prefilled, member.known_len) + self._num_decoded
            if member.held.computed_len != position:
                raise IntegrityError(f"{request_id}: {member.held.computed_len} computed, the batch is at {position}")
        sizes = {len(self.blocks.table(request_id)) for request_id in self._members}
        if len(sizes) > 1:
            raise IntegrityError(f"block tables of {sizes} blocks in one padded batch")
        if any(self.blocks.table(request_id) for request_id in self._held.keys() - self._members.keys()):
            raise IntegrityError("a sequence outside the batch holds blocks")

"""What a worker may do by itself inside a plan (design section 3, rules 1-4).

The scheduler revises the plan while the worker computes, so no message is on the critical path of a step. Inside
a plan the executor picks each step's batch by rank and starts standby slots in the place of ended ones. It pauses
sequences that do not fit (so memory never runs out) and reports them, and falls back to plain FCFS when every grant
is used up. It knows lengths only, no token values, so that the simulator runs it unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from farsight.core.messages.kv import KVTraffic
from farsight.core.messages.plans import FinishedSequence, Plan
from farsight.core.request import Residency, SequenceStatus
from farsight.kvcache.batch_draft import (
    BatchDraft,
    StepAhead,
    decodes,
    runnable_tokens,
    seconds_until_cut_off,
    steps_granted,
)
from farsight.kvcache.block_manager import BlockHashes, BlockManager
from farsight.kvcache.checkpoints import StateCheckpoints
from farsight.kvcache.executor import NO_FURTHER, PlanExecutor, SequenceState
from farsight.kvcache.step_batch import BatchLimits, KVCopy, StepBatch, StepItem
from farsight.kvcache.tiers import KVTiers
from farsight.kvcache.transfers import Transfers


class LeaseExecutor(PlanExecutor):
    """Ragged execution: nothing is padded, sequences join and leave at every step."""

    returns_together = False

    def __init__(
        self, blocks: BlockManager, limits: BatchLimits, incarnation: str, host: BlockManager | None = None
    ) -> None:
        super().__init__(blocks, limits, incarnation, host)
        self._block_hashes: BlockHashes | None = None
        self._states: StateCheckpoints | None = None
        self.transfers = Transfers(blocks, host)
        self._running: list[SequenceState] = []  # of the step that runs or has run last
        self._busy: dict[str, StepBatch] = {}  # in a step that has begun, where another may begin beside it
        self._may_repeat = False  # whether the step begun last was free of waits that end by themselves
        self._chosen_in = -1  # ``revision`` when a step was chosen last
        self._ahead: StepAhead | None = None
        self._begun: tuple[StepBatch, int] | None = None  # by ``begin_after``, and ``revision`` then

    def share_prefixes(self, block_hashes: BlockHashes) -> None:
        self._block_hashes = block_hashes

    def keep_states(self, num_places: int, spacing: int) -> None:
        """Lets sequences begin behind kept states alone (``StateCheckpoints``); call it after ``share_prefixes``."""
        if self._block_hashes is not None:
            self._states = StateCheckpoints(num_places, self.blocks.block_size, spacing, self._block_hashes)

    def keep_tiers(self, tiers: KVTiers) -> None:
        """Saves what sequences compute and brings it back; call it after ``share_prefixes``, before any plan."""
        self.tiers = self.transfers.tiers = tiers

    def apply_plan(self, plan: Plan) -> list[str]:
        tiers, before = self.tiers, self._held
        if tiers is None or self._block_hashes is None:
            return super().apply_plan(plan)
        stays = {slot.request_id for slot in plan.slots}
        for held in [each for request_id, each in before.items() if request_id not in stays]:
            self._keep(held)  # what a client has broken off, he may go on with
        forgotten = super().apply_plan(plan)
        for held in [each for request_id, each in self._held.items() if before.get(request_id) is not each]:
            num_full = held.num_tokens // self.blocks.block_size
            tiers.wait(held.request_id, self._block_hashes(held.request_id, num_full)[:num_full])
        return forgotten

    def _finish(self, held: SequenceState, status: SequenceStatus) -> FinishedSequence:
        self._keep(held)
        return super()._finish(held, status)

    def _keep(self, held: SequenceState) -> None:
        """Keeps the registered blocks of a sequence, which ends: all of them are used now, and gaps are filled."""
        num_registered = held.register_at // self.blocks.block_size - 1
        if self.tiers is not None and self._block_hashes is not None and num_registered:
            self.transfers.keep(held, self._block_hashes(held.request_id, num_registered), 0, num_registered)

    def _free(self, held: SequenceState) -> None:
        """Frees the sequence's blocks; blocks of a copy in flight only when the copy is done."""
        if self.tiers is not None:
            self.tiers.leave(held.request_id)
        if self._states is not None:
            self._states.leave(held.request_id)
        if held.copy_id is None:
            super()._free(held)
        else:
            self.transfers.abandon(held)

    def _begin_offloads(self, host: BlockManager) -> None:
        for held in self._held.values():
            if held.residency is Residency.HOST and held.copy_id is None and not self._is_offloaded(held):
                self._offload(held, host)

    def _offload(self, held: SequenceState, host: BlockManager) -> None:
        """Queues the copy to the host; without KV to move or room there, refuses and lets the sequence run on."""
        table = self.blocks.table(held.request_id)
        room = host.grow(held.request_id, held.computed_len) if table and held.computed_len else None
        if room is None:
            held.residency = Residency.DEVICE
            traffic = self.transfers.traffic
            self.transfers.traffic = replace(traffic, refused_offloads=traffic.refused_offloads + 1)
        else:
            self.transfers.order(held, Residency.HOST, table[: len(room)], room)

    def _upload(self, held: SequenceState, draft: BatchDraft) -> None:
        """Queues the copy back to the device, under the same conditions as a start."""
        assert self.host is not None
        if self._has_room(self.blocks.blocks_for(held.num_tokens), draft):
            table = self.blocks.grow(held.request_id, held.num_tokens)
            assert table is not None, "there is room"
            source = self.host.table(held.request_id)
            self.transfers.order(held, Residency.DEVICE, source, table[: len(source)])

    def take_copies(self) -> list[KVCopy]:
        return self.transfers.take()

    def complete_copy(self, copy_id: int, *, failed: bool = False) -> None:
        before = self.transfers.num_brought
        held = self.transfers.complete(copy_id, failed=failed)
        self.prefix_hits += self.transfers.num_brought - before
        if held is not None:
            self._register(held)

    @property
    def _flying_blocks(self) -> int:
        return self.transfers.flying_blocks

    @property
    def _traffic(self) -> KVTraffic:
        return self.transfers.traffic

    def next_batch(self) -> StepBatch | None:
        ahead = None if self._ahead is None else self.begin_after(self._ahead.after)
        if ahead is not None:
            return ahead
        if self.host is not None:
            self._begin_offloads(self.host)
        self.transfers.order_saves()
        draft = self._select(self._held.values(), within_grants=True)
        self.out_of_grants = draft.out_of_grants
        if not draft.items and draft.out_of_grants and not self._busy:
            by_arrival = sorted(self._held.values(), key=lambda held: held.arrival)
            draft = self._select(by_arrival, within_grants=False)
        self.short_blocks = draft.short_blocks
        waits = draft.refused or draft.short_blocks or self.transfers.is_busy
        cut_off_s = seconds_until_cut_off(draft.chosen) if draft.within_grants else math.inf
        self._may_repeat = not waits and self.max_in_flight == 1 and cut_off_s == math.inf
        self._chosen_in = self.revision
        for held in self._running:
            if held.status is SequenceStatus.RUNNING:
                held.status = SequenceStatus.PAUSED
        self._running = draft.chosen
        for held in self._running:
            held.status = SequenceStatus.RUNNING
        return StepBatch(tuple(draft.items), cut_off_s=cut_off_s) if draft.items else None

    def _select(self, ranked: Iterable[SequenceState], *, within_grants: bool) -> BatchDraft:
        most = self.limits.max_batch_tokens
        prompts = self._prompt_tokens if self._prompt_tokens and self._has_streams() else most
        draft = BatchDraft(most, prompts, within_grants)
        credit = self._standby_credit()
        for held in ranked:
            if len(draft.items) >= self._places or draft.tokens_left == 0:
                break
            if held.request_id in self._stalled or held.copy_id is not None or held.residency is Residency.HOST:
                continue
            if held.request_id in self._busy:
                continue
            if held.slot.rests and within_grants:
                draft.rests = True
                continue
            wanted = runnable_tokens(held, within_grants=within_grants)
            if wanted == 0:
                draft.out_of_grants = True
            elif wanted > 1 and draft.prompts_left == 0:
                draft.refused = True
            elif self.blocks.holds_any(held.request_id):
                self._continue(held, wanted, draft)
            elif held.slot.standby and credit <= 0:
                continue
            elif self._start(held, wanted, draft):
                credit -= held.slot.standby
            else:
                draft.refused = True
        if draft.rests and all(map(decodes, draft.chosen)):  # all sequences that go first may have begun
            draft.out_of_grants = True
        return draft

    def step_after(self, batch: StepBatch, *, unread: bool = False) -> StepBatch | None:
        """Returns the step after one that only decodes: all its sequences go on, and no other joins them.

        An ``unread`` one may also follow the last chunks of prompts.
        """
        alone = unread and self._is_alone(batch)
        if not alone and (not self._may_repeat or (unread and self.revision != self._chosen_in)):
            return None
        items, turning = [], []
        size = self.blocks.block_size
        for item in batch.items:
            held = self._held[item.request_id]
            if not item.samples or item.drafts or (item.num_tokens > 1 and not unread):
                return None
            if steps_granted(held) < 2:
                if alone and held.tokens_left == 1:
                    continue
                return None
            start = item.start + item.num_tokens
            if self._states is not None and self._states.due(held, start, start + 1):
                return None
            items.append(StepItem(item.request_id, start, 1, True, item.blocks))
            if start % size == 0:
                turning.append((item.request_id, start + 1))
        if not items:
            return None
        self._ahead = StepAhead(batch, StepBatch(tuple(items)), self.revision, turning)
        return self._ahead.batch

    def _is_alone(self, batch: StepBatch) -> bool:
        """Returns whether a begun step has all sequences that are held, and all of them may go on."""
        if len(self._held) != len(batch.items) or self._stalled or self.transfers.is_busy:
            return False
        running = (self._held[item.request_id] for item in batch.items)
        return self.max_in_flight == 1 and all(
            held.residency is Residency.DEVICE and not (held.slot.rests or held.slot.cut_off_at_s) for held in running
        )

    def rest_of(self, batch: StepBatch) -> StepBatch | None:
        if self._begun is not None and self._begun[0] is batch and self._begun[1] == self.revision:
            return batch  # nothing has ended or lost its KV
        items = tuple(item for item in batch.items if self._is_due(item))
        return (batch if len(items) == len(batch.items) else StepBatch(items)) if items else None

    def _is_due(self, item: StepItem) -> bool:
        """Returns whether an item begins where its sequence stands."""
        held = self._held.get(item.request_id)
        return (
            held is not None and held.computed_len == item.start and self.blocks.table(item.request_id) is item.blocks
        )

    def begin_after(self, batch: StepBatch) -> StepBatch | None:
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead.after is not batch or ahead.revision != self.revision:
            return None
        fits = all(self.blocks.grow(request_id, length) is not None for request_id, length in ahead.turning)
        self._begun = (ahead.batch, self.revision) if fits else None
        return ahead.batch if fits else None

    def _continue(self, held: SequenceState, wanted: int, draft: BatchDraft) -> None:
        num_tokens = 1 if wanted == 1 else draft.share(wanted)
        reach = held.computed_len + num_tokens
        table = self.blocks.grow(held.request_id, reach)
        if table is not None:
            self._add(held, num_tokens, table, draft)
        else:
            draft.short_blocks += self.blocks.shortage(held.request_id, reach)
            draft.may_start = False

    def _start(self, held: SequenceState, wanted: int, draft: BatchDraft) -> bool:
        """Starts a sequence if all its known tokens fit at once, so that no half-prefilled prompts block each other."""
        if not draft.may_start:
            return False
        if self._is_offloaded(held):
            self._upload(held, draft)
            return held.copy_id is not None
        if not self.blocks.may_begin:
            draft.may_start, draft.short_blocks = False, draft.short_blocks + 1
            return False
        cached = self._cached_blocks(held, wanted, draft)
        if cached is None:
            return False  # the missing block is being computed: this start waits for it, and others may overtake it
        needed = self.blocks.blocks_for(held.num_tokens) - self.blocks.num_held(cached)
        if not self._has_room(needed, draft):
            return False
        self.blocks.share(held.request_id, cached)
        table = self.blocks.grow(held.request_id, held.num_tokens)
        assert table is not None, "there is room"
        self._begin_at(held, len(cached) * self.blocks.block_size)
        if self._bring_back(held, len(cached), wanted):
            return True  # it goes on when they are there; meanwhile others run
        restore = -1 if self._states is None else self._states.use(held, len(cached))
        self._add(held, draft.share(wanted - held.computed_len), table, draft, restore)
        return True

    def _bring_back(self, held: SequenceState, first: int, wanted: int) -> bool:
        """Asks for what the tiers have of its next blocks, as far as that is worth it; returns whether it is any."""
        tiers, limit = self.tiers, (wanted - 1) // self.blocks.block_size
        if tiers is None or self._block_hashes is None:
            return False
        tiers.leave(held.request_id)
        names = self._block_hashes(held.request_id, limit)
        if not held.num_preemptions:
            held.is_kept = tiers.pays(names[:limit], first)
        back = tiers.worth(names, first, limit, self.blocks.block_size, len(self._held))
        if back is not None:
            self.transfers.bring_back(held, names, first, back)
        return back is not None

    def _has_room(self, needed: int, draft: BatchDraft) -> bool:
        """Returns whether ``needed`` blocks are free for a start; if not, no sequence of lower rank overtakes it."""
        alone = self.blocks.num_free == self.blocks.num_blocks
        draft.may_start = needed + (0 if alone else self._reserve_blocks) <= self.blocks.num_free
        return draft.may_start

    def _cached_blocks(self, held: SequenceState, wanted: int, draft: BatchDraft) -> list[int] | None:
        """Returns the cached blocks that a start may take over; None if the next block is being computed or comes back.

        At least one of the ``wanted`` tokens is left to compute, so that a start always yields a token. The sequence
        that computes the missing block is in a step and makes progress, so the wait always ends.
        """
        limit = (wanted - 1) // self.blocks.block_size
        if self._block_hashes is None or limit == 0:
            return []
        hashes = self._block_hashes(held.request_id, limit)
        cached = self.blocks.match(hashes, limit)
        if len(cached) < limit:
            missing = hashes[len(cached)]
            if missing in self._arising(draft, self._block_hashes) or self.transfers.is_coming(missing):
                return None
        if self._states is None:
            return cached
        self._arising(draft, self._block_hashes)
        return self._states.usable(held, hashes, cached, limit, draft)

    def _arising(self, draft: BatchDraft, block_hashes: BlockHashes) -> set[int]:
        """Returns the hashes of the blocks of known tokens that begun steps, and this step so far, compute."""
        if not draft.num_seen:
            for item in self._items_under_way():
                self._note_arising(item, self._held[item.request_id], draft, block_hashes)
        for item, held in zip(draft.items[draft.num_seen :], draft.chosen[draft.num_seen :], strict=True):
            self._note_arising(item, held, draft, block_hashes)
        draft.num_seen = len(draft.items)
        return draft.arising

    def _note_arising(self, item: StepItem, held: SequenceState, draft: BatchDraft, block_hashes: BlockHashes) -> None:
        size = self.blocks.block_size
        first, known = item.start // size, held.num_tokens // size
        end = min(known, self.blocks.blocks_for(item.start + item.num_tokens))
        if first < end:
            draft.arising.update(block_hashes(item.request_id, end)[first:end])
        if self._states is not None:
            self._states.note_arising(item, held, draft)

    def _items_under_way(self) -> Iterable[StepItem]:
        """Yields the items of begun, uncommitted steps whose sequences are still in these steps."""
        for batch in {id(batch): batch for batch in self._busy.values()}.values():
            yield from (item for item in batch.items if self.counts(batch, item.request_id))

    def _begin_at(self, held: SequenceState, cached_len: int) -> None:
        """Books the start of a sequence; its first ``cached_len`` known tokens are cached, by any earlier sequence."""
        held.computed_len = cached_len
        held.register_at = cached_len + self.blocks.block_size
        if held.cached_len is None and self._block_hashes is not None:
            held.cached_len = min(cached_len, held.prompt_len)
            self.prefix_queries += held.prompt_len
            self.prefix_hits += held.cached_len

    def _add(
        self, held: SequenceState, num_tokens: int, table: list[int], draft: BatchDraft, restore: int = -1
    ) -> None:
        samples = held.computed_len + num_tokens == held.num_tokens
        item = StepItem(held.request_id, held.computed_len, num_tokens, samples, table)
        if self._states is not None:
            item = item._replace(restore=restore, keeps=self._states.begin(held, num_tokens))
        draft.items.append(item)
        draft.chosen.append(held)
        draft.tokens_left -= num_tokens
        if not decodes(held):
            draft.prompts_left -= min(num_tokens, draft.prompts_left)

    def cut_off(self, batch: StepBatch, duration_s: float) -> None:
        super().cut_off(batch, duration_s)
        if self._states is not None:
            for item in batch.items:
                self._states.give_back(item.request_id)

    def _has_streams(self) -> bool:
        """Returns whether a sequence of the latest step decodes, so that its client waits for the next token."""
        return any(decodes(held) for held in self._running)

    def _is_offloaded(self, held: SequenceState) -> bool:
        return self.host is not None and held.copy_id is None and bool(self.host.table(held.request_id))

    def _standby_credit(self) -> int:
        """Counts the standby slots that may still start: places left by ended slots, less standbys that run."""
        standbys = [held.request_id for held in self._held.values() if held.slot.standby]
        return self._vacated - sum(map(self.blocks.holds_any, standbys))

    def draft_room(self, item: StepItem) -> int:
        if not item.samples:
            return 0
        slots = len(item.blocks) * self.blocks.block_size - item.start - item.num_known
        return max(0, min(slots, steps_granted(self._held[item.request_id]) - 1))

    def horizon(self, batch: StepBatch, most: int) -> int:
        """Returns how often in a row the batch would be chosen if no plan came and only length limits ended sequences.

        The number is at least 1. With it the simulator walks through equal steps at once (``commit``). A batch that
        computes prompts is not repeated, nor a batch beside which sequences wait that look for cached prefixes.

        Args:
            most: The caller treats all answers from this number on alike.
        """
        if any(not item.samples or item.num_tokens > 1 for item in batch.items) or self.transfers.is_busy:
            return 1
        if self._block_hashes is not None and len(self._held) > len(batch.items):
            return 1
        running = [self._held[item.request_id] for item in batch.items]
        steps = max(1, min(map(steps_granted, running)))
        if self._states is not None:
            steps = min(steps, *(self._states.steps_until_due(held) for held in running))
        while steps // 2 >= most:
            steps //= 2
        while steps > 1 and not self._has_blocks_for(running, steps):
            steps //= 2
        return steps

    def _has_blocks_for(self, running: list[SequenceState], num_steps: int) -> bool:
        """Returns whether enough blocks are free for ``num_steps`` decoding steps of these sequences."""
        blocks, most = self.blocks, len(running) * self.blocks.blocks_for(num_steps)
        lacking = (blocks.shortage(held.request_id, held.computed_len + num_steps) for held in running)
        return most <= blocks.num_free or sum(lacking) <= blocks.num_free

    def commit(
        self,
        batch: StepBatch,
        stopped: Iterable[str] = (),
        failed: Collection[str] = (),
        *,
        further: Mapping[str, int] = NO_FURTHER,
        duration_s: float = 0.0,
        num_steps: int = 1,
    ) -> list[FinishedSequence]:
        """Books as ``PlanExecutor.commit``. The KV of wrong guesses counts as not computed: later steps overwrite it.

        Args:
            num_steps: Number of equal steps, at most ``horizon``; ``stopped`` and ``duration_s`` cover all of them.
        """
        ended = set(stopped)
        finished = []
        shares = self.meter.shares(batch, num_steps)
        if self.tiers is not None:
            self.tiers.prices.computed(sum(item.num_tokens for item in batch.items if item.num_tokens > 1), duration_s)
        size = self.blocks.block_size
        for item, share in zip(batch.items, shares, strict=True):
            held = self._held[item.request_id]
            more = further.get(item.request_id, 0) if further else 0
            self._advance(held, (item.num_known if item.drafts else item.num_tokens) * num_steps + more)
            held.ran_s += duration_s
            self.meter.charge(held, share * duration_s)
            if item.request_id in failed:
                finished.append(self._finish(held, SequenceStatus.FINISHED_FAILED))
                continue
            if num_steps > 1 and held.computed_len > len(item.blocks) * size:
                self.blocks.grow(item.request_id, held.computed_len)
            if held.computed_len >= held.register_at:
                self._register(held)
            if item.keeps and self._states is not None:
                self._states.keep(item, held)
            if not item.samples:
                continue
            held.num_tokens += num_steps + more
            if item.request_id in ended:
                finished.append(self._finish(held, SequenceStatus.FINISHED_STOPPED))
            elif held.num_tokens >= held.max_total_len:
                finished.append(self._finish(held, SequenceStatus.FINISHED_LENGTH))
        return finished

    def _register(self, held: SequenceState) -> None:
        """Registers the blocks that have become full, for other sequences and for a restart after preemption."""
        size = self.blocks.block_size
        first, end = held.register_at // size - 1, held.computed_len // size
        held.register_at = (end + 1) * size
        if self._block_hashes is not None and end > first:
            hashes = self._block_hashes(held.request_id, end)
            self.blocks.register(held.request_id, first, hashes, end)
            self.transfers.keep(held, hashes, first, end)  # when it has ended, they may be evicted at once

    def flush(self) -> list[FinishedSequence]:
        """Returns no sequence: a complete one has ended already."""
        return []

    def check_integrity(self) -> None:
        """Raises IntegrityError unless lengths, blocks, copies and book-keeping agree."""
        super().check_integrity()
        self.transfers.check_integrity(self._held)
        if self._states is not None:
            self._states.check_integrity()

    def _orphaned_blocks(self) -> set[int]:
        return self.transfers.orphaned_blocks()

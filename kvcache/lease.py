"""What a worker may do by itself inside a plan (design section 3, rules 1-4).

The scheduler revises the plan while the worker computes, so no message is on the critical path of a step. Inside
a plan the executor picks each step's batch by rank, starts standby slots in the place of ended ones, pauses what
does not fit (never an out-of-memory) and says so, and falls back to plain FCFS when every grant is used up. It
knows lengths only, no token values, so that the simulator runs it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from core.errors import IntegrityError
from core.messages import FinishedSequence, Plan, Slot, SlotProgress, StepReport, StepSample
from core.request import Residency, SequenceStatus
from kvcache.block_manager import BlockManager
from kvcache.prefix import BlockHashes


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one step: sequences, and tokens computed over all of them."""

    max_num_seqs: int
    max_batch_tokens: int


class StepItem(NamedTuple):
    """One sequence's part in a step: compute ``num_tokens`` known tokens from position ``start``.

    Attributes:
        samples: Whether the last of them is the last known token, so that the step yields a new one.
        blocks: The block table, covering positions 0 .. start + num_tokens - 1.
    """

    request_id: str
    start: int
    num_tokens: int
    samples: bool
    blocks: list[int]


@dataclass(frozen=True, slots=True)
class StepBatch:
    items: tuple[StepItem, ...]

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.items)


class KVCopy(NamedTuple):
    """An order to copy blocks from one pool to the other, beside the steps.

    Attributes:
        to: The pool to copy to.
        source: Blocks of the other pool.
        target: As many blocks of this one.
    """

    copy_id: int
    to: Residency
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(slots=True)
class _Held:
    """A sequence the worker has; ``num_tokens`` counts prompt and output known so far.

    Attributes:
        cached_len: Prompt tokens taken from the cache at its first start; None before.
        residency: Where its KV is to be; the wish in force.
        copy_id: Of the copy in flight, if there is one; meanwhile it holds blocks in both pools and does not run.
        register_at: ``computed_len`` from which another block of it is full and not registered.
        ran_s: Seconds of the steps that it took part in.
    """

    request_id: str
    attempt: int
    prompt_len: int
    max_total_len: int
    arrival: int
    num_tokens: int
    slot: Slot
    computed_len: int = 0
    cached_len: int | None = None
    register_at: int = 0
    num_preemptions: int = 0
    residency: Residency = Residency.DEVICE
    num_moves: int = 0
    copy_id: int | None = None
    ran_s: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING

    @property
    def output_len(self) -> int:
        return self.num_tokens - self.prompt_len


@dataclass(slots=True)
class _Selection:
    """A batch in the making.

    Attributes:
        arising: Hashes of the full blocks that the first ``num_seen`` items compute.
    """

    tokens_left: int
    items: list[StepItem] = field(default_factory=list)
    chosen: list[_Held] = field(default_factory=list)
    may_start: bool = True
    arising: set[int] = field(default_factory=set)
    num_seen: int = 0
    short_blocks: int = 0
    out_of_grants: bool = False


class LeaseExecutor:
    """Executes plans over a block pool; one per worker life.

    Shell protocol, all between steps: ``apply_plan`` when one came, then ``next_batch``; begin what ``take_copies``
    gives; run the step; ``commit``. ``complete_copy`` when one is done. ``report`` and ``acknowledge`` at any time.
    """

    def __init__(
        self, blocks: BlockManager, limits: BatchLimits, incarnation: str, host: BlockManager | None = None
    ) -> None:
        self.blocks = blocks
        self.host = host
        self.limits = limits
        self.incarnation = incarnation
        self.short_blocks = 0
        self.prefix_queries = 0  # prompt tokens looked for in the cache so far, each request's once
        self.prefix_hits = 0  # and found
        self._block_hashes: BlockHashes | None = None
        self._copies: list[KVCopy] = []  # to begin
        self._in_flight: dict[int, tuple[Residency, _Held | None]] = {}  # None: nobody wants the result any more
        self._num_copies = 0
        self._held: dict[str, _Held] = {}  # in plan order
        self._running: list[_Held] = []  # of the step that runs or has run last
        self._stalled: frozenset[str] = frozenset()
        self._lease = 0
        self._plan_seq = 0
        self._reserve_blocks = 0
        self._vacated = 0  # slots of this plan, standbys aside, that have ended: places a standby may take
        self._report_seq = 0
        self._arrivals = 0
        # Finished sequences: until acknowledged they are repeated in reports; until a plan is made with that
        # knowledge they are remembered, so that an older view of the world cannot start them again.
        self._unacknowledged: dict[tuple[str, int], tuple[FinishedSequence, int]] = {}
        self._tombstones: dict[tuple[str, int], int] = {}

    def share_prefixes(self, block_hashes: BlockHashes) -> None:
        """From now on sequences share the KV of what they have in common; before the first plan.

        Args:
            block_hashes: Of sequences held here; asked when one starts, and when one has filled a block.
        """
        self._block_hashes = block_hashes

    @property
    def lease(self) -> int:
        return self._lease

    @property
    def plan_seq(self) -> int:
        return self._plan_seq

    @property
    def num_held(self) -> int:
        return len(self._held)

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    def cached_len(self, request_id: str) -> int:
        """Prompt tokens that the sequence found in the prefix cache when it first started."""
        return self._held[request_id].cached_len or 0

    def take_over(self) -> int:
        """A Scheduler life begins: the lease that its plans must bear. What is held stays and goes on."""
        self._lease += 1
        self._plan_seq = 0
        return self._lease

    def stall(self, request_ids: frozenset[str]) -> None:
        """These rest, whatever the plan grants them: their clients do not read."""
        self._stalled = request_ids

    def apply_plan(self, plan: Plan) -> list[str]:
        """Takes over a newer plan; returns the ids of sequences to forget (aborted, or fenced by a new attempt)."""
        if plan.worker_incarnation != self.incarnation or plan.lease != self._lease:
            return []
        if plan.plan_seq <= self._plan_seq:
            return []
        self._plan_seq = plan.plan_seq
        self._reserve_blocks = plan.reserve_blocks
        self._bury(plan.as_of_report_seq)
        self._vacated = sum(
            not slot.standby and (slot.request_id, slot.attempt) in self._tombstones for slot in plan.slots
        )
        before, self._held = self._held, {}
        for slot in plan.slots:
            held = self._take(slot, before.get(slot.request_id))
            if held is not None:
                self._held[slot.request_id] = held
        forgotten = [rid for rid, held in before.items() if self._held.get(rid) is not held]
        for request_id in forgotten:
            self._free(before[request_id])
        return forgotten

    def _take(self, slot: Slot, held: _Held | None) -> _Held | None:
        """The sequence of this slot after the plan, or None if there is nothing to run."""
        if (slot.request_id, slot.attempt) in self._tombstones:
            return None
        if held is None or held.attempt < slot.attempt:
            return self._new(slot)
        if held.attempt > slot.attempt:
            return held
        held.slot = slot
        if slot.num_preemptions > held.num_preemptions:
            held.num_preemptions = slot.num_preemptions
            self._drop_kv(held)
        if slot.num_moves > held.num_moves:
            held.num_moves = slot.num_moves
            held.residency = Residency.DEVICE if self.host is None else slot.residency
        return held

    def _drop_kv(self, held: _Held) -> None:
        """What it had computed may stay cached: it may find it again."""
        self._free(held)
        held.computed_len = 0
        held.status = SequenceStatus.WAITING

    def _new(self, slot: Slot) -> _Held | None:
        request = slot.request
        if request is None:
            return None  # a plan meant for a worker that has the payload: the report shows that we do not
        self._arrivals += 1
        return _Held(
            request_id=slot.request_id,
            attempt=slot.attempt,
            prompt_len=request.prompt_len,
            max_total_len=request.max_total_len,
            arrival=self._arrivals,
            num_tokens=request.known_len,
            register_at=self.blocks.block_size,
            slot=slot,
            num_preemptions=slot.num_preemptions,
            num_moves=slot.num_moves,  # there is nothing yet to be moved
        )

    def _free(self, held: _Held) -> None:
        """Gives up its blocks; those of a copy in flight only when it is done."""
        if held.copy_id is None:
            self.blocks.release(held.request_id)
            if self.host is not None:
                self.host.release(held.request_id)
            return
        to, _ = self._in_flight[held.copy_id]
        self._in_flight[held.copy_id] = to, None
        for pool in self._pools:
            pool.hand_over(held.request_id, _orphan(held.copy_id))
        held.copy_id = None

    @property
    def _pools(self) -> tuple[BlockManager, ...]:
        return (self.blocks,) if self.host is None else (self.blocks, self.host)

    def _begin_offloads(self, host: BlockManager) -> None:
        for held in self._held.values():
            if held.residency is Residency.HOST and held.copy_id is None and not self._is_offloaded(held):
                self._offload(held, host)

    def _offload(self, held: _Held, host: BlockManager) -> None:
        """Orders the copy to the host; refuses, and the sequence runs on, if there is nothing to move or no room."""
        table = self.blocks.table(held.request_id)
        room = host.grow(held.request_id, held.computed_len) if table and held.computed_len else None
        if room is None:
            held.residency = Residency.DEVICE
        else:
            self._order_copy(held, Residency.HOST, table[: len(room)], room)

    def _upload(self, held: _Held, selection: _Selection) -> None:
        """Orders the copy back under the same conditions as a start."""
        assert self.host is not None
        if self._has_room(self.blocks.blocks_for(held.num_tokens), selection):
            table = self.blocks.grow(held.request_id, held.num_tokens)
            assert table is not None, "there is room"
            source = self.host.table(held.request_id)
            self._order_copy(held, Residency.DEVICE, source, table[: len(source)])

    def _order_copy(self, held: _Held, to: Residency, source: list[int], target: list[int]) -> None:
        self._num_copies += 1
        held.copy_id = self._num_copies
        self._copies.append(KVCopy(self._num_copies, to, tuple(source), tuple(target)))
        self._in_flight[self._num_copies] = to, held

    def take_copies(self) -> list[KVCopy]:
        """The copies to begin now; each is answered by ``complete_copy``, in any order."""
        copies, self._copies = self._copies, []
        return copies

    def complete_copy(self, copy_id: int, *, failed: bool = False) -> None:
        """A copy is over; between steps. What a failed one has not brought is computed again."""
        to, held = self._in_flight.pop(copy_id)
        owner = _orphan(copy_id) if held is None else held.request_id
        for pool in self._pools:
            if held is None or failed or pool is (self.blocks if to is Residency.HOST else self.host):
                pool.release(owner)
        if held is None:
            return
        held.copy_id = None
        if failed:
            held.computed_len, held.status, held.residency = 0, SequenceStatus.WAITING, Residency.DEVICE
        elif to is Residency.HOST:
            held.status = SequenceStatus.OFFLOADED
        else:
            held.status, held.register_at = SequenceStatus.PAUSED, self.blocks.block_size
            self._register(held)

    def next_batch(self) -> StepBatch | None:
        """The next step, its blocks allocated; None if nothing can run."""
        if self.host is not None:
            self._begin_offloads(self.host)
        selection = self._select(self._held.values(), within_grants=True)
        if not selection.items and selection.out_of_grants:
            by_arrival = sorted(self._held.values(), key=lambda held: held.arrival)
            selection = self._select(by_arrival, within_grants=False)
        self.short_blocks = selection.short_blocks
        for held in self._running:
            if held.status is SequenceStatus.RUNNING:
                held.status = SequenceStatus.PAUSED
        self._running = selection.chosen
        for held in self._running:
            held.status = SequenceStatus.RUNNING
        return StepBatch(tuple(selection.items)) if selection.items else None

    def _select(self, ranked: Iterable[_Held], *, within_grants: bool) -> _Selection:
        selection = _Selection(tokens_left=self.limits.max_batch_tokens)
        credit = self._standby_credit()
        for held in ranked:
            if len(selection.items) >= self.limits.max_num_seqs or selection.tokens_left == 0:
                break
            if held.request_id in self._stalled or held.copy_id is not None or held.residency is Residency.HOST:
                continue
            wanted = self._runnable_tokens(held, within_grants)
            if wanted == 0:
                selection.out_of_grants = True
            elif self._is_resident(held):
                self._continue(held, wanted, selection)
            elif held.slot.standby and credit <= 0:
                continue
            elif self._start(held, wanted, selection):
                credit -= held.slot.standby
        return selection

    def _continue(self, held: _Held, wanted: int, selection: _Selection) -> None:
        num_tokens = min(wanted, selection.tokens_left)
        reach = held.computed_len + num_tokens
        table = self.blocks.grow(held.request_id, reach)
        if table is not None:
            self._add(held, num_tokens, table, selection)
        else:
            selection.short_blocks += self.blocks.shortage(held.request_id, reach)
            selection.may_start = False

    def _start(self, held: _Held, wanted: int, selection: _Selection) -> bool:
        """Starts a sequence if all its known tokens fit at once, so that no half-prefilled prompts block each other."""
        if not selection.may_start:
            return False
        if self._is_offloaded(held):
            self._upload(held, selection)
            return held.copy_id is not None
        cached = self._cached_blocks(held, wanted, selection)
        if cached is None:
            return False  # nothing is computed twice; others may overtake it meanwhile
        needed = self.blocks.blocks_for(held.num_tokens) - self.blocks.num_held(cached)
        if not self._has_room(needed, selection):
            return False
        self.blocks.share(held.request_id, cached)
        table = self.blocks.grow(held.request_id, held.num_tokens)
        assert table is not None, "there is room"
        self._begin_at(held, len(cached) * self.blocks.block_size)
        self._add(held, min(wanted - held.computed_len, selection.tokens_left), table, selection)
        return True

    def _has_room(self, needed: int, selection: _Selection) -> bool:
        """Whether a start finds so many blocks; if not, nothing of lower rank overtakes it."""
        alone = self.blocks.num_free == self.blocks.num_blocks
        selection.may_start = needed + (0 if alone else self._reserve_blocks) <= self.blocks.num_free
        return selection.may_start

    def _cached_blocks(self, held: _Held, wanted: int, selection: _Selection) -> list[int] | None:
        """Cached blocks that a start may take over; None if the next one is being computed in this very step.

        At least one of the ``wanted`` tokens is left to compute, so that a start always yields something. Whoever
        computes the missing block is in the batch and makes headway, so nobody waits for what never comes.
        """
        limit = (wanted - 1) // self.blocks.block_size
        if self._block_hashes is None or limit == 0:
            return []
        hashes = self._block_hashes(held.request_id, limit)
        cached = self.blocks.match(hashes, limit)
        if len(cached) < limit and hashes[len(cached)] in self._arising(selection, self._block_hashes):
            return None
        return cached

    def _arising(self, selection: _Selection, block_hashes: BlockHashes) -> set[int]:
        """Hashes of the blocks that the step chosen so far works on, as far as all their tokens are known."""
        size = self.blocks.block_size
        for item, held in zip(
            selection.items[selection.num_seen :], selection.chosen[selection.num_seen :], strict=True
        ):
            first, known = item.start // size, held.num_tokens // size
            end = min(known, self.blocks.blocks_for(item.start + item.num_tokens))
            if first < end:
                selection.arising.update(block_hashes(item.request_id, end)[first:end])
        selection.num_seen = len(selection.items)
        return selection.arising

    def _begin_at(self, held: _Held, cached_len: int) -> None:
        """A sequence starts, its first ``cached_len`` known tokens computed by others or by itself in another life."""
        held.computed_len = cached_len
        held.register_at = cached_len + self.blocks.block_size
        if held.cached_len is None and self._block_hashes is not None:
            held.cached_len = min(cached_len, held.prompt_len)
            self.prefix_queries += held.prompt_len
            self.prefix_hits += held.cached_len

    def _add(self, held: _Held, num_tokens: int, table: list[int], selection: _Selection) -> None:
        samples = held.computed_len + num_tokens == held.num_tokens
        selection.items.append(StepItem(held.request_id, held.computed_len, num_tokens, samples, table))
        selection.chosen.append(held)
        selection.tokens_left -= num_tokens

    def _runnable_tokens(self, held: _Held, within_grants: bool) -> int:
        """Known tokens that may be computed now; computing the last known one also yields a new token."""
        if not within_grants:
            return held.num_tokens - held.computed_len
        reach = min(held.num_tokens, held.slot.prefill_to)
        if reach == held.num_tokens and held.num_tokens >= held.slot.length_to:
            reach -= 1
        return max(0, reach - held.computed_len)

    def _is_resident(self, held: _Held) -> bool:
        return bool(self.blocks.table(held.request_id))

    def _is_offloaded(self, held: _Held) -> bool:
        return self.host is not None and held.copy_id is None and bool(self.host.table(held.request_id))

    def _standby_credit(self) -> int:
        """Standby slots that may still start: places left by ended slots, less standbys that hold one now."""
        return self._vacated - sum(held.slot.standby and self._is_resident(held) for held in self._held.values())

    def horizon(self, batch: StepBatch) -> int:
        """How many times the batch would be chosen again and again if no plan came and nothing but lengths ended one.

        At least 1. The simulator asks, so as not to walk through steps that are all alike; ``commit`` takes them at
        once. A batch that computes prompts is not repeated, nor one beside which others look for cached prefixes.
        """
        if any(not item.samples or item.num_tokens > 1 for item in batch.items) or self._copies or self._in_flight:
            return 1
        running = [self._held[item.request_id] for item in batch.items]
        if self._block_hashes is not None and len(self._held) > len(running):
            return 1
        steps = max(1, min(_steps_granted(held) for held in running))
        while steps > 1 and self._blocks_for_steps(running, steps) > self.blocks.num_free:
            steps //= 2
        return steps

    def _blocks_for_steps(self, running: list[_Held], num_steps: int) -> int:
        """Blocks that they lack for so many decoding steps."""
        return sum(self.blocks.shortage(held.request_id, held.computed_len + num_steps) for held in running)

    def commit(
        self, batch: StepBatch, stopped: Iterable[str] = (), *, duration_s: float = 0.0, num_steps: int = 1
    ) -> list[FinishedSequence]:
        """Books a step that ran; returns the sequences it ended, their blocks already free.

        Args:
            stopped: Ids whose new token ended them (EOS, stop string or id). Length limits are found here.
            duration_s: How long it took.
            num_steps: So many of the same, at most ``horizon``; ``stopped`` and ``duration_s`` are of all of them.
        """
        ended = set(stopped)
        finished = []
        for item in batch.items:
            held = self._held[item.request_id]
            held.computed_len += item.num_tokens * num_steps
            held.ran_s += duration_s
            if num_steps > 1:
                self.blocks.grow(item.request_id, held.computed_len)
            if held.computed_len >= held.register_at:
                self._register(held)
            if not item.samples:
                continue
            held.num_tokens += num_steps
            if item.request_id in ended:
                finished.append(self._finish(held, SequenceStatus.FINISHED_STOPPED))
            elif held.num_tokens >= held.max_total_len:
                finished.append(self._finish(held, SequenceStatus.FINISHED_LENGTH))
        return finished

    def _register(self, held: _Held) -> None:
        """Names the blocks that have become full, for others and for itself after a preemption."""
        size = self.blocks.block_size
        first, end = held.register_at // size - 1, held.computed_len // size
        held.register_at = (end + 1) * size
        if self._block_hashes is not None and end > first:
            self.blocks.register(held.request_id, first, self._block_hashes(held.request_id, end), end)

    def end(self, request_id: str, status: SequenceStatus) -> FinishedSequence:
        """Ends a sequence for a reason outside its own text: it failed, or nobody waits for it any more."""
        return self._finish(self._held[request_id], status)

    def _finish(self, held: _Held, status: SequenceStatus) -> FinishedSequence:
        del self._held[held.request_id]
        self._free(held)
        self._vacated += not held.slot.standby
        finished = FinishedSequence(held.request_id, held.attempt, status, held.output_len)
        key = (held.request_id, held.attempt)
        first_report = self._report_seq + 1
        self._unacknowledged[key] = (finished, first_report)
        self._tombstones[key] = first_report
        return finished

    def report(self, steps: tuple[StepSample, ...] = ()) -> StepReport:
        """A snapshot under a new sequence number; ``steps`` are passed on as they are."""
        self._report_seq += 1
        return StepReport(
            worker_incarnation=self.incarnation,
            lease=self._lease,
            report_seq=self._report_seq,
            plan_seq=self._plan_seq,
            free_blocks=self.blocks.num_free,
            short_blocks=self.short_blocks,
            progress=tuple(self._progress()),
            finished=tuple(finished for finished, _ in self._unacknowledged.values()),
            steps=steps,
            shared_blocks=self.blocks.num_shared,
        )

    def _progress(self) -> Iterator[SlotProgress]:
        for held in self._held.values():
            yield SlotProgress(
                request_id=held.request_id,
                attempt=held.attempt,
                status=held.status,
                num_preemptions=held.num_preemptions,
                computed_len=held.computed_len,
                output_len=held.output_len,
                num_blocks=len(self.blocks.table(held.request_id)),
                stalled=held.request_id in self._stalled,
                cached_len=held.cached_len or 0,
                residency=held.residency,
                num_moves=held.num_moves,
                num_host_blocks=0 if self.host is None else len(self.host.table(held.request_id)),
                ran_s=held.ran_s,
            )

    def acknowledge(self, report_seq: int) -> None:
        """The scheduler has every report up to ``report_seq``."""
        acknowledged = [key for key, (_, seq) in self._unacknowledged.items() if seq <= report_seq]
        for key in acknowledged:
            del self._unacknowledged[key]

    def _bury(self, report_seq: int) -> None:
        """Forgets finished sequences that no later plan can name."""
        known = [key for key, seq in self._tombstones.items() if seq <= report_seq]
        for key in known:
            del self._tombstones[key]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless lengths, blocks and book-keeping agree."""
        self.blocks.check_integrity()
        self._check_copies()
        held_blocks = {block for copy_id in self._in_flight for block in self.blocks.table(_orphan(copy_id))}
        for request_id, held in self._held.items():
            num_blocks = max(len(pool.table(request_id)) for pool in self._pools)
            held_blocks.update(self.blocks.table(request_id))
            if held.computed_len > held.num_tokens or held.num_tokens > held.max_total_len:
                raise IntegrityError(
                    f"{request_id}: lengths {held.computed_len} <= {held.num_tokens} <= {held.max_total_len}"
                )
            if self.blocks.blocks_for(held.computed_len) > num_blocks:
                raise IntegrityError(f"{request_id}: {held.computed_len} tokens computed in {num_blocks} blocks")
            if (request_id, held.attempt) in self._tombstones:
                raise IntegrityError(f"{request_id}: finished and alive")
        if len(held_blocks) + self.blocks.num_free != self.blocks.num_blocks:
            raise IntegrityError(f"{len(held_blocks)} blocks held by known sequences, {self.blocks.num_free} free")

    def _check_copies(self) -> None:
        flying = {held.copy_id for held in self._held.values() if held.copy_id is not None}
        wanted = {copy_id for copy_id, (_, held) in self._in_flight.items() if held is not None}
        if flying != wanted:
            raise IntegrityError(f"copies {flying} are waited for, {wanted} are in flight")
        if self.host is None:
            return
        self.host.check_integrity()
        owners = {*self._held, *map(_orphan, self._in_flight)}
        used = sum(len(self.host.table(owner)) for owner in owners)
        if used + self.host.num_free != self.host.num_blocks:
            raise IntegrityError(f"{used} host blocks held by known sequences, {self.host.num_free} free")


def _steps_granted(held: _Held) -> int:
    """Decoding steps until the sequence or its grant is at the end."""
    reach = min(held.max_total_len, held.slot.length_to, held.slot.prefill_to + 1)
    return reach - held.num_tokens


def _orphan(copy_id: int) -> str:
    """Who holds the blocks of a copy in flight whose sequence has gone; no request id contains a NUL."""
    return f"\0copy {copy_id}"

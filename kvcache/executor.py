"""The part of the lease protocol that every executor follows (design section 3, rules 1-4).

The rules say which plans count, which sequences a worker holds and under which attempt, what it reports, and what it
must not start again. They do not depend on how steps are composed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from farsight.core.errors import IntegrityError
from farsight.core.messages.kv import NO_TRAFFIC, Brought, KVTraffic
from farsight.core.messages.plans import FinishedSequence, Plan, Slot, SlotProgress, StepReport, TenantService
from farsight.core.messages.step_times import StepSample
from farsight.core.request import Request, Residency, SequenceStatus
from farsight.kvcache.block_manager import BlockHashes, BlockManager
from farsight.kvcache.cache_journal import CacheJournal
from farsight.kvcache.step_batch import BatchLimits, KVCopy, ServiceMeter, StepBatch, StepItem
from farsight.kvcache.tiers import KVTiers

NO_FURTHER: Mapping[str, int] = {}
"""No item of a step has yielded more than one token."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """A worker's one record of a request that it holds.

    The executor looks at lengths alone. An engine also keeps tokens and text: it has a class of its own
    (``engine.sequence``), which it sets as ``PlanExecutor.make_sequence``.

    Attributes:
        num_tokens: Prompt and output known so far.
        slot: As the plan in force has it.
        arrival: Its place among the sequences that came to this worker.
        cached_len: Prompt tokens taken from the cache at its first start; None before.
        residency: Where its KV belongs by the order in force.
        copy_id: Id of the copy in flight, if there is one; meanwhile the sequence holds blocks in both pools and is
            paused.
        register_at: ``computed_len`` from which another of its blocks is full and not registered.
        ran_s: Seconds of the steps that it took part in.
        gpu_s: Its share of these seconds (``core.costs.row_shares``).
        tenant: As in ``Request``.
        dropped_len: Tokens whose KV was computed and has been dropped.
        cut_off_at_s: ``Slot.cut_off_at_s`` under which its last step was cut off; 0 if none was.
        shares: Whether its blocks may serve other sequences.
        keep_at: Positions behind which its state is to be kept, ascending; the last is the end of its prompt.
        is_kept: Whether its blocks are saved to the tiers.
        brought: What came back from the tiers; None if nothing did.
    """

    request_id: str
    attempt: int
    prompt_len: int
    max_total_len: int
    num_tokens: int
    slot: Slot = field(init=False, repr=False)
    arrival: int = 0
    computed_len: int = 0
    cached_len: int | None = None
    register_at: int = 0
    num_preemptions: int = 0
    residency: Residency = Residency.DEVICE
    num_moves: int = 0
    copy_id: int | None = None
    ran_s: float = 0.0
    gpu_s: float = 0.0
    tenant: str = ""
    dropped_len: int = 0
    cut_off_at_s: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING
    shares: bool = True
    keep_at: tuple[int, ...] = ()
    is_kept: bool = True
    brought: Brought | None = None

    @property
    def output_len(self) -> int:
        return self.num_tokens - self.prompt_len

    @property
    def tokens_left(self) -> int:
        """Output tokens until its limit of length."""
        return self.max_total_len - self.num_tokens


def new_sequence(request: Request) -> SequenceState:
    """Makes the record of a request at the beginning of its attempt."""
    return SequenceState(
        request.request_id,
        request.attempt,
        request.prompt_len,
        request.max_total_len,
        request.known_len,
        tenant=request.tenant,
        shares=not request.sampling.computes_prompt,
    )


class PlanExecutor(ABC):
    """Executes plans over a block pool; one per worker life. It knows lengths only, no token values.

    Shell protocol, all between steps: ``apply_plan`` when a plan came, then ``next_batch``; begin the copies that
    ``take_copies`` gives; run the step; ``commit``. ``complete_copy`` when a copy is done. ``report`` and
    ``acknowledge`` at any time.

    Attributes:
        returns_together: Whether a sequence is returned only when all that run with it have ended.
        tiers: What lies below the device; None where nothing is kept there.
        make_sequence: Makes the record of a request that a plan brings; ``new_sequence``, where nothing else is kept.
        max_in_flight: Steps that may have begun and not been committed; they are committed in their order.
        revision: Rises with each event that may change the choice of the next step, except the progress of sequences.
        short_blocks: Blocks missing for the sequences that could not run in the step for want of blocks.
        out_of_grants: Whether a sequence was left out of the step because its grants are used up.
        prefix_queries: Prompt tokens looked up in the cache so far, each request's once.
        prefix_hits: Prompt tokens found in the cache so far.
        num_cut_off: Steps that were cut off, so far.
        meter: Divides the time of steps among their sequences, and adds it up by tenant.
    """

    returns_together: ClassVar[bool]
    max_in_flight = 1
    tiers: KVTiers | None = None

    def __init__(
        self, blocks: BlockManager, limits: BatchLimits, incarnation: str, host: BlockManager | None = None
    ) -> None:
        self.blocks = blocks
        self.host = host
        self.limits = limits
        self.incarnation = incarnation
        self.revision = 0
        self.short_blocks = 0
        self.out_of_grants = False
        self.prefix_queries = self.prefix_hits = self.num_cut_off = 0
        self.meter = ServiceMeter(limits.max_num_seqs, blocks.num_blocks * blocks.block_size)
        self.make_sequence: Callable[[Request], SequenceState] = new_sequence
        self._held: dict[str, SequenceState] = {}  # in plan order
        self._stalled: frozenset[str] = frozenset()
        self._lease = 0
        self._plan_seq = 0
        self._reserve_blocks = self._prompt_tokens = 0
        self._places = limits.max_num_seqs
        self._vacated = 0  # slots of this plan, standbys aside, that have ended: places a standby may take
        self._num_absent = 0  # slots of this plan whose payload has not come
        self._report_seq = 0
        self._recomputed_tokens = 0
        self._journal: CacheJournal | None = None
        self._arrivals = 0
        # Finished sequences. Reports repeat them until they are acknowledged. Tombstones keep them until a plan is made
        # with that knowledge, so that an older plan cannot start them again.
        self._unacknowledged: dict[tuple[str, int], tuple[FinishedSequence, int]] = {}
        self._tombstones: dict[tuple[str, int], int] = {}

    @abstractmethod
    def share_prefixes(self, block_hashes: BlockHashes) -> None:
        """Lets sequences share the KV of equal beginnings; call it before the first plan.

        Args:
            block_hashes: Gives the block hashes of sequences held here; called when one starts, and when one has
                filled a block.
        """

    def tell_cache(self) -> None:
        """Makes reports hold changes of the prefix cache; call it before the first plan."""
        self._journal = CacheJournal(self.blocks)

    def tell_whole_cache(self) -> None:
        """Makes the next report hold all cached blocks, since KV cache events were lost."""
        if self._journal is not None:
            self._journal.begin_anew()

    @abstractmethod
    def next_batch(self) -> StepBatch | None:
        """Returns the next step, with its blocks allocated; None if nothing can run."""

    def step_after(self, batch: StepBatch, *, unread: bool = False) -> StepBatch | None:
        """Returns the step after a step that computes now; None if that step is not known yet.

        ``next_batch`` and ``begin_after`` return this very object if no plan, end or copy comes before. They also
        allocate the blocks that its sequences begin.

        Args:
            unread: Whether it is to begin before the result of ``batch`` is known. Sequences that ``batch`` brings to
                their limit of length take no part; those that it ends otherwise are left out afterwards (``rest_of``).
        """
        return None

    def rest_of(self, batch: StepBatch) -> StepBatch | None:
        """Returns what of a step that began before the one before it was booked is still wanted; None of nothing."""
        return batch

    def begin_after(self, batch: StepBatch) -> StepBatch | None:
        """Begins the step after ``batch``, which has been computed, ends no sequence, and is booked next.

        Returns None if ``batch`` must be booked before the next step can be chosen.
        """
        return None

    def counts(self, batch: StepBatch, request_id: str) -> bool:
        """Returns whether the result of a step in progress is still wanted for this sequence.

        A result is not wanted if the sequence has ended or lost its KV, which can only happen while other steps run.
        """
        return True

    def draft_room(self, item: StepItem) -> int:
        """Returns how many guessed tokens an item of a step in the making may verify; 0 where nothing is guessed.

        A guess takes no block that the sequence does not hold, and no length that its grants do not cover.
        """
        return 0

    @abstractmethod
    def commit(
        self,
        batch: StepBatch,
        stopped: Iterable[str] = (),
        failed: Collection[str] = (),
        *,
        further: Mapping[str, int] = NO_FURTHER,
        duration_s: float = 0.0,
    ) -> list[FinishedSequence]:
        """Books a step that ran; returns the sequences it ended, their blocks already free.

        Args:
            stopped: Ids whose new token ended them (EOS, stop string or id). Length limits are found here.
            failed: Ids of sequences that lack the token which the step owed them: they end, and the KV that the step
                has computed for them is not cached.
            further: How many tokens beyond the first the step has yielded, for ids whose drafts turned out right.
            duration_s: Seconds that the step took.
        """

    @abstractmethod
    def take_copies(self) -> list[KVCopy]:
        """Takes the copies to begin now; ``complete_copy`` answers each, in any order."""

    @abstractmethod
    def complete_copy(self, copy_id: int, *, failed: bool = False) -> None:
        """Books the end of a copy; between steps. KV that a failed copy has not brought is computed again."""

    @abstractmethod
    def flush(self) -> list[FinishedSequence]:
        """Ends the sequences whose output is complete but that wait for the rest of their batch."""

    def cut_off(self, batch: StepBatch, duration_s: float) -> None:
        """Books a step that was cut off, instead of ``commit``: its time counts, its work does not."""
        took_s = max(duration_s, batch.cut_off_s)  # a device that makes up for a late host was cut off earlier
        for item, share in zip(batch.items, self.meter.shares(batch), strict=True):
            held = self._held[item.request_id]
            slot_s = held.slot.cut_off_at_s
            # A sum of floats may fall short of the seconds that are over, and leave 1e-17 s for further steps.
            ran_s = held.ran_s + took_s
            held.ran_s = max(ran_s, slot_s) if took_s >= slot_s - held.ran_s else ran_s
            held.cut_off_at_s = slot_s
            self.meter.charge(held, share * took_s)
        self.num_cut_off += 1
        self.revision += 1

    @property
    def lease(self) -> int:
        return self._lease

    @property
    def plan_seq(self) -> int:
        return self._plan_seq

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def sequences(self) -> dict[str, SequenceState]:
        """The sequences held, by request id; another mapping after each plan."""
        return self._held

    def holds(self, request_id: str) -> bool:
        return request_id in self._held

    def take_over(self) -> int:
        """Begins a Scheduler life: returns the lease that its plans must bear. Held sequences stay and run on."""
        self._lease += 1
        self.revision += 1
        self._plan_seq = 0
        self.tell_whole_cache()
        self.meter.tell_all()
        return self._lease

    def stall(self, request_ids: frozenset[str]) -> None:
        """Pauses these sequences, whatever the plan grants them: their clients do not read."""
        if request_ids != self._stalled:
            self._stalled = request_ids
            self.revision += 1

    def apply_plan(self, plan: Plan) -> list[str]:
        """Takes over a newer plan; returns the ids of sequences to forget (aborted, or fenced by a new attempt)."""
        if plan.worker_incarnation != self.incarnation or plan.lease != self._lease:
            return []
        if plan.plan_seq <= self._plan_seq:
            return []
        self._plan_seq = plan.plan_seq
        self.revision += 1
        self._reserve_blocks, self._prompt_tokens = plan.reserve_blocks, plan.prompt_tokens
        self._places = min(plan.places or self.limits.max_num_seqs, self.limits.max_num_seqs)
        self._bury(plan.as_of_report_seq)
        self._vacated = sum(
            not slot.standby and (slot.request_id, slot.attempt) in self._tombstones for slot in plan.slots
        )
        before, self._held = self._held, {}
        self._num_absent = 0
        for slot in plan.slots:
            held = self._take(slot, before.get(slot.request_id))
            if held is not None:
                self._held[slot.request_id] = held
        forgotten = [rid for rid, held in before.items() if self._held.get(rid) is not held]
        for request_id in forgotten:
            self._free(before[request_id])
        return forgotten

    def _take(self, slot: Slot, held: SequenceState | None) -> SequenceState | None:
        """Returns the sequence of this slot after the plan, or None if there is nothing to run."""
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

    def _drop_kv(self, held: SequenceState) -> None:
        """Drops its KV; computed blocks may stay cached, and the sequence may find them again."""
        held.dropped_len = max(held.dropped_len, held.computed_len)
        self._free(held)
        held.computed_len = 0
        held.status = SequenceStatus.WAITING

    def _advance(self, held: SequenceState, num_tokens: int) -> None:
        """Books ``num_tokens`` more computed tokens."""
        if held.dropped_len > held.computed_len:
            self._recomputed_tokens += min(held.dropped_len - held.computed_len, num_tokens)
        held.computed_len += num_tokens

    def _new(self, slot: Slot) -> SequenceState | None:
        request = slot.request
        if request is None:
            self._num_absent += 1
            return None  # the Scheduler believes that this worker has the payload: the report shows that it does not
        held = self.make_sequence(request)
        self._arrivals += 1
        held.slot, held.arrival, held.register_at = slot, self._arrivals, self.blocks.block_size
        held.num_preemptions, held.num_moves = slot.num_preemptions, slot.num_moves  # there is no KV to move yet
        return held

    def _free(self, held: SequenceState) -> None:
        """Frees the sequence's blocks in both pools."""
        for pool in self._pools:
            pool.release(held.request_id)

    @property
    def _pools(self) -> tuple[BlockManager, ...]:
        return (self.blocks,) if self.host is None else (self.blocks, self.host)

    def end(self, request_id: str, status: SequenceStatus) -> FinishedSequence:
        """Ends a sequence for a reason outside its own text: it failed, or its client is gone."""
        return self._finish(self._held[request_id], status)

    def _finish(self, held: SequenceState, status: SequenceStatus) -> FinishedSequence:
        del self._held[held.request_id]
        self.revision += 1
        self._free(held)
        self._vacated += not held.slot.standby
        finished = FinishedSequence(
            held.request_id,
            held.attempt,
            status,
            held.output_len,
            held.cached_len or 0,
            held.ran_s,
            held.gpu_s,
            held.brought,
        )
        key = (held.request_id, held.attempt)
        first_report = self._report_seq + 1
        self._unacknowledged[key] = (finished, first_report)
        self._tombstones[key] = first_report
        return finished

    def report(self, steps: tuple[StepSample, ...] = ()) -> StepReport:
        """Makes a report of the present state under a new sequence number; ``steps`` are passed on as they are."""
        self._report_seq += 1
        return StepReport(
            worker_incarnation=self.incarnation,
            lease=self._lease,
            report_seq=self._report_seq,
            plan_seq=self._plan_seq,
            free_blocks=self.blocks.num_free,
            short_blocks=self.short_blocks,
            progress=tuple([self._progress(held) for held in self._held.values()]),
            finished=tuple(finished for finished, _ in self._unacknowledged.values()),
            steps=steps,
            shared_blocks=self.blocks.num_shared,
            num_host_blocks=0 if self.host is None else self.host.num_blocks,
            free_host_blocks=0 if self.host is None else self.host.num_free,
            flying_blocks=self._flying_blocks,
            traffic=replace(self._traffic, recomputed_tokens=self._recomputed_tokens),
            cache=() if self._journal is None else self._journal.notices(self._report_seq),
            services=self.meter.services(self._report_seq),
        )

    def services_after(self, batch: StepBatch, duration_s: float, num_steps: int) -> tuple[TenantService, ...]:
        """Sums up the batch's tenants as if ``num_steps`` of its steps were booked; a simulation reports them early."""
        tenants: dict[str, float] = {}
        for item, share in zip(batch.items, self.meter.shares(batch, num_steps), strict=True):
            tenant = self._held[item.request_id].tenant
            tenants[tenant] = tenants.get(tenant, 0.0) + share * duration_s
        return self.meter.services_with(tenants)

    @property
    def _flying_blocks(self) -> int:
        """Target blocks of copies in flight."""
        return 0

    @property
    def _traffic(self) -> KVTraffic:
        return NO_TRAFFIC

    def _progress(self, held: SequenceState) -> SlotProgress:
        return SlotProgress(
            request_id=held.request_id,
            attempt=held.attempt,
            status=held.status,
            num_preemptions=held.num_preemptions,
            computed_len=held.computed_len,
            output_len=held.num_tokens - held.prompt_len,
            num_blocks=len(self.blocks.table(held.request_id)),
            stalled=held.request_id in self._stalled,
            cached_len=held.cached_len or 0,
            residency=held.residency,
            num_moves=held.num_moves,
            num_host_blocks=0 if self.host is None else len(self.host.table(held.request_id)),
            ran_s=held.ran_s,
        )

    def acknowledge(self, report_seq: int) -> None:
        """Books that the scheduler has every report up to ``report_seq``."""
        acknowledged = [key for key, (_, seq) in self._unacknowledged.items() if seq <= report_seq]
        for key in acknowledged:
            del self._unacknowledged[key]
        self.meter.acknowledge(report_seq)
        if self._journal is not None:
            self._journal.acknowledge(report_seq)

    def _bury(self, report_seq: int) -> None:
        """Forgets finished sequences that no later plan can name."""
        known = [key for key, seq in self._tombstones.items() if seq <= report_seq]
        for key in known:
            del self._tombstones[key]

    def check_integrity(self) -> None:
        """Raises IntegrityError unless lengths, blocks and book-keeping agree."""
        self.blocks.check_integrity()
        held_blocks = self._orphaned_blocks()
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

    def _orphaned_blocks(self) -> set[int]:
        """Returns the blocks in use that belong to no sequence held here."""
        return set()

"""The contents of a step, its work as the step-time profile sees it, copies beside it, GPU-seconds of each sequence."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from farsight.core.costs import A100_7B, StepCost, attention_pairs, row_shares
from farsight.core.messages.kv import BlockName
from farsight.core.messages.plans import TenantService
from farsight.core.messages.step_times import StepSample
from farsight.core.request import Residency


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
        drafts: Guesses of the tokens that follow the last known one; ``num_tokens`` counts them. The step yields a
            token for the last known position and for each guess that turns out right.
        restore: Place of the kept state that the sequence begins with (``StateCheckpoints``); -1 for none.
        keeps: Behind how many of the tokens the state is to be kept, and in which place; ascending.
    """

    request_id: str
    start: int
    num_tokens: int
    samples: bool
    blocks: list[int]
    drafts: tuple[int, ...] = ()
    restore: int = -1
    keeps: tuple[tuple[int, int], ...] = ()

    @property
    def num_known(self) -> int:
        """Known tokens that the step computes."""
        return self.num_tokens - len(self.drafts)

    def without_drafts(self) -> StepItem:
        """Returns the same work without guesses."""
        return self._replace(num_tokens=self.num_known, drafts=()) if self.drafts else self

    def with_drafts(self, drafts: tuple[int, ...]) -> StepItem:
        """Returns the same work, with these guesses to verify behind it."""
        return self._replace(num_tokens=self.num_known + len(drafts), drafts=drafts)


@dataclass(frozen=True, slots=True)
class Padding:
    """The padding that a static batch computes and reads, only to keep its shape.

    Attributes:
        items: Pads of prompts, behind the known tokens, and invalid tokens of sequences that have ended; each in the
            blocks of its own sequence. The token values do not matter; their results are dropped.
        context_tokens: Positions of padding that the sequences of a decoding step attend to, all together. They are
            priced; a real model masks pads rather than read them.
    """

    items: tuple[StepItem, ...] = ()
    context_tokens: int = 0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """
    Attributes:
        cut_off_s: Seconds after which the step is cut off and its work lost; infinity: it runs to its end.
    """

    items: tuple[StepItem, ...]
    padding: Padding = Padding()
    cut_off_s: float = math.inf

    @property
    def may_be_cut_off(self) -> bool:
        return self.cut_off_s < math.inf

    @property
    def num_tokens(self) -> int:
        """Tokens computed, padding included."""
        return sum(item.num_tokens for item in self.items + self.padding.items)

    def spans(self) -> Iterable[tuple[int, int]]:
        """Returns the first position and number of computed tokens of each sequence in the step, padding included."""
        if not self.padding.items:
            return [(item.start, item.num_tokens) for item in self.items]
        spans = {item.request_id: (item.start, item.num_tokens) for item in self.items}
        for pad in self.padding.items:
            start, num_tokens = spans.get(pad.request_id, (pad.start, 0))
            spans[pad.request_id] = start, num_tokens + pad.num_tokens
        return spans.values()


class StepWork(NamedTuple):
    """The work of a step, in the order of the arguments of ``StepCost.step_s``."""

    prefill_tokens: int
    decode_seqs: int
    context_tokens: int
    prefill_pairs: int


def step_work(batch: StepBatch) -> StepWork:
    """Counts the work of a step, padding included. O(sequences of the step)."""
    prefill_tokens = decode_seqs = prefill_pairs = 0
    context_tokens = batch.padding.context_tokens
    for start, num_tokens in batch.spans():
        if num_tokens == 1:
            decode_seqs += 1
            context_tokens += start + 1
        else:
            prefill_tokens += num_tokens
            prefill_pairs += attention_pairs(num_tokens, start)
    return StepWork(prefill_tokens, decode_seqs, context_tokens, prefill_pairs)


def step_sample(batch: StepBatch, duration_s: float) -> StepSample:
    """Returns the sample of a step that took ``duration_s`` seconds."""
    work = step_work(batch)
    return StepSample(work.prefill_tokens, work.decode_seqs, work.context_tokens, duration_s, work.prefill_pairs)


class KVCopy(NamedTuple):
    """An order to move KV beside the steps: the one form of all transfers of a worker.

    Without names, a stopped sequence's blocks go to the other pool. With names, cached blocks go to a tier, or come
    back from one.

    Attributes:
        to: Where the blocks go.
        source: Blocks of the pool that they come from; none if they come from a tier.
        target: As many blocks of the pool that they go to; none if they go to a tier.
        names: The blocks' names where a tier takes or gives them.
        tiers: Where each of them lies, if they come back.
    """

    copy_id: int
    to: Residency
    source: tuple[int, ...]
    target: tuple[int, ...]
    names: tuple[BlockName, ...] = ()
    tiers: tuple[Residency, ...] = ()


class Metered(Protocol):
    """A record that is charged for."""

    gpu_s: float
    tenant: str


class ServiceMeter:
    """Divides the time of steps among their rows, so that the rows' GPU-seconds add up to the worker's busy time.

    Sums by tenant count from the worker's start. They include the steps of sequences that were aborted later, so a
    client that cancels early gets no step for free.

    Args:
        max_num_seqs: Sequences of a step at most.
        capacity: Tokens of KV on the device.

    Attributes:
        cost: Prices of steps, of which only the proportions matter; assumed until the worker's steps are measured.
    """

    def __init__(self, max_num_seqs: int, capacity: int) -> None:
        self.cost: StepCost = A100_7B
        self._max_num_seqs = max_num_seqs
        self._capacity = capacity
        self._sums: defaultdict[str, float] = defaultdict(float)
        self._grown: set[str] = set()  # since the last report
        self._told_in: dict[str, int] = {}  # by tenant: the first report of its latest sum, until it is acknowledged

    def shares(self, batch: StepBatch, num_steps: int = 1) -> list[float]:
        """Returns each item's share of the time of the batch, in order; the shares add up to 1. O(items)."""
        if len(batch.items) == 1:
            return [1.0]
        rows = [(item.start, item.num_tokens) for item in batch.items]
        return row_shares(self.cost, rows, self._max_num_seqs, self._capacity, num_steps)

    def charge(self, held: Metered, gpu_s: float) -> None:
        """Adds a sequence's share of a step."""
        tenant = held.tenant
        held.gpu_s += gpu_s
        self._sums[tenant] += gpu_s
        if tenant not in self._grown:
            self._grown.add(tenant)

    def services(self, report_seq: int) -> tuple[TenantService, ...]:
        """Returns the sums that the report of this number holds: all that the Scheduler may lack."""
        for tenant in self._grown:
            self._told_in[tenant] = report_seq
        self._grown.clear()
        return tuple(TenantService(tenant, self._sums[tenant]) for tenant in sorted(self._told_in))

    def services_with(self, tenants: dict[str, float]) -> tuple[TenantService, ...]:
        """Adds up the sums of these tenants and GPU-seconds that have not been charged yet."""
        return tuple(TenantService(name, self._sums.get(name, 0.0) + more) for name, more in sorted(tenants.items()))

    def acknowledge(self, report_seq: int) -> None:
        """Books that the Scheduler has every report up to this one."""
        if self._told_in:
            self._told_in = {tenant: seq for tenant, seq in self._told_in.items() if seq > report_seq}

    def tell_all(self) -> None:
        """Makes the next report hold all sums, for a new Scheduler."""
        self._grown.update(self._sums)

"""Rank 0, which decides. Every rank begins what rank 0 begins; rank 0 waits until every rank has done it."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

import torch
from torch import Tensor

from farsight.core.errors import RankLost
from farsight.engine.attention.layout import check_row_tokens, fill_rows, order_items
from farsight.engine.checkpoint.model_config import DecoderConfig
from farsight.engine.kv_pool import KVPool
from farsight.engine.parallel.links import Link
from farsight.engine.parallel.stage import Stage
from farsight.engine.parallel.wire import Copied, Finished, StepOrder, pack_order
from farsight.engine.runner import Copier
from farsight.engine.sampling.sampler import StepLogits, find_prompt_rows
from farsight.engine.sequence import Sequence
from farsight.engine.steps.careful_steps import CarefulSteps, Counts
from farsight.engine.steps.model_runner import ModelRunner
from farsight.kvcache import KVCopy, StepBatch


class StepReports:
    """Reports of the other ranks on their parts of steps, in the order in which the steps began.

    Args:
        num_ranks: Number of the other ranks.
    """

    def __init__(self, num_ranks: int) -> None:
        self._changed = threading.Condition()
        self._heard: list[deque[Finished]] = [deque() for _ in range(num_ranks)]
        self._lost = False

    def hear(self, rank: int, report: Finished) -> None:
        """Books that rank 1, 2 ... has ended its part of a step; called by the thread that listens to the ranks."""
        with self._changed:
            self._heard[rank - 1].append(report)
            self._changed.notify_all()

    def rank_lost(self) -> None:
        """Books that a rank is gone; called by the same thread."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def take(self) -> list[Finished]:
        """Waits until all ranks have ended the earliest step; returns its reports, from rank 1 on.

        Raises:
            RankLost: A rank is gone, so it never ends the step.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._lost or all(self._heard))
            if not all(self._heard):
                raise RankLost("a rank of the replica is gone in the middle of a step")
            return [heard.popleft() for heard in self._heard]


class Lead:
    """Begins steps and copies on every rank, in one order.

    The other ranks carry out orders in that order. Rank 0 itself must not begin a copy before it has computed the
    steps that began earlier: their sequences may have gone and left their blocks to the copy.

    Args:
        links: Connections to ranks 1, 2 ...
        copier: Copier of rank 0's own pools; None without a host pool.
        reports: Collects the reports on steps that come over the links.
    """

    def __init__(self, links: list[Link], stage: Stage, copier: Copier | None, reports: StepReports) -> None:
        self.links = links
        self._stage = stage
        self._copier = copier
        self._reports = reports
        self._waiting: deque[StepOrder | KVCopy] = deque()  # orders for rank 0's own share
        self._finished: dict[int, tuple[StepOrder, Tensor | Exception]] = {}  # by the order's id

    def begin_step(self, order: StepOrder) -> None:
        """Raises RankLost if a rank is gone."""
        self._tell(order)
        self._stage.begin(order)
        self._waiting.append(order)

    def finish_step(self, order: StepOrder) -> Tensor:
        """Returns the logits of a step that has begun. Finishes the steps before it; their logits can be read later.

        Raises:
            torch.OutOfMemoryError: a rank had no memory for its part; the ranks are in step.
            RuntimeError: a rank could not compute its part for another reason; likewise.
            RankLost: Any other failure, here or on another rank: the ranks are no longer in step.
        """
        while id(order) not in self._finished:
            self._finish_next()
        _, found = self._finished.pop(id(order))
        if isinstance(found, Exception):
            raise found
        return found

    def _finish_next(self) -> None:
        order = self._waiting.popleft()
        assert isinstance(order, StepOrder), "copies begin as soon as they come first"
        try:
            logits, report = self._stage.finish()
        except Exception as error:
            raise RankLost(f"a step over several ranks failed: {type(error).__name__}: {error}") from error
        found: Tensor | Exception | None = _error([report, *self._reports.take()]) or logits
        assert found is not None, "rank 0 has the logits"
        self._finished[id(order)] = order, found
        self._begin_copies()

    def begin_copy(self, copy: KVCopy) -> None:
        """Raises RankLost if a rank is gone."""
        self._tell(copy)
        self._waiting.append(copy)
        self._begin_copies()

    def _begin_copies(self) -> None:
        while self._waiting and isinstance(self._waiting[0], KVCopy):
            assert self._copier is not None, "copies need a host pool"
            self._copier.begin(self._waiting[0])
            self._waiting.popleft()

    def _tell(self, order: StepOrder | KVCopy) -> None:
        data = pack_order(order)
        for link in self.links:
            link.send(data)


def _error(reports: list[Finished]) -> Exception | None:
    """Returns the error of a failed step; ``reports`` from rank 0 on."""
    failed = {rank: report for rank, report in enumerate(reports) if report.failure}
    if not failed:
        return None
    words = "; ".join(f"rank {rank}: {report.failure}" for rank, report in failed.items())
    if all(report.out_of_memory for report in failed.values()):
        return torch.OutOfMemoryError(words)
    return RuntimeError(words)


class ParallelBackend:
    """A ``StepBackend`` whose steps have begun before they are run.

    Attributes:
        next_order: The order of the step that runs next, from ``begin``.
    """

    def __init__(self, lead: Lead, block_size: int, vocab_size: int) -> None:
        self._lead = lead
        self._block_size = block_size
        self._vocab_size = vocab_size
        self.next_order: StepOrder | None = None
        self.cut_off_at_s = math.inf
        self.keeps_middle = False

    def begin(
        self, batch: StepBatch, order: list[int], sequences: Mapping[str, Sequence], more_rows: list[int]
    ) -> StepOrder:
        """Begins a step on every rank. If it raises IntegrityError, the step has not begun."""
        items = [batch.items[i] for i in order]
        rows = fill_rows(items, sequences, self._block_size)
        check_row_tokens(rows, self._vocab_size)
        begun = StepOrder(items, rows, more_rows)
        self._lead.begin_step(begun)
        return begun

    def run(
        self,
        batch: StepBatch,
        order: list[int],
        sequences: Mapping[str, Sequence],
        more_rows: list[int] | None = None,
        *,
        with_hidden: bool = False,
    ) -> StepLogits:
        """Runs ``next_order``, which is this step (``StepBackend.run``). The ranks tell no hidden states."""
        assert self.next_order is not None, "a step begins before it is run"
        return StepLogits(self._lead.finish_step(self.next_order), None)


class _Begun(NamedTuple):
    """A step of the executor that waits to be executed.

    Attributes:
        sequences: Its sequences; the worker may have forgotten them when the step is executed.
        order: None if it is too large to be computed in one go.
    """

    batch: StepBatch
    sequences: dict[str, Sequence]
    order: StepOrder | None


class ParallelRunner(ModelRunner):
    """Runs steps on every rank; several may have begun.

    A step that a rank had no memory for, and later steps of that size, are computed in parts, each on all ranks from
    beginning to end. Steps that have begun meanwhile are finished first, so their blocks must stay untouched: of the
    step in parts, only sequences for which ``counts`` still holds are computed.

    Args:
        pool: Rank 0's KV pool.
        careful: Cuts steps into parts.
        counts: ``PlanExecutor.counts``.
        is_lost: As in ``ModelRunner``, of rank 0's device. A rank whose device is lost ends by itself, and all with it.
    """

    def __init__(
        self,
        config: DecoderConfig,
        pool: KVPool,
        backend: ParallelBackend,
        max_model_len: int,
        careful: CarefulSteps,
        counts: Counts,
        is_lost: Callable[[], bool],
    ) -> None:
        super().__init__(config, pool, backend, max_model_len, careful=careful, is_lost=is_lost)
        self.careful = careful
        self._ranks = backend
        self._counts = counts
        self._begun: deque[_Begun] = deque()

    def begin(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> None:
        """Begins a step on every rank. Its sequences may be forgotten before it is executed."""
        own = {item.request_id: sequences[item.request_id] for item in (*batch.items, *batch.padding.items)}
        order = self._begin(batch, own) if self.careful.fits(batch) else None
        self._begun.append(_Begun(batch, own, order))

    def _begin(self, batch: StepBatch, own: Mapping[str, Sequence]) -> StepOrder:
        padded, shown = self._with_padding(batch, own) if batch.padding.items else (batch, own)
        order = order_items(padded)
        prompts = find_prompt_rows(padded, order, shown)
        more = [row for part in prompts for row in range(part.row, part.row + part.num_rows)]
        return self._ranks.begin(padded, order, shown, more)

    def execute(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[int | None]:
        """Executes the step that began first, which this must be (``ModelRunner.execute``)."""
        begun, own, order = self._begun.popleft()

        def run(part: StepBatch) -> list[int | None]:
            self._ranks.next_order = order if part is begun else self._begin(part, own)
            return self._execute(part, own)

        return self.careful.execute(run, begun, own, whole=order is not None, counts=self._counts)

    def logits(self, batch: StepBatch, sequences: Mapping[str, Sequence]) -> list[Tensor | None]:
        self._ranks.next_order = self._begin(batch, sequences)
        return super().logits(batch, sequences)


class ParallelCopier:
    """A ``Copier`` whose copies end when every rank has ended its part; a copy fails if one part fails."""

    def __init__(self, lead: Lead, own: Copier) -> None:
        self._lead = lead
        self._own = own
        self._changed = threading.Condition()
        self._parts: dict[int, int] = {}  # copy id -> parts that are still to end
        self._failed: set[int] = set()
        self._lost = False
        self._on_done: Callable[[], object] = lambda: None
        own.when_done(self._own_done)

    def when_done(self, callback: Callable[[], object]) -> None:
        """Sets what is called, from any thread, after each copy."""
        self._on_done = callback

    def begin(self, copy: KVCopy) -> None:
        with self._changed:
            self._parts[copy.copy_id] = 1 + len(self._lead.links)
        self._lead.begin_copy(copy)

    def look(self, names: SequenceOf[int], tenant: str) -> None:
        """Finds nothing: replicas of several ranks keep no KV below the host."""

    def take_done(self) -> list[tuple[int, bool]]:
        """Returns (copy id, whether it failed) of the copies that have ended since the last call."""
        with self._changed:
            self._collect()
            done = [copy_id for copy_id, parts in self._parts.items() if parts == 0]
            for copy_id in done:
                del self._parts[copy_id]
            ended = [(copy_id, copy_id in self._failed) for copy_id in done]
            self._failed -= set(done)
            return ended

    def wait(self) -> None:
        """Returns when one of the copies in flight has ended; at once if there are none.

        Raises:
            RankLost: A copy will never end.
        """
        with self._changed:
            self._collect()
            while self._parts and all(self._parts.values()):
                if self._lost:
                    raise RankLost("a rank of the replica is gone, and its copies with it")
                self._changed.wait()
                self._collect()

    def rank_done(self, report: Copied) -> None:
        """Books that another rank has ended its part of a copy; called by the thread that listens to the ranks."""
        with self._changed:
            self._end_part(report.copy_id, report.failed)
        self._on_done()

    def rank_lost(self) -> None:
        """Books that a rank is gone; called by the same thread."""
        with self._changed:
            self._lost = True
            self._changed.notify_all()

    def _own_done(self) -> None:
        with self._changed:
            self._changed.notify_all()
        self._on_done()

    def _collect(self) -> None:
        for copy_id, failed in self._own.take_done():
            self._end_part(copy_id, failed)

    def _end_part(self, copy_id: int, failed: bool) -> None:
        self._parts[copy_id] -= 1
        if failed:
            self._failed.add(copy_id)
        if self._parts[copy_id] == 0:
            self._changed.notify_all()

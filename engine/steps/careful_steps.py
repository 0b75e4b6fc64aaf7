"""Computes a step that the device has no memory for in parts, so that no request fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch

from farsight.engine.sequence import Sequence
from farsight.engine.step_results import ItemLogprobs, LoggedTokens, NoToken, PooledRows, StepFault
from farsight.kvcache import StepBatch, StepItem

logger = logging.getLogger(__name__)

Run = Callable[[StepBatch], list[int | None]]
"""Runs a step; returns what ``ModelRunner.execute`` returns."""

Counts = Callable[[StepBatch, str], bool]
"""Whether a request of a step that has begun may still be computed (``PlanExecutor.counts``)."""


def _all_count(batch: StepBatch, request_id: str) -> bool:
    return True


def fault_of(error: Exception, is_lost: Callable[[], bool]) -> StepFault:
    """Judges a step by what it raised after all parts were tried.

    Args:
        is_lost: Asks the device (``cuda.lost_on``).
    """
    if isinstance(error, torch.OutOfMemoryError):
        return StepFault.REQUESTS
    return StepFault.LOST if is_lost() else StepFault.UNKNOWN


class CarefulSteps:
    """Runs steps. After the device has run out of memory, no step is larger than half of the one that failed.

    A step writes keys and values where they belong and nothing else, so it can be run again from its beginning. What it
    writes for one token does not depend on what else the step holds: cut into parts it gives the same tokens.

    Args:
        recover: Frees unused memory.

    Attributes:
        num_ooms: How often the device has run out of memory.
        max_tokens: Tokens that a part may compute; None while the device has never run out.
    """

    def __init__(self, recover: Callable[[], None]) -> None:
        self._recover = recover
        self.num_ooms = 0
        self.max_tokens: int | None = None

    def fits(self, batch: StepBatch) -> bool:
        """Returns whether a step should be tried in one go."""
        return self.max_tokens is None or batch.num_tokens <= self.max_tokens

    def execute(
        self,
        run: Run,
        batch: StepBatch,
        sequences: Mapping[str, Sequence],
        *,
        whole: bool,
        counts: Counts = _all_count,
    ) -> list[int | None]:
        """Runs the whole batch like ``run``. A batch that is cut loses its padding, which is only there to take time,
        and the drafts of its items.

        Args:
            whole: Whether it is tried in one go first, as ``fits`` has said.
            counts: Called when the step is computed in parts: a request that no longer counts may have left its blocks
                to others.

        Raises:
            torch.OutOfMemoryError: A part that cannot be cut further does not fit.
        """
        if whole:
            found = self._attempt(run, batch)
            if found is not None:
                return found
        tokens: list[int | None] = [None] * len(batch.items)
        logprobs: dict[int, ItemLogprobs] = {}
        failures: dict[int, NoToken] = {}
        pooled: dict[int, PooledRows] = {}
        states: dict[int, bytes] = {}
        todo = [(i, item.without_drafts()) for i, item in enumerate(batch.items) if counts(batch, item.request_id)]
        while todo:
            part, rest = cut_step(todo, self.max_tokens or batch.num_tokens, sequences)
            found = self._attempt(run, StepBatch(tuple(item for _, item in part)), last=_is_smallest(part, sequences))
            if found is None:
                continue
            for (i, _), token in zip(part, found, strict=True):
                tokens[i] = token
            if isinstance(found, LoggedTokens):
                logprobs |= {part[i][0]: each for i, each in found.logprobs.items()}
                failures |= {part[i][0]: each for i, each in found.failures.items()}
                pooled |= {part[i][0]: each for i, each in found.pooled.items()}
                states |= {part[i][0]: each for i, each in found.states.items()}
            todo = rest
        whole_step = LoggedTokens(tokens, logprobs, failures, pooled=pooled)
        whole_step.states = states
        return whole_step if whole_step.tells_more else tokens

    def _attempt(self, run: Run, batch: StepBatch, *, last: bool = False) -> list[int | None] | None:
        """Returns the step's tokens; None if it did not fit, which is an error of the ``last`` attempt."""
        try:
            return run(batch)
        except torch.OutOfMemoryError as error:
            if last:
                raise
            self._take_note(batch, error)
        # Not in the handler: there the error still holds the frames of the failed step, and with them its memory.
        self._recover()
        return None

    def _take_note(self, batch: StepBatch, error: torch.OutOfMemoryError) -> None:
        self.num_ooms += 1
        self.max_tokens = max(1, batch.num_tokens // 2)
        logger.warning(
            "out of memory in a step of %d tokens; it runs again, from now on in parts of at most %d tokens: %s",
            batch.num_tokens,
            self.max_tokens,
            error,
        )


_Items = list[tuple[int, StepItem]]
"""Items of a step with their indices in it."""


def cut_step(items: _Items, max_tokens: int, sequences: Mapping[str, Sequence]) -> tuple[_Items, _Items]:
    """Cuts off the first items, at most ``max_tokens`` together but at least one token; returns these and the rest.

    An item may be cut in two parts, of which the second samples. An item of which every position brings something, such
    as log probabilities of its prompt, is not cut.
    """
    part: _Items = []
    num_tokens = 0
    for place, (i, item) in enumerate(items):
        room = max_tokens - num_tokens
        if item.num_tokens > room:
            if part and (room < 1 or _whole(item, sequences)):
                return part, items[place:]
            if not _whole(item, sequences):
                rest = item._replace(start=item.start + room, num_tokens=item.num_tokens - room)
                return [*part, (i, item._replace(num_tokens=room, samples=False))], [(i, rest), *items[place + 1 :]]
        part.append((i, item))
        num_tokens += item.num_tokens
    return part, []


def _whole(item: StepItem, sequences: Mapping[str, Sequence]) -> bool:
    sequence = sequences[item.request_id]
    return sequence.prompt_logprobs is not None or sequence.sampling.pooling == "mean"


def _is_smallest(part: _Items, sequences: Mapping[str, Sequence]) -> bool:
    return len(part) == 1 and (part[0][1].num_tokens == 1 or _whole(part[0][1], sequences))

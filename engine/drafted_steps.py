"""Puts a policy's guesses into the steps of a worker, and tells the policy what became of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from farsight.engine.sequence import Sequence
from farsight.kvcache import PlanExecutor, StepBatch, StepItem
from farsight.policies.speculation.base import Speculation
from farsight.policies.speculation.price import GuessBudget

SAMPLE = 4
"""So many of the requests that have won nothing are looked at in a step, others each time."""

FIRST_LOOK = 0.3
"""What the looks of a step are believed to cost before any was measured, in tokens."""

MOST_LOOK = 2.0
"""What they cost at most: looks that took longer were held up."""

LOOK_RATE = 0.1
"""Weight of one step's looks in what the next are believed to cost."""

MOST_PAUSE = 63
"""Most steps in a row that are not looked at, while the budget fills."""

PLAIN_SHARE = 16
"""One in so many of the steps that are not looked at is measured."""


class DraftCounts(NamedTuple):
    """
    Attributes:
        drafts: How often tokens were guessed for a sequence in a step.
        tokens: Tokens guessed.
        accepted: Tokens that clients have got because a guess was right.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0

    def since(self, before: DraftCounts) -> DraftCounts:
        """Returns what has been added."""
        return DraftCounts(*(now - then for now, then in zip(self, before, strict=True)))


class DraftedSteps:
    """Speculation in a worker's steps.

    Requests that ask for log probabilities are not guessed for: theirs come one token at a time.

    Args:
        clock: Seconds, monotonic; that by which the steps are measured.

    Attributes:
        counts: What has been guessed and verified so far.
    """

    def __init__(self, policy: Speculation, clock: Callable[[], float] = time.perf_counter) -> None:
        self._policy = policy
        self._clock = clock
        self.counts = DraftCounts()
        self._budget = GuessBudget()
        self._look_cost = FIRST_LOOK
        self._next_look = 0  # where the looks of the next step begin
        self._pause = 0  # steps that are not looked at now

    def rests(self, num_seqs: int) -> bool:
        """Returns whether the next step of so many sequences gets no guesses, whatever the tokens before it are.

        A step of which this is said is not shown to ``with_drafts``.
        """
        if self._pause:
            self._pause -= 1
            return True
        price = self._policy.price(num_seqs)
        if price == math.inf:
            return True
        needed = price + self._look_cost
        budget = self._budget
        if budget.common >= min(needed, budget.full(num_seqs)) or (budget.owners and self._has_owner(price)):
            return False
        self._pause = min(MOST_PAUSE, budget.steps_until(needed, num_seqs))
        budget.earn(num_seqs, 1 + self._pause)
        return True

    def _has_owner(self, price: float) -> bool:
        return any(self._budget.left(each) >= price for each in self._budget.owners)

    def with_drafts(self, batch: StepBatch, sequences: Mapping[str, Sequence], executor: PlanExecutor) -> StepBatch:
        """Returns the step with guesses behind its single tokens, as many as limits and blocks allow."""
        items = batch.items
        if self.rests(len(items)):
            return batch
        began_s = self._clock()
        self._budget.earn(len(items))
        price = self._policy.price(len(items))
        drafted = None
        left = executor.limits.max_batch_tokens - batch.num_tokens
        for i in self._places(items, price):
            item = items[i]
            drafts = self._drafts(item, sequences[item.request_id], price)
            drafts = drafts[: max(0, min(left, executor.draft_room(item)))] if drafts else ()
            if drafts:
                drafted = drafted or list(items)
                drafted[i] = item.with_drafts(tuple(drafts))
                left -= len(drafts)
                self._budget.pay(item.request_id, price * len(drafts))
        cost = min(MOST_LOOK, self._policy.tokens(len(items), self._clock() - began_s))
        self._look_cost += LOOK_RATE * (cost - self._look_cost)
        self._budget.pay_look(cost, barren=drafted is None)
        return batch if drafted is None else StepBatch(tuple(drafted), batch.padding)

    def _drafts(self, item: StepItem, sequence: Sequence, price: float) -> SequenceOf[int]:
        """Returns the guesses for an item that are worth their price and that its request can pay."""
        if item.num_tokens > 1 or sequence.sampling.logprobs is not None or sequence.sampling.prompt_logprobs:
            return ()
        if sequence.drafter is None:
            sequence.drafter = self._policy.open()
        drafts = sequence.drafter.draft(sequence.token_ids, price)
        if drafts and sequence.matcher is not None:
            drafts = sequence.allowed_drafts(drafts)
        return drafts[: self._budget.most_guesses(item.request_id, price)]

    def _places(self, items: tuple[StepItem, ...], price: float) -> list[int]:
        """Returns the items of a step to look at: those that can pay guesses themselves, and a sample of the others."""
        budget, num = self._budget, len(items)
        if budget.owners:  # of requests that have ended as well
            budget.keep({item.request_id for item in items})
        owners = budget.owners
        sampled = range(0)
        if budget.common >= price:
            sampled = range(self._next_look, self._next_look + min(SAMPLE, num))
            self._next_look = sampled.stop % num
        places = {i % num for i in sampled}
        if owners:
            places |= {i for i, item in enumerate(items) if item.request_id in owners}
        return sorted(places)

    def observe(self, batch: StepBatch, further: Mapping[str, int], duration_s: float) -> None:
        """Books a step that ran, and how many tokens beyond the first it has yielded for which request."""
        if self._pause % PLAIN_SHARE:
            return
        num_known = num_drafts = num_drafted = 0
        for item in batch.items:
            num_known += item.num_tokens
            if item.drafts:
                num_drafted += len(item.drafts)
                num_drafts += 1
        if num_drafts:
            drafts, tokens, accepted = self.counts
            num_right = sum(further.values())
            self.counts = DraftCounts(drafts + num_drafts, tokens + num_drafted, accepted + num_right)
            for request_id, num in further.items():
                self._budget.win(request_id, num, len(batch.items))
        if num_known - num_drafted == len(batch.items):
            self._policy.observe(len(batch.items), num_drafted, duration_s)

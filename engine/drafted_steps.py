"""Puts a policy's guesses into the steps of a worker, and tells the policy what became of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

from engine.sequence import Sequence
from kvcache import PlanExecutor, StepBatch
from policies.speculation.base import Speculation
from policies.speculation.pace import LookPace

FULL_LOOKS = 4
"""After so many steps in which no guess was worth its price, a sample of the sequences is looked at ..."""

SAMPLE = 4
"""... of this size, until it shows a guess that is worth it."""

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
        """What has been added."""
        return DraftCounts(*(now - then for now, then in zip(self, before, strict=True)))


class DraftedSteps:
    """Speculation in a worker's steps.

    Requests that ask for log probabilities are not guessed for: theirs come one token at a time.

    Attributes:
        counts: What has been guessed and verified so far.
    """

    def __init__(self, policy: Speculation) -> None:
        self._policy = policy
        self.counts = DraftCounts()
        self._pace = LookPace()
        self._look_s = 0.0  # of the step that is computed now; 0 if it was not looked at

    def rests(self, num_seqs: int) -> bool:
        """Whether the next step of so many sequences gets no guesses, whatever the tokens before it are.

        A step of which this is said is not shown to ``with_drafts``.
        """
        return self._pace.rests() or self._policy.price(num_seqs) == math.inf

    def with_drafts(self, batch: StepBatch, sequences: Mapping[str, Sequence], executor: PlanExecutor) -> StepBatch:
        """The step with guesses behind the single tokens that it computes, as many as limits and blocks allow."""
        items = batch.items
        if self.rests(len(items)):
            return batch
        began_s = time.perf_counter()
        price = self._policy.price(len(items))
        drafted = None
        left = -1
        for i in self._places(len(items)):
            item = items[i]
            sequence = sequences[item.request_id]
            if item.num_tokens > 1 or sequence.sampling.logprobs is not None or sequence.sampling.prompt_logprobs:
                continue
            if sequence.drafter is None:
                sequence.drafter = self._policy.open()
            drafts = sequence.drafter.draft(sequence.token_ids, price)
            if drafts and sequence.matcher is not None:
                drafts = sequence.allowed_drafts(drafts)
            if not drafts:
                continue
            if left < 0:
                left = executor.limits.max_batch_tokens - batch.num_tokens
            drafts = drafts[: max(0, min(left, executor.draft_room(item)))]
            if drafts:
                drafted = drafted or list(items)
                drafted[i] = item.with_drafts(tuple(drafts))
                left -= len(drafts)
        look_s = time.perf_counter() - began_s
        if drafted is None:
            self._pace.barren(self._policy.gain(len(items), 0, 0, look_s))
            return batch
        self._look_s = look_s
        return StepBatch(tuple(drafted), batch.padding)

    def _places(self, num: int) -> range:
        """The items of a step to look at: all, or others each time where a sample is enough."""
        num_barren = self._pace.num_barren
        if num_barren < FULL_LOOKS:
            return range(num)
        first = num_barren * SAMPLE % num
        return range(first, min(first + SAMPLE, num))

    def observe(self, batch: StepBatch, further: Mapping[str, int], duration_s: float) -> None:
        """Books a step that ran, and how many tokens beyond the first it has yielded for which request."""
        if self._pace.pause % PLAIN_SHARE:
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
            self._pace.drafted(self._policy.gain(len(batch.items), num_drafted, num_right, self._look_s))
        if num_known - num_drafted == len(batch.items):
            self._policy.observe(len(batch.items), num_drafted, duration_s)

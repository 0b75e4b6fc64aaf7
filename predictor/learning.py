"""Continuous learning of output lengths (Magnus III-B): from which requests, when, and whether the result may serve.

This module does not depend on the kind of model. The paper adds badly predicted requests to the train set and trains
again every three minutes, without a check of the result. Here a new model must be no worse on recent requests that no
model was trained on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from farsight.core.errors import IntegrityError
from farsight.core.learning import ErrorRule, Schedule

RULE = ErrorRule(min_error=10.0, min_share=0.1)
"""Which outputs are learned from, by the error in tokens."""

PERIOD_S = 180.0
"""Seconds between the beginnings of two fits."""

HELD_BACK_EVERY = 5
"""One finished request in this many is held back: it is never trained on."""

MAX_HELD_BACK = 400
"""Size of the recent window: the newest requests that were held back."""

MIN_HELD_BACK = 20
"""Fewest held-back requests for a fit: with fewer, the scores of two versions cannot be told apart."""

MAX_EXAMPLES = 20_000
"""Most examples in the train set; the oldest are dropped."""

Example = TypeVar("Example")
Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class PredictionOutcome(Generic[Example]):
    """A request that ended, beside its prediction.

    Attributes:
        example: The example that a model is fitted to or scored on.
        predicted: Predicted output length, in tokens; None if there was no prediction.
        actual: Output length, in tokens.
        censored: The output was cut off: its length is not the full answer's, so it is no target.
    """

    example: Example
    predicted: float | None
    actual: float
    censored: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verdict on a newly fitted model.

    Attributes:
        accepted: Whether it has replaced the one before.
        score: Its error on the recent window.
        current_score: Error of the one before, on the same window; None if there was none.
    """

    accepted: bool
    score: float
    current_score: float | None


class ContinuousLearning(Generic[Example, Model]):
    """The life of a model: ``observe`` ended requests, ``begin`` a fit when due, then ``judge`` or ``give_up``.

    The fit itself runs wherever the caller likes (``predictor.learning_process``), and meanwhile requests go on ending.

    Args:
        score: Error of a model on examples, such as the RMSE; lower is better.
        current: The version that serves now, if there is one.
        examples: The train set of ``current``; new examples are added to it.
        period_s: Seconds between the beginnings of two fits.
        growth: A fit is also due once the train set has grown by this share since the last one; inf: never for that.
        max_examples: Size of the train set; the oldest examples are dropped.
        rule: Which outputs are learned from, by the error in tokens.
    """

    def __init__(
        self,
        score: Callable[[Model, Sequence[Example]], float],
        current: Model | None = None,
        examples: Iterable[Example] = (),
        period_s: float = PERIOD_S,
        growth: float = math.inf,
        max_examples: int = MAX_EXAMPLES,
        rule: ErrorRule = RULE,
    ) -> None:
        self._score = score
        self._rule = rule
        self._current = current
        self._version = 0 if current is None else 1
        self._examples = deque(examples, maxlen=max_examples)
        self._held_back: deque[Example] = deque(maxlen=MAX_HELD_BACK)
        self._schedule = Schedule(period_s)
        self._growth = growth
        self._num_at_fit = len(self._examples)
        self._num_seen = 0
        self._num_new = 0  # examples that no fit has begun with
        self._num_fitting: int | None = None  # new examples that the fit under way began with

    @property
    def current(self) -> Model | None:
        """The version in force."""
        return self._current

    @property
    def version(self) -> int:
        """Rises by one with each accepted model; 0 if there was none."""
        return self._version

    @property
    def num_examples(self) -> int:
        """Size of the train set."""
        return len(self._examples)

    @property
    def is_fitting(self) -> bool:
        """Whether a fit has begun and been neither judged nor given up."""
        return self._num_fitting is not None

    def observe(self, outcomes: Iterable[PredictionOutcome[Example]]) -> None:
        """Takes ended requests, oldest first: some are held back; from the others the rule picks those to train on."""
        for outcome in outcomes:
            if outcome.censored:
                continue
            self._num_seen += 1
            if self._num_seen % HELD_BACK_EVERY == 0:
                self._held_back.append(outcome.example)
            elif outcome.predicted is None or self._rule.is_wrong(outcome.predicted, outcome.actual):
                self._examples.append(outcome.example)
                self._num_new += 1

    def begin(self, now: float) -> list[Example] | None:
        """Returns the train set if a fit is due: a period is over or the set has grown, and no fit is in progress."""
        is_due = self._schedule.claim(now) or self._has_grown
        if not is_due or self.is_fitting or not self._num_new:
            return None
        if len(self._held_back) < MIN_HELD_BACK:
            return None
        self._num_at_fit = len(self._examples)
        self._num_fitting, self._num_new = self._num_new, 0
        return list(self._examples)

    def judge(self, model: Model) -> Verdict:
        """Takes over the fitted model if its score on the recent window is no worse. Scores two models.

        Raises:
            IntegrityError: No fit is in progress.
        """
        self._end_fit()
        held_back = list(self._held_back)
        score = self._score(model, held_back)
        current_score = None if self._current is None else self._score(self._current, held_back)
        accepted = math.isfinite(score) and (current_score is None or not score > current_score)
        if accepted:
            self._current = model
            self._version += 1
        return Verdict(accepted, score, current_score)

    def give_up(self) -> None:
        """Books a lost fit. The current version stays; the next period tries again, with the same examples and more.

        Raises:
            IntegrityError: No fit is in progress.
        """
        self._num_new += self._end_fit()

    @property
    def _has_grown(self) -> bool:
        """Whether the train set has grown since the last fit, even a lost or rejected one: none is repeated at once."""
        return math.isfinite(self._growth) and len(self._examples) > (1 + self._growth) * self._num_at_fit

    def _end_fit(self) -> int:
        if self._num_fitting is None:
            raise IntegrityError("a fit ended that had not begun")
        num_fitting, self._num_fitting = self._num_fitting, None
        return num_fitting

    def learn(self, now: float, fit: Callable[[list[Example]], Model]) -> Verdict | None:
        """Runs ``begin``, the fit, and ``judge``; None if no fit was due. An error of ``fit`` passes through."""
        examples = self.begin(now)
        if examples is None:
            return None
        try:
            model = fit(examples)
        except BaseException:
            self.give_up()
            raise
        return self.judge(model)

    def check_integrity(self) -> None:
        """Raises IntegrityError unless the counts agree with each other."""
        if (self._current is None) != (self._version == 0):
            raise IntegrityError(f"version {self._version} of {self._current}")
        if self._num_new < 0 or self._num_fitting == 0:
            raise IntegrityError(f"{self._num_new} new examples, a fit to {self._num_fitting} new ones")
        if len(self._held_back) > self._num_seen // HELD_BACK_EVERY:
            raise IntegrityError(f"{len(self._held_back)} held back of {self._num_seen}")

"""Continuous learning of output lengths (Magnus III-B): what is learned from, when, and whether the result may serve.

Nothing here knows what a model is. The paper adds what was predicted badly to the train set and trains anew every
three minutes. It does not ask whether the result is better; here it must be no worse on recent requests that nobody
trained on.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from core.errors import IntegrityError
from core.learning import ErrorRule, Schedule

RULE = ErrorRule(min_error=10.0, min_share=0.1)
"""In tokens: which outputs are learned from."""

PERIOD_S = 180.0
"""Between the beginnings of two fits."""

HELD_BACK_EVERY = 5
"""One of so many finished requests is never trained on."""

MAX_HELD_BACK = 400
"""The recent window: so many of those, the newest."""

MIN_HELD_BACK = 20
"""With fewer no version can be told from another, and none is fitted."""

MAX_EXAMPLES = 20_000
"""The train set; its oldest go."""

Example = TypeVar("Example")
Model = TypeVar("Model")


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Example]):
    """A request that ended, beside what was foreseen of it.

    Attributes:
        example: What a model is fitted to and judged by.
        predicted: Output length that was foreseen, in tokens; None if nothing was.
        actual: Output length, in tokens.
        censored: The output was cut off: its length is not that of the answer, and is no target.
    """

    example: Example
    predicted: float | None
    actual: float
    censored: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a newly fitted model.

    Attributes:
        accepted: It has replaced the one before.
        score: Its error on the recent window.
        current_score: That of the one before, on the same window; None if there was none.
    """

    accepted: bool
    score: float
    current_score: float | None


class ContinuousLearning(Generic[Example, Model]):
    """The life of a model: ``observe`` what ends, ``begin`` a fit when one is due, then ``judge`` or ``give_up``.

    The fit itself runs wherever the caller likes (``predictor.learning_process``), and meanwhile requests go on ending.

    Args:
        score: Error of a model on examples, such as the RMSE; lower is better.
        current: The version that serves already, if there is one.
        examples: What that was trained on; new ones are added to them.
        period_s: Seconds between the beginnings of two fits.
    """

    def __init__(
        self,
        score: Callable[[Model, Sequence[Example]], float],
        current: Model | None = None,
        examples: Iterable[Example] = (),
        period_s: float = PERIOD_S,
    ) -> None:
        self._score = score
        self._current = current
        self._version = 0 if current is None else 1
        self._examples = deque(examples, maxlen=MAX_EXAMPLES)
        self._held_back: deque[Example] = deque(maxlen=MAX_HELD_BACK)
        self._schedule = Schedule(period_s)
        self._num_seen = 0
        self._num_new = 0  # examples that no fit has begun with
        self._num_fitting: int | None = None  # those of them that the fit under way began with

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
        """A fit has begun and neither been judged nor given up."""
        return self._num_fitting is not None

    def observe(self, outcomes: Iterable[Outcome[Example]]) -> None:
        """Requests have ended, oldest first: some are held back, of the others ``RULE`` picks those to train on."""
        for outcome in outcomes:
            if outcome.censored:
                continue
            self._num_seen += 1
            if self._num_seen % HELD_BACK_EVERY == 0:
                self._held_back.append(outcome.example)
            elif outcome.predicted is None or RULE.is_wrong(outcome.predicted, outcome.actual):
                self._examples.append(outcome.example)
                self._num_new += 1

    def begin(self, now: float) -> list[Example] | None:
        """The train set to fit to, if a fit is due: a period is over, there is something new, none is under way."""
        if not self._schedule.claim(now) or self.is_fitting or not self._num_new:
            return None
        if len(self._held_back) < MIN_HELD_BACK:
            return None
        self._num_fitting, self._num_new = self._num_new, 0
        return list(self._examples)

    def judge(self, model: Model) -> Verdict:
        """The fit has come to this: takes it over if its score on the recent window is no worse. Two scorings.

        Raises:
            IntegrityError: no fit is under way.
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
        """The fit was lost. The current version stays; the next period tries again, with the same examples and more.

        Raises:
            IntegrityError: no fit is under way.
        """
        self._num_new += self._end_fit()

    def _end_fit(self) -> int:
        if self._num_fitting is None:
            raise IntegrityError("a fit ends that has not begun")
        num_fitting, self._num_fitting = self._num_fitting, None
        return num_fitting

    def learn(self, now: float, fit: Callable[[list[Example]], Model]) -> Verdict | None:
        """``begin``, fit here and now, ``judge``; None if no fit was due. An error of ``fit`` passes through."""
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

"""A row of a reproduction, the figure that it is compared with, an entry of the register, and common settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from farsight.core.config.scheduling import SchedulerConfig
from farsight.core.errors import InvalidValueError
from farsight.policies.settings import MlfqRules

Verdict = Literal["ok", "fitted", "off", "open", "exempt"]
Basis = Literal["printed", "range", "order", "own", "fitted", "exempt"]

ENOUGH_DRAWS = 3
"""From so many drawn workloads on, a range or an order can be told from chance."""

NOISE = 0.03
"""Where no more than the mean of such draws is kept, so large a share counts as chance."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A number or a range, with a tolerance for ours.

    Attributes:
        low: The number itself, or the lower end; -inf without one.
        high: The upper end; inf without one.
        slack: How far beyond ``low`` and ``high`` ours may lie.
    """

    low: float
    high: float
    slack: float = 0.0

    def __post_init__(self) -> None:
        if not self.low <= self.high or (math.isinf(self.low) and math.isinf(self.high)):
            raise InvalidValueError("figure", (self.low, self.high), "a number, or a range with at least one end")
        if not 0 <= self.slack < math.inf:
            raise InvalidValueError("slack", self.slack, "a finite number >= 0")

    @property
    def is_range(self) -> bool:
        return self.low != self.high

    @property
    def decides(self) -> bool:
        """False for a number whose tolerance is as large as itself: 0 would agree with it, or it is 0."""
        return self.is_range or self.slack == 0 or self.slack < abs(self.low)

    def nearest_end(self, ours: float) -> float:
        """The end of a range that is nearest to ours."""
        return min((end for end in (self.low, self.high) if math.isfinite(end)), key=lambda end: abs(end - ours))

    @property
    def value(self) -> float:
        """NaN for a range."""
        return self.low if self.low == self.high else math.nan

    def holds(self, ours: float) -> bool:
        """Whether ours agrees; False for NaN, which was not measured."""
        return self.low - self.slack <= ours <= self.high + self.slack

    def as_json(self) -> float | list[float | None]:
        """The number, or both ends, with null for a missing end."""
        if self.low == self.high:
            return self.low
        return [None if math.isinf(end) else end for end in (self.low, self.high)]

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.low:.4g}"
        if math.isinf(self.high):
            return f">= {self.low:.4g}"
        return f"<= {self.high:.4g}" if math.isinf(self.low) else f"{self.low:.4g} to {self.high:.4g}"


def near(value: float, *, share: float = 0.0, points: float = 0.0) -> Figure:
    """A number with a relative or absolute tolerance, whichever is larger."""
    return Figure(value, value, max(share * abs(value), points))


def per_cent(value: float) -> Figure:
    """A printed percentage: ours may miss it by a quarter of it, and by 2 points where that is more."""
    return near(value, share=0.25, points=2.0)


def between(low: float, high: float) -> Figure:
    """A range without slack."""
    return Figure(low, high)


def at_least(value: float) -> Figure:
    return Figure(value, math.inf)


def at_most(value: float) -> Figure:
    return Figure(-math.inf, value)


@dataclass(frozen=True, slots=True)
class Printed:
    """The source prints this figure: a number, or a range, which is counted apart."""

    figure: Figure

    @property
    def basis(self) -> Basis:
        return "range" if self.figure.is_range else "printed"


@dataclass(frozen=True, slots=True)
class Fitted:
    """The source prints this figure, and an unknown setting was fitted to it or to a figure that decides it."""

    figure: Figure
    basis: Basis = "fitted"


@dataclass(frozen=True, slots=True)
class Own:
    """A figure of this project, not of the source: computed from a formula, or a target set beforehand."""

    figure: Figure
    basis: Basis = "own"


@dataclass(frozen=True, slots=True)
class OrderCheck:
    """The source gives an order or the shape of a curve, without a number.

    Attributes:
        holds: Whether ours has that order or shape.
        fitted: Whether an unknown setting was fitted to figures that decide the order.
        bound: What ours is compared with, such as 1 for a ratio; None where that is no one number.
    """

    holds: bool
    fitted: bool = False
    bound: float | None = None

    @property
    def basis(self) -> Basis:
        return "fitted" if self.fitted else "order"


@dataclass(frozen=True, slots=True)
class Exempt:
    """The source prints no figure to compare with, or excludes it, or the data is unavailable."""

    reason: str
    basis: Basis = "exempt"

    def __post_init__(self) -> None:
        if not self.reason.strip():
            raise InvalidValueError("reason", self.reason, "why nothing is compared")


Check = Printed | Fitted | Own | OrderCheck | Exempt


@dataclass(frozen=True, slots=True)
class Draws:
    """How often the workload behind a row was drawn.

    Attributes:
        number: 0 where nothing is drawn: a formula, a worked example, a whole trace.
        values: Ours for each draw, as far as they are kept.
    """

    number: int = 1
    values: tuple[float, ...] = ()

    def tell(self, ours: float, bound: float | None) -> bool:
        """Whether ours is beyond a bound by more than chance: all draws on one side, two standard errors away."""
        if self.number == 0:
            return True
        if self.number < ENOUGH_DRAWS or bound is None:
            return False
        if not self.values:
            return abs(ours - bound) > NOISE * abs(bound)
        sides = {value > bound for value in self.values}
        error = statistics.stdev(self.values) / math.sqrt(len(self.values))
        return len(sides) == 1 and abs(ours - bound) > 2 * error


EXACT, ONE_DRAW = Draws(0), Draws(1)


def judge(check: Check, ours: float, draws: Draws = ONE_DRAW) -> Verdict:
    """The verdict on a row, computed only from its number, its reference and how often it was drawn.

    ``fitted`` marks an agreement that proves little; a missed figure is ``off`` even if a setting was fitted to it.
    ``open`` is an agreement within chance: an order or a range that too few draws support, or a tolerance as large as
    the printed number.
    """
    verdict = _plain(check, ours)
    if verdict not in ("ok", "fitted"):
        return verdict
    match check:
        case OrderCheck():
            return verdict if draws.tell(ours, check.bound) else "open"
        case Printed(figure) if figure.is_range:
            return verdict if draws.tell(ours, figure.nearest_end(ours)) else "open"
        case Printed(figure) | Fitted(figure):
            return verdict if figure.decides else "open"
    return verdict


def _plain(check: Check, ours: float) -> Verdict:
    match check:
        case Exempt():
            return "exempt"
        case OrderCheck(holds, fitted):
            return ("fitted" if fitted else "ok") if holds else "off"
        case Fitted(figure):
            return "fitted" if figure.holds(ours) else "off"
        case Printed(figure) | Own(figure):
            return "ok" if figure.holds(ours) else "off"


@dataclass(frozen=True, slots=True)
class Row:
    """A figure or an order in the source, and the result here.

    Attributes:
        name: Name of the reproduction.
        setting: Which line, point or system of the table or figure.
        ours: NaN if it was not measured; ``note`` or the reason of the exemption says why.
        note: The tolerance and remarks; for exempt rows the reason comes first.
        draws: How often the workload was drawn.
    """

    name: str
    setting: str
    metric: str
    check: Check
    ours: float
    note: str = ""
    draws: Draws = ONE_DRAW

    def __post_init__(self) -> None:
        if not isinstance(self.check, Check):
            expected = "a printed figure, an order, a fit, a figure of our own or an exemption with its reason"
            raise InvalidValueError(f"check of {self.name}, {self.setting}, {self.metric}", self.check, expected)

    @property
    def verdict(self) -> Verdict:
        return judge(self.check, self.ours, self.draws)

    @property
    def reported(self) -> Figure | None:
        """The printed figure, or None."""
        return self.check.figure if isinstance(self.check, Printed | Fitted) else None

    @property
    def expected(self) -> Figure | None:
        """The figure of a formula or of the project's own target, or None."""
        return self.check.figure if isinstance(self.check, Own) else None

    @property
    def ratio(self) -> float:
        """Ours over the figure; NaN without one, for a range and for 0."""
        figure = self.reported or self.expected
        return self.ours / figure.value if figure is not None and figure.value else math.nan

    @property
    def remark(self) -> str:
        reason = self.check.reason if isinstance(self.check, Exempt) else ""
        return "; ".join(filter(None, (reason, self.note)))

    def as_dict(self) -> dict[str, object]:
        """The fields that ``--json`` prints; NaN becomes null."""
        return {
            "name": self.name,
            "setting": self.setting,
            "metric": self.metric,
            "basis": self.check.basis,
            "reported": None if self.reported is None else self.reported.as_json(),
            "expected": None if self.expected is None else self.expected.as_json(),
            "ours": None if math.isnan(self.ours) else self.ours,
            "ratio": None if math.isnan(self.ratio) else self.ratio,
            "verdict": self.verdict,
            "note": self.remark,
            "draws": self.draws.number,
            "values": list(self.draws.values),
        }


def count_line(rows: Iterable[Row]) -> str:
    """The number of rows by verdict; agreements are listed by the kind of their reference."""
    kinds: list[str] = [each.check.basis if each.verdict == "ok" else each.verdict for each in rows]
    words: dict[str, str] = {
        "ok against printed numbers": "printed",
        "ok (printed ranges)": "range",
        "ok (orders)": "order",
        "ok (own formulas and targets)": "own",
        "fitted": "fitted",
        "off": "off",
        "open": "open",
        "exempt": "exempt",
    }
    return f"{len(kinds)} rows: " + ", ".join(f"{kinds.count(kind)} {word}" for word, kind in words.items())


@dataclass(frozen=True, slots=True)
class Reproduction:
    """A published table or figure.

    Attributes:
        source: Paper, section, table or figure.
        cells: Independent parts, each a function without arguments; they may run in processes of their own.
    """

    name: str
    source: str
    cells: tuple[Callable[[], list[Row]], ...]

    def rows(self) -> Iterable[Row]:
        for cell in self.cells:
            yield from cell()


UNBOUND = SchedulerConfig(max_gap_ms=0.0)
"""No paper bounds the gap that prompts make between two tokens of a stream."""

ARTIFACT = SchedulerConfig(max_gap_ms=0.0, quantum_s=0.01, starve_limit_s=3.0)
"""The numbers of FastServe's artifact."""

FIXED_QUANTUM = MlfqRules(follows_cost=False)
"""The artifact's quantum is what was measured before the run."""

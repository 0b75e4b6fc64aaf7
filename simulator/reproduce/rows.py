"""One line of a reproduction, and the register of all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Literal

Verdict = Literal["ok", "off", "exempt"]


@dataclass(frozen=True, slots=True)
class Row:
    """A figure as reported and as it comes out here.

    Attributes:
        name: Of the reproduction.
        setting: Which line, point or system of the table or figure.
        reported: NaN where the source gives an order or a shape and no number.
        ours: NaN where the data is not at hand; ``note`` then says where to get it.
        verdict: ``ok`` within the tolerance stated in ``note``, ``exempt`` if no tolerance was promised beforehand.
    """

    name: str
    setting: str
    metric: str
    reported: float
    ours: float
    verdict: Verdict
    note: str = ""

    @property
    def ratio(self) -> float:
        return self.ours / self.reported if self.reported else math.nan

    def as_dict(self) -> dict[str, object]:
        """What ``--json`` prints; a number that is not one is null."""
        values = {**asdict(self), "ratio": self.ratio}
        return {key: None if isinstance(value, float) and math.isnan(value) else value for key, value in values.items()}


def within(ours: float, reported: float, share: float) -> Verdict:
    """Whether ours differs from the reported figure by at most this share of it."""
    return "ok" if abs(ours - reported) <= share * abs(reported) else "off"


def close(ours: float, reported: float, points: float) -> Verdict:
    """Whether ours differs from the reported figure by at most so much."""
    return "ok" if abs(ours - reported) <= points else "off"


def holds(condition: bool) -> Verdict:
    return "ok" if condition else "off"


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

"""One measured claim, and how it is timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Row:
    """``verdict`` is ``ok`` if ``measured`` is on the right side of ``target``."""

    claim: str
    measured: float
    target: float
    unit: str
    higher_is_better: bool = False

    @property
    def verdict(self) -> str:
        holds = self.measured >= self.target if self.higher_is_better else self.measured <= self.target
        return "ok" if holds else "off"

    def as_dict(self) -> dict[str, object]:
        return {**asdict(self), "verdict": self.verdict}


def median_s(run: Callable[[], object], repeats: int = 30) -> float:
    """Median seconds of a call, after one that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return sorted(times)[repeats // 2]

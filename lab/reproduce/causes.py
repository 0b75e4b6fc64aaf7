"""Why a printed figure is missed: one sentence for each, and the run that shows it, as ``causes.toml`` has them."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Cause:
    """The cause of some missed figures.

    Attributes:
        reproduction: Its name in the register.
        settings, metrics: Regular expressions that find the rows.
        why: One sentence, without its full stop.
        shown_by: Name in the register of the run that shows it.
    """

    reproduction: str
    why: str
    shown_by: str
    settings: str = ""
    metrics: str = ""

    @property
    def run(self) -> str:
        """The command."""
        return f"python -m lab.reproduce {self.shown_by}"

    def explains(self, reproduction: str, setting: str, metric: str) -> bool:
        """Whether this row's miss has this cause."""
        return (
            self.reproduction == reproduction
            and re.search(self.settings, setting) is not None
            and re.search(self.metrics, metric) is not None
        )


CAUSES = tuple(
    Cause(**fields) for fields in tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))["cause"]
)


def cause_of(reproduction: str, setting: str, metric: str) -> Cause | None:
    """Returns the first cause that explains a missed row; None where none is known."""
    return next((cause for cause in CAUSES if cause.explains(reproduction, setting, metric)), None)
